"""The exceptions that a user can cause. The command line turns these, and only these, into one line."""

from importlib.util import find_spec


class BierError(Exception):
    """Something the user can mend; the message says what was expected and what was found."""


class ConfigError(BierError, ValueError):
    """A setting is unknown, of the wrong type, out of range or in conflict with another."""


class DataError(BierError, ValueError):
    """A data set, a table, an image or a batch is missing, broken or not what was promised."""


class ModelError(BierError):
    """A backbone, a model file or a set of weights cannot be had or does not fit."""


class TrainingError(BierError):
    """A run cannot go on: a loss that is not finite, a full disk, a checkpoint that does not fit."""


class SearchError(BierError):
    """An index or a store is missing, damaged, unreachable or asked for what it does not hold."""


class MissingExtraError(BierError, ImportError):
    """An optional dependency is not installed; the message names the extra that installs it."""


def needs(what: str, extra: str, *modules: str) -> None:
    """Raise an error that names the extra unless all modules can be imported. They are not imported here.

    Call it right before the import: `needs("An HNSW index", "index", "faiss")`, then `import faiss`.

    Args:
        what: The feature, as the subject of the message.
        extra: The extra of `bier-ml` in pyproject.toml that installs the modules.
        modules: Top-level names as they are imported.

    Raises:
        MissingExtraError: If one of the modules is not installed.
    """
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise MissingExtraError(
            f"{what} needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed. "
            f"Run: pip install 'bier-ml[{extra}]'"
        )
