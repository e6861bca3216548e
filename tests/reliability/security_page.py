"""Writes the figures of `make soak` into SECURITY.md; the text around them stays.

python tests/reliability/security_page.py
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from bier.paper.tables import fill

ROOT = Path(__file__).parents[2]
PAGE, RESULTS = ROOT / "SECURITY.md", ROOT / "docs" / "results" / "reliability.json"
NOT_RUN = "The long form has not been run as a whole yet: `make soak`."
ROWS = {  # by the file of the tests
    "test_damaged": "truncated and bit-flipped models, checkpoints, configs, embeddings, shards, indexes, caches; "
    "pickles in their place",
    "test_images": "malformed and mutated images in every format that is read, pipes, links, URLs, names of any bytes",
    "test_tables": "malformed tables and data sets, unreadable files",
    "test_configs": "settings, options, hosts and configs that make no sense",
    "test_disk": "full and read-only disks at every write of a command",
    "test_outputs": "places that cannot be written",
    "test_kills": "SIGKILL at random moments of train, embed, index and paper, resumed to the same bits; two at once",
    "test_days": "days: sequences of ordinary commands and changes, with files of a user's beside ours",
    "test_memory": "embed, index and evaluate in the memory that they need, and in less",
    "test_numbers": "strange numbers; bfloat16 and float32 against float64",
    "test_server": "the server: load, requests, uploads, headers, paths, names, connections",
}


def figures_of(record: dict[str, Any] | None) -> str:
    if record is None:
        return NOT_RUN
    columns = ("tried", "survived", "data lost")
    lines, total = [], Counter[str]()
    for file, families in sorted(record["families"].items(), key=lambda item: list(ROWS).index(item[0])):
        counts = Counter[str]()
        for family in families.values():
            counts.update(family)
        total.update(counts)
        lines.append((ROWS[file], counts))
    tests = record["tests"]
    share = "" if record["share"] == 1 else f" {record['share']:g} times the cases."
    skipped = f", {tests['skipped']} skipped" if tests["skipped"] else ""
    failed = tests["failed"] + tests["error"]
    return "\n".join(
        [
            f"{record['date']}, commit {record['commit']}, {record['minutes']:.0f} minutes on {record['machine']};",
            f"{tests['passed']} tests passed, {failed} failed{skipped}.{share}",
            "",
            "| cases | tried | as promised | data lost |",
            "|---|---|---|---|",
            *(
                f"| {name} | {' | '.join(f'{counts[column]:,}' for column in columns)} |"
                for name, counts in [*lines, ("**all**", total)]
            ),
            "",
            *(f"- {remark}" for remark in record["remarks"]),
        ]
    )


def page_of(text: str, results: Path = RESULTS) -> str:
    record = json.loads(results.read_text(encoding="utf-8")) if results.is_file() else None
    return fill(text, "reliability", figures_of(record)) or text


if __name__ == "__main__":
    PAGE.write_text(page_of(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
