"""What can be searched: the base class of the embedded index and of external engines, with its types and checks.

What a filter means, in every store. `where` maps keys to a value or to several (a list, a set, a generator, an array).
An image passes if it passes for each key by one of the values; without any value, none passes.

    key     value               passes
    label   text, whole number  the label that reads the same: 3 and "3" are one label
    label   None                images without a label
    other   text                the same text, character by character ("a" is not "a\\0")
    other   True, False         this truth value, which is never 1 or 0
    other   number              an equal number: 1 and 1.0 are equal, 2**53 and 2**53 + 1 are not
    other   None                a null; an image without the key does not pass

The other keys are those of the metadata. A list or a mapping in the metadata passes nothing. Bytes, NaN, infinity and
whole numbers of more than 64 bits are refused.
"""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bier.errors import SearchError

Id: TypeAlias = str | int
Label: TypeAlias = str | int | None
Metadata: TypeAlias = Mapping[str, Any] | None
Floats: TypeAlias = NDArray[np.float32]
Rows: TypeAlias = NDArray[np.int64]
Mask: TypeAlias = NDArray[np.bool_]
Scalar: TypeAlias = str | float | None  # and int and bool, which Python counts among them
Where: TypeAlias = Mapping[str, Any]  # {"label": "Heron"}, {"label": ["Heron", "Gull"], "year": 2024}
Conditions: TypeAlias = dict[str, list[Scalar]]  # a checked filter; the values of `label` are text or None
Learners: TypeAlias = int | Sequence[int] | None
Columns: TypeAlias = tuple[list[Id], list[Label], list[Metadata]]


class Entry(NamedTuple):
    """One image of a collection: its id, its label if known, and the metadata stored with it."""

    id: Id
    label: Label = None
    metadata: Metadata = None


class Neighbours(NamedTuple):
    """The results of Q queries, best first. For a single query of shape (d,) the leading dimension is absent.

    ids: (Q, k) array of ids (int64 where all are whole numbers, else objects).
    scores: (Q, k) float32 dot products.
    rows: (Q, k) int64 positions inside the index; None for a store without positions.
    """

    ids: NDArray[Any]
    scores: Floats
    rows: Rows | None = None


_BLOCK = 65_536
SCAN_ROWS = 5_000  # with a filter that no more rows pass, the search is exact
LARGEST = 1e15  # products of larger vectors would not be finite in float32


def checked_vectors(vectors: ArrayLike, dimension: int | None = None, name: str = "vectors") -> Floats:
    """Any float array (N, d) as contiguous float32; an error that names the first row that is not finite."""
    array = np.asarray(vectors)
    if array.ndim != 2 or array.dtype.kind not in "fiu" or (dimension is None and array.shape[1] == 0):
        raise SearchError(
            f"The '{name}' parameter must be numbers of shape (N, d). "
            f"Got {array.dtype} of shape {tuple(array.shape)} instead."
        )
    if array.dtype in (np.int8, np.uint8):  # their lengths differ, so that products of them are no similarities
        raise SearchError(
            f"The '{name}' parameter must be floats. Got {array.dtype}, perhaps of `encode` with a precision."
        )
    if dimension is not None and array.shape[1] != dimension:
        raise SearchError(
            f"The '{name}' parameter must have {dimension} dimensions, as the index has. Got {array.shape[1]} instead."
        )
    with np.errstate(over="ignore"):  # a double too large for float32 becomes infinite and is reported below
        floats = np.ascontiguousarray(array, dtype=np.float32)
    for start in range(0, len(floats), _BLOCK):
        block = floats[start : start + _BLOCK]
        if not block.size or max(block.max(), -block.min()) <= LARGEST:  # false for NaN
            continue
        finite = np.isfinite(block).all(axis=1)
        if not finite.all():
            row = start + int(np.argmin(finite))
            raise SearchError(f"The '{name}' parameter must hold finite numbers. Row {row} has NaN or infinity.")
        raise SearchError(f"The '{name}' parameter must hold numbers of up to {LARGEST:g}. Got a larger one.")
    return floats


def checked_groups(groups: Sequence[int] | None, dimension: int) -> tuple[int, ...]:
    """The learners' sizes, summing to the dimension; without any, one learner has all of it."""
    sizes = (dimension,) if groups is None else tuple(int(size) for size in groups)
    if not sizes or min(sizes) < 1 or sum(sizes) != dimension:
        raise SearchError(
            f"The 'groups' parameter must be sizes above 0 that sum to {dimension}, the vectors' dimension. "
            f"Got {groups!r} instead."
        )
    return sizes


