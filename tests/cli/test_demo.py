"""`bier demo`, cut to a few steps: both methods, one comparison, a report; runs that are there are respected."""

import json
from collections.abc import Callable
from pathlib import Path


def test_demo_compares_and_reports(cli: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    out = tmp_path / "demo"
    code, printed, said = cli("demo", "--steps", 3, "--out", out, "--json")
    assert code == 0, said
    found = json.loads(printed)
    means = {method: row["R@1"]["mean"] for method, row in found["methods"].items()}
    assert set(means) == {"baseline", "a-bier"}
    assert found["gain"] == means["a-bier"] - means["baseline"]
    assert found["methods"]["baseline"]["classifier_correlation"] is None
    assert found["methods"]["a-bier"]["training_seconds"]["mean"] > 0
    page = Path(found["report"])
    assert page == out / "a-bier-0" / "report" / "index.html"
    assert "baseline" in page.read_text(encoding="utf-8").lower()

    code, _, said = cli("demo", "--steps", 2, "--out", out)
    assert code == 2
    assert "has reached step 3; 'train.steps' must be at least that. Got 2 instead." in said
