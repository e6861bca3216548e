"""Folders that we write and users look at, such as reports: what is in them and not ours stays as it is."""

import errno
import json
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from bier.errors import WriteError
from bier.files import checksum, exchange, flush_folder, folder_aside, linked, read_file, write, writing

RECORD = ".bier.json"


@contextmanager
def own_folder(path: Path, kind: str) -> Iterator[Path]:
    """As `folder_aside` for a folder in which users may keep files of their own: theirs stay as they are.

    kind: what the folder is, such as "report". It must be new, empty or of the same kind already, which its record
    says: `RECORD` lists the files that we wrote with their checksums. These alone are replaced and removed, and not
    where somebody has changed them since. Beside the files of others a kill may leave some files of the old folder and
    some of the new one, each of them complete and in the record; without such files the whole folder is exchanged.
    """
    check_own_folder(path, kind)
    with folder_aside(path, lambda aside, target: _put_own(aside, target, kind)) as aside:
        yield aside


def check_own_folder(path: Path, kind: str) -> None:
    """A WriteError where `own_folder` would refuse this folder, to be told before the work for its files is done."""
    _own_files(linked(path), kind)


def folder_kind(folder: Path) -> str | None:
    """What `own_folder` has written here, such as "report"; None for any other folder."""
    record = _read_record(folder)
    return None if record is None else record[0]


def written_by_us(folder: str | os.PathLike[str], names: Collection[str]) -> str | None:
    """What we have written into a folder with files of these names: "index", "run", "model" or the like, else None."""
    if RECORD in names:
        return folder_kind(Path(folder))
    if {"config.toml", "metrics.jsonl"} <= set(names):
        return "run"
    if "model.safetensors" in names and {"model.json", "config.json"} & set(names):
        return "model"
    if "manifest.json" in names:
        try:
            return "index" if json.loads(read_file(Path(folder, "manifest.json")))["format"] == "bier-index" else None
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
    return None


def mark(folder: Path, kind: str) -> None:
    """Make `folder_kind` say what a folder is. Its files are not listed: their writers know them by name."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if folder_kind(folder) != kind:
            _write_record(folder, kind, {})


def _own_files(folder: Path, kind: str) -> dict[str, list[str]]:
    """The files that we wrote, by name, with the checksums that they may have."""
    if folder.exists() and not folder.is_dir():
        raise _refused(f"The folder of the {kind} must be a folder. Got {folder}, which is a file.")
    with writing(folder):
        names = {file.name for file in folder.iterdir()} if folder.exists() else set()
    record = _read_record(folder)
    if record is None or record[0] != kind:
        other = f"a {record[0]}" if record else repr(sorted(names)[0]) if names else None
        if other is not None:
            raise _refused(f"The folder {folder} must be new, empty or an earlier {kind}. It holds {other}.")
        return {}
    for name, sums in record[1].items():
        file = folder / name
        if name in names and (file.is_symlink() or not file.is_file() or checksum(file) not in sums):
            raise _refused(f"{file} was changed since it was written. Move it, or choose another folder.")
    return record[1]


def _refused(message: str) -> WriteError:
    return WriteError(errno.EEXIST, message)


def _read_record(folder: Path) -> tuple[str, dict[str, list[str]]] | None:
    """(kind, files) of the record of a folder of ours; None where there is none that can be read."""
    try:
        record = json.loads(read_file(folder / RECORD))
        kind, ours = record["kind"], record["files"]
        if isinstance(kind, str) and all(Path(name).name == name and isinstance(ours[name], list) for name in ours):
            return kind, dict(ours)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    return None


def _write_record(folder: Path, kind: str, ours: Mapping[str, list[str]]) -> None:
    write(folder / RECORD, json.dumps({"kind": kind, "files": ours}, indent=2).encode())


def _put_own(aside: Path, path: Path, kind: str) -> None:
    new = {file.name: [checksum(file)] for file in sorted(aside.iterdir())}
    _write_record(aside, kind, new)
    old = _own_files(path, kind)  # again: it may have changed while the new files were made
    others = {file.name for file in path.iterdir()} - {*old, RECORD} if path.exists() else set()
    if not others:
        exchange(aside, path)
        return
    if taken := sorted(others & set(new)):
        raise _refused(f"{path / taken[0]} must be a file that bier wrote, to be replaced. Move it.")
    _write_record(path, kind, {name: [*old.get(name, ()), *new.get(name, ())] for name in {**old, **new}})
    for name in new:
        (aside / name).replace(path / name)
    for name in set(old) - set(new):
        (path / name).unlink(missing_ok=True)
    (aside / RECORD).replace(path / RECORD)
    flush_folder(path)