def checked_count(value: int, name: str, least: int = 1, most: int | None = None) -> int:
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not whole or value < least or (most is not None and value > most):
        limits = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise SearchError(f"The '{name}' parameter must be a whole number {limits}. Got {value!r} instead.")
    return int(value)


def checked_ids(ids: Sequence[Id] | NDArray[Any], count: int | None = None, unique: bool = True) -> list[Id]:
    """Ids as plain strings and ints; an error if they are of another type, not `count`, or not unique."""
    plain = _plain_list(ids)
    if not set(map(type, plain)) <= {str, int}:  # a loop over a million ids takes long
        for value in plain:
            if isinstance(value, bool) or not isinstance(value, str | int):
                raise SearchError(f"The 'ids' parameter must hold strings or whole numbers. Got {value!r} instead.")
    if count is not None and len(plain) != count:
        raise SearchError(f"The 'ids' parameter must hold one id per vector, {count}. Got {len(plain)} instead.")
    if unique and len(set(plain)) != len(plain):
        seen: set[Id] = set()
        twice = next(value for value in plain if value in seen or seen.add(value))  # type: ignore[func-returns-value]
        raise SearchError(f"The 'ids' parameter must hold unique ids. Got {twice!r} more than once.")
    return plain


def checked_labels(labels: Sequence[Label] | NDArray[Any] | None, count: int) -> list[Label]:
    if labels is None:
        return [None] * count
    plain = _plain_list(labels)
    if len(plain) != count:
        raise SearchError(f"The 'labels' parameter must hold one label per vector, {count}. Got {len(plain)} instead.")
    if not set(map(type, plain)) <= {str, int, type(None)}:
        for value in plain:
            if value is not None and not isinstance(value, str | int):
                raise SearchError(f"The 'labels' parameter must hold strings or whole numbers. Got {value!r} instead.")
    return plain


def checked_metadata(metadata: Sequence[Metadata] | None, count: int) -> list[Metadata]:
    if metadata is None:
        return [None] * count
    plain = list(metadata)
    if len(plain) != count:
        raise SearchError(
            f"The 'metadata' parameter must hold one mapping per vector, {count}. Got {len(plain)} instead."
        )
    for value in plain:
        if value is not None and not isinstance(value, Mapping):
            raise SearchError(f"The 'metadata' parameter must hold mappings or None. Got {value!r} instead.")
    return plain


def checked_columns(ids: Any, labels: Any, metadata: Any, count: int) -> Columns:
    """Ids, labels and metadata of `count` vectors, each checked."""
    return checked_ids(ids, count), checked_labels(labels, count), checked_metadata(metadata, count)


def checked_where(where: Where | None) -> Conditions:
    """A filter with a list of plain values for each key; the module's table says what they mean."""
    if where is None:
        return {}
    if not isinstance(where, Mapping):
        raise SearchError(f"The 'where' parameter must map keys to values. Got {type(where).__name__} instead.")
    return {
        _checked_key(key): [_checked_value(key, value) for value in _several(given)] for key, given in where.items()
    }


def _several(given: Any) -> list[Any]:
    alone = not isinstance(given, Iterable) or isinstance(given, str | bytes | bytearray | Mapping)
    if alone or (isinstance(given, np.ndarray) and given.ndim == 0):
        return [given]
    return _plain_list(given)


def _checked_key(key: Any) -> str:
    if not isinstance(key, str):
        raise SearchError(f"A key of the 'where' parameter must be text. Got {key!r} instead.")
    return key


def _checked_value(key: str, value: Any) -> Scalar:
    plain = value.item() if isinstance(value, np.generic | np.ndarray) else value
    if plain is None or isinstance(plain, str):
        return plain
    if isinstance(plain, int) and not (key == "label" and isinstance(plain, bool)):
        if key == "label":
            return str(plain)
        if -(2**63) <= plain < 2**63:
            return plain
    if isinstance(plain, float) and math.isfinite(plain) and key != "label":
        return plain
    kinds = "texts, whole numbers" if key == "label" else "texts, numbers of up to 64 bits, True, False"
    raise SearchError(f"The 'where' parameter must compare {key!r} with {kinds} or None. Got {value!r} instead.")


def comparable(value: Any) -> tuple[type, Scalar] | None:
    """What two values have in common if a filter takes them for the same; None for what no filter can name."""
    plain = value.item() if isinstance(value, np.generic) else value
    if plain is None or isinstance(plain, bool | str):
        return type(plain), plain
    return (float, plain) if isinstance(plain, int | float) else None  # Python's 1 and 1.0 are equal


