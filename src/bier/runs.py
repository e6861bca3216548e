"""A run folder. Only this module knows the names in it.

config.toml has every setting and how the data was divided; data.csv has each image of the run with its part, its class
and a stamp. Both are written before the first step.
"""

import csv
import json
from collections.abc import Iterable, Mapping
from functools import cached_property
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

from bier import files
from bier.config import Config, read_config
from bier.errors import ConfigError, DataError, TrainingError

MAPS = "trunk"  # folders of cached maps of frozen stages are called trunk-DIGEST


class RecordedImage(NamedTuple):
    """An image as it was when the run began.

    split: "train", "validation", "test" and so on. label: the name of its class, and number that class's number there.
    path: its id in the data set, or a digest of the row for data that is no files. size, time: bytes of the file and
    the time of its last change in nanoseconds; both are 0 where there is no file.
    """

    split: str
    label: str
    path: str
    number: int
    size: int
    time: int


class Run:
    """The files of a run, by name. Nothing is read before it is asked for."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config_file = self.path / "config.toml"
        self.job_file = self.path / ".torchrun"  # the id of the job that began the run
        self.data_file = self.path / "data.csv"
        self.metrics_file = self.path / "metrics.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.report = self.path / "report"
        self.untrained = self.path / "untrained"  # embeddings of the backbone that the run started from

    def __str__(self) -> str:
        return str(self.path)

    @property
    def exists(self) -> bool:
        return self.config_file.is_file()

    def check_absent(self) -> None:
        """A ConfigError where the folder holds a run."""
        if self.exists:
            raise ConfigError(f"{self} already holds a run. Resume it with --resume {self}, or choose another --out.")

    def model(self, step: int | None = None) -> Path:
        """The folder of the model that was kept, or of the snapshot of a step."""
        return self.path / ("model" if step is None else f"model-step-{step}")

    def classifier(self, step: int | None = None) -> Path:
        """The file beside a model that was trained to classify, with the weights of its classifier."""
        return self.path / f"{self.model(step).name.replace('model', 'classifier')}.safetensors"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step}"

    def complete(self) -> list[Path]:
        """The complete checkpoints, oldest first; not one that was being written when the run was killed."""
        paths = [path for path in self.checkpoints.glob("step-*") if path.name.removeprefix("step-").isdigit()]
        return sorted(paths, key=step_of)

    def newest(self) -> Path | None:
        """The newest complete checkpoint."""
        complete = self.complete()
        return complete[-1] if complete else None

    @property
    def step(self) -> int:
        """The step of the newest checkpoint, 0 where there is none."""
        newest = self.newest()
        return step_of(newest) if newest else 0

    @cached_property
    def _config(self) -> tuple[Config, dict[str, dict[str, Any]]]:
        return read_config(self.config_file)

    @property
    def config(self) -> Config:
        return self._config[0]

    @property
    def records(self) -> dict[str, dict[str, Any]]:
        """What config.toml says about how the run was made, which are no settings: `made_by`, `split`, `choice`."""
        return self._config[1]

    def write_config(self, config: Config, records: Mapping[str, Mapping[str, Any]]) -> None:
        files.write(self.config_file, config.to_toml(records).encode())
        self.__dict__.pop("_config", None)

    @cached_property
    def images(self) -> tuple[RecordedImage, ...] | None:
        """The images of all parts, as they were when the run began; None for a run without such a record."""
        if not self.data_file.is_file():
            return None
        try:
            with self.data_file.open(encoding="utf-8", newline="") as file:
                heading, *rows = csv.reader(file)
            if tuple(heading) != RecordedImage._fields:
                raise ValueError(f"its heading is {','.join(heading)[:100]}")
            return tuple(RecordedImage(a, b, c, int(d), int(e), int(f)) for a, b, c, d, e, f in rows)
        except (OSError, ValueError, TypeError, csv.Error) as error:
            raise DataError(
                f"{self.data_file}, the record of the images of the run, cannot be read: {error}."
            ) from error

    @property
    def classes(self) -> dict[str, tuple[str, ...]] | None:
        """The names of the classes of each part, such as "train" and "test", when the run began."""
        if self.images is None:
            return None
        names: dict[str, dict[str, None]] = {}
        for image in self.images:
            names.setdefault(image.split, {})[image.label] = None
        return {split: tuple(labels) for split, labels in names.items()}

    def write_images(self, images: Iterable[RecordedImage]) -> None:
        text = StringIO()
        csv.writer(text, lineterminator="\n").writerows([RecordedImage._fields, *images])
        files.write(self.data_file, text.getvalue().encode())

    def metrics(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl, without an incomplete last line that a killed run has left."""
        path = self.metrics_file
        lines = path.read_bytes().splitlines() if path.exists() else []
        rows: list[dict[str, Any]] = []
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
                if type(row["step"]) is not int:
                    raise TypeError(f"the step is {row['step']!r}")
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                if number == len(lines):
                    break
                raise TrainingError(
                    f"Line {number} of {path} is damaged ({error}). Remove the line, or the lines from there on; "
                    "a resumed run writes those after its checkpoint again."
                ) from error
            rows.append(row)
        return rows

    def maps(self) -> list[Path]:
        """The folders with maps of frozen stages."""
        return sorted(self.path.glob(f"{MAPS}-*"))


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))
