"""Results: one JSON file a run, complete or absent. Tables and plots are drawn from these alone."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bier import files
from bier.errors import DataError

Result = Mapping[str, Any]


class Results:
    """OUT/results/KEY.json."""

    def __init__(self, out: Path) -> None:
        self.folder = out / "results"

    def path(self, key: str) -> Path:
        return self.folder / f"{key}.json"

    def read(self, key: str) -> Result | None:
        """The result of this key, or None where there is none yet."""
        return self._load(self.path(key)) if self.path(key).is_file() else None

    def seeds(self, digest: str) -> list[Result]:
        """The results of one row, by seed."""
        found = [self._load(path) for path in self.folder.glob(f"{digest}-*.json")]
        return sorted(found, key=lambda result: int(result["seed"]))

    def write(self, result: Result) -> Path:
        path = self.path(result["key"])
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            files.write(path, (json.dumps(dict(result), indent=1, allow_nan=False) + "\n").encode())
        except OSError as error:
            raise DataError(f"Cannot write {path}: {error.strerror or error}.") from error
        return path

    def _load(self, path: Path) -> Result:
        try:
            content: Result = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DataError(
                f"{path} must be a result of `bier paper run`. Remove it to run it again: {error}."
            ) from error
        return content