def id_array(ids: Sequence[Id], shape: tuple[int, ...]) -> NDArray[Any]:
    """Ids as an array that never truncates a string or turns a number into one."""
    if all(isinstance(image, int) and -(2**63) <= image < 2**63 for image in ids):
        return np.array(ids, dtype=np.int64).reshape(shape)
    array = np.empty(len(ids), dtype=object)
    array[:] = ids
    return array.reshape(shape)


_MODEL_KEYS = ("path", "backbone", "weights", "fingerprint")


def checked_about(about: Any) -> dict[str, Any]:
    """What is known about a collection, with what the commands read in it of the right types."""
    if not isinstance(about, Mapping):
        raise SearchError(f"The 'about' parameter must be a mapping. Got {type(about).__name__} instead.")
    model = about.get("model")
    texts = {"root": about.get("root")}
    for key in ("model", "source", "recall"):
        if not isinstance(about.get(key), Mapping | None):
            raise SearchError(f"The 'about' parameter must have a mapping under {key!r}. Got {about[key]!r} instead.")
    texts |= {f"model.{key}": model.get(key) for key in _MODEL_KEYS} if model is not None else {}
    for key, text in texts.items():
        if not isinstance(text, str | None):
            raise SearchError(f"The 'about' parameter must have a text under {key!r}. Got {text!r} instead.")
    return dict(about)


def checked_model(theirs: Mapping[str, Any], ours: Mapping[str, Any], name: str) -> None:
    """An error if vectors described by `ours` were computed by another model than those of a collection."""
    first, second = ((about.get("model") or {}).get("fingerprint") for about in (theirs, ours))
    if first != second:
        raise SearchError(
            f"{name} must hold vectors of one model. It holds another model's, or those of "
            "another look (--fast); empty it with --rebuild."
        )


_SECRETS = re.compile(r"(?i)((?:password|passwd|pwd|token|secret|api[-_]?key)\s*=\s*)('[^']*'|[^&\s#]*)")


def without_secrets(text: str) -> str:
    """A store's URI, or a message with one, without user, password and tokens.

    From the first colon on, whatever it is: in a URI that is not written as it should be, too much is hidden rather
    than too little.
    """
    return _SECRETS.sub(r"\1***", re.sub(r"(?s)(:/*|//).*@", r"\1***@", text))


def _plain_list(values: Sequence[Any] | NDArray[Any]) -> list[Any]:
    """The values as a list, with Python's numbers in place of numpy's."""
    if isinstance(values, np.ndarray):
        return list(values.tolist())
    plain = list(values)
    if any(issubclass(kind, np.generic) for kind in set(map(type, plain))):
        plain = [value.item() if isinstance(value, np.generic) else value for value in plain]
    return plain


def spans(groups: Sequence[int]) -> list[slice]:
    """The columns of each learner in the whole vector."""
    ends = list(accumulate(groups))
    return [slice(end - size, end) for end, size in zip(ends, groups, strict=True)]


def chosen_learners(learners: Learners, count: int) -> tuple[int, ...]:
    """Numbers from 0 of the learners to compare: all, the first m (an int), or those listed (numbered from 1)."""
    if learners is None:
        return tuple(range(count))
    if isinstance(learners, int | np.integer):
        if isinstance(learners, bool) or not 1 <= learners <= count:
            raise SearchError(f"The 'learners' parameter must lie between 1 and {count}. Got {learners!r} instead.")
        return tuple(range(int(learners)))
    numbers = sorted({int(number) for number in learners})
    if not numbers or numbers[0] < 1 or numbers[-1] > count:
        raise SearchError(f"The 'learners' parameter must name learners 1 to {count}. Got {list(learners)!r} instead.")
    return tuple(number - 1 for number in numbers)


