"""Exceptions that a user can cause; the command line shows their message as one line."""

from collections.abc import Iterable
from difflib import get_close_matches
from importlib import import_module
from types import ModuleType


class BierError(Exception):
    """An error that the user can correct; the message says what was expected and what was found."""


class ConfigError(BierError, ValueError):
    """A setting is unknown, of the wrong type, out of range or in conflict with another."""


class DataError(BierError, ValueError):
    """A data set, a table, an image or a batch is missing, damaged or not as expected."""


class ModelError(BierError):
    """A backbone, a model file or a set of weights is missing, damaged or does not fit."""


class TrainingError(BierError):
    """A run cannot go on: a loss that is not finite, a full disk, a checkpoint that does not fit."""


class SearchError(BierError):
    """An index or a store is missing, damaged or unreachable, or does not hold what it is asked for."""


class BusyError(BierError):
    """Another process is using the same run, index or file."""


class WriteError(BierError, OSError):
    """A file or a folder could not be written; what was there before is still there. `errno` says why."""

    def __str__(self) -> str:
        return str(self.strerror)


class MissingExtraError(BierError, ImportError):
    """A package that an extra of bier-ml installs is not there."""


def needs(module: str, extra: str) -> ModuleType:
    """Import `module`, which `pip install 'bier-ml[extra]'` installs; without it, an error that says so."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise  # the package is there, and something that it needs is not
        raise MissingExtraError(
            f"This needs the package '{error.name}'. Install it with: pip install 'bier-ml[{extra}]'"
        ) from error


def did_you_mean(name: object, known: Iterable[str], cutoff: float = 0.6) -> str:
    """The end of a message about an unknown name: " Did you mean 'NEAREST'?", or nothing if no name is close to it."""
    near = get_close_matches(str(name), list(known), n=1, cutoff=cutoff)
    return f" Did you mean '{near[0]}'?" if near else ""
