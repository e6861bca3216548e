"""The exceptions that a user can cause. The command line turns these, and only these, into one line."""


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