def checked_queries(queries: ArrayLike, groups: Sequence[int], learners: Learners, lengths: Floats | None) -> Floats:
    """Queries (Q, d) or (d,) -> (Q, d), zero outside the chosen learners' parts.

    The first m learners of an ensemble of M keep the proportions among their alphas, so the stored vector's
    beginning ranks just as the shorter vector of `learners=m` would. A query may therefore be the whole
    vector or that shorter one; the shorter one is scaled by the ratio of lengths, so that its scores
    are those of two shorter vectors. `lengths` are the lengths of the learners' parts in the stored vectors.
    """
    array = np.atleast_2d(np.asarray(queries))
    chosen = chosen_learners(learners, len(groups))
    width = sum(groups[: len(chosen)])
    if isinstance(learners, int | np.integer) and array.ndim == 2 and array.shape[1] == width < sum(groups):
        short = checked_vectors(array, width, "queries")
        stored = np.float32(0 if lengths is None else np.sqrt(np.square(lengths[: len(chosen)]).sum()))
        ratio = np.linalg.norm(short, axis=1, keepdims=True) / stored if stored > 0 else np.float32(1)
        return np.pad(short * ratio, ((0, 0), (0, sum(groups) - width)))
    whole = checked_vectors(array, sum(groups), "queries")
    if len(chosen) == len(groups):
        return whole
    chosen_only = np.zeros_like(whole)
    for learner in chosen:
        part = spans(groups)[learner]
        chosen_only[:, part] = whole[:, part]
    return chosen_only


class SearchRequest(NamedTuple):
    """The checked parameters of a search: queries (Q, d), zero outside the learners, which are numbered from 0."""

    queries: Floats
    k: int
    where: Conditions
    learners: tuple[int, ...]


class Store(ABC):
    """A collection of test-time vectors, whose dot product is the similarity of two images.

    `about` holds what is known about the collection, such as the model that computed the vectors. Searches may run in
    several threads at once.
    """

    about: dict[str, Any]

    @property
    @abstractmethod
    def groups(self) -> tuple[int, ...]:
        """The learners' sizes."""

    @property
    def dimension(self) -> int:
        return sum(self.groups)

    @property
    @abstractmethod
    def ids(self) -> list[Id]: ...

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def known(self, ids: Sequence[Id]) -> list[Id]:
        """Those of the given ids that are in the collection."""

    @abstractmethod
    def entries(self, ids: Sequence[Id]) -> list[Entry]:
        """Label and metadata of each id; an unknown id is an error."""

    @abstractmethod
    def vectors(self, ids: Sequence[Id]) -> Floats:
        """The stored vectors (n, d) of the given ids."""

    def add(
        self,
        vectors: ArrayLike,
        ids: Sequence[Id] | NDArray[Any],
        labels: Sequence[Label] | NDArray[Any] | None = None,
        metadata: Sequence[Metadata] | None = None,
        replace: bool = False,
    ) -> None:
        """Add rows. An id that is already there is an error, or with `replace` gets the new vector. All or nothing."""
        floats = checked_vectors(vectors, self.dimension)
        columns = checked_columns(ids, labels, metadata, len(floats))
        if not replace and (known := self.known(columns[0])):
            raise SearchError(
                f"The 'ids' parameter must hold new ids. {known[0]!r} is already there; use replace=True to replace it."
            )
        if len(floats):
            self._add(floats, columns)

    @abstractmethod
    def remove(self, ids: Sequence[Id] | NDArray[Any]) -> None:
        """Remove ids: all of them, or none if one is unknown."""

    def search(
        self, queries: ArrayLike, k: int = 10, where: Where | None = None, learners: Learners = None
    ) -> Neighbours:
        """The k best of each query, or as many as there are.

        Args:
            queries: (Q, d), or (d,) for one, whose result then has no leading dimension.
            where: search only among these: a mapping of `label` and keys of the metadata to a value or several values,
                with the meaning that the table in `bier.search.store` gives. k results come back if k images pass.
            learners: compare the first m learners only (an int), or those listed by number from 1. Always exact. For
                an int, queries may also be the shorter vectors of those learners.
        """
        k = checked_count(k, "k")
        conditions = checked_where(where)
        chosen = chosen_learners(learners, len(self.groups))
        checked = checked_queries(queries, self.groups, learners, None if learners is None else self._lengths())
        nearest = self._search(SearchRequest(checked, k, conditions, chosen))
        if np.ndim(queries) != 1:
            return nearest
        return Neighbours(nearest.ids[0], nearest.scores[0], None if nearest.rows is None else nearest.rows[0])

    def optimize(self) -> None:  # noqa: B027 - most stores do it by themselves
        """Build what makes searches fast. It is called when a load is complete."""

    def close(self) -> None:  # noqa: B027 - most stores hold nothing that must be released
        """Release what the store holds outside this process."""

    @abstractmethod
    def _lengths(self) -> Floats:
        """The length of each learner's part, the same in every test-time vector; (M,)."""

    @abstractmethod
    def _add(self, vectors: Floats, columns: Columns) -> None:
        """Add checked rows; an id that is already there gets the new vector."""

    @abstractmethod
    def _search(self, request: SearchRequest) -> Neighbours:
        """As `search`."""
