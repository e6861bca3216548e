"""The columns of an index beside its vectors: id, label, metadata, and whether the row was removed."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bier.errors import SearchError
from bier.search.store import Conditions, Entry, Id, Label, Mask, Metadata, Rows, Scalar, comparable


class Entries:
    """Rows in the order of the vectors. Removed rows keep their place (a tombstone) until the index is rebuilt."""

    def __init__(self) -> None:
        self.ids: list[Id] = []
        self.labels: list[Label] = []
        self.metadata: list[Metadata] = []
        self.alive: Mask = np.empty(0, np.bool_)
        self._rows_by_id: dict[Id, int] | None = None
        self._codes: tuple[dict[Scalar, int], NDArray[np.int64]] | None = None

    def __len__(self) -> int:
        return int(np.count_nonzero(self.alive))

    @property
    def rows(self) -> int:
        """The number of rows, including removed ones."""
        return len(self.ids)

    def append(
        self, ids: Sequence[Id], labels: Sequence[Label], metadata: Sequence[Metadata], removed: Sequence[int] = ()
    ) -> None:
        start = self.rows
        self.ids.extend(ids)
        self.labels.extend(labels)
        self.metadata.extend(metadata)
        alive = np.ones(len(ids), np.bool_)
        alive[list(removed)] = False
        self.alive = np.concatenate([self.alive, alive])
        if self._rows_by_id is not None:
            self._rows_by_id.update({one: start + row for row, one in enumerate(ids) if alive[row]})
        self._codes = None

    @property
    def _row_of(self) -> dict[Id, int]:
        """The row of each id. It is made when it is first needed: opening a large index must not wait for it."""
        if self._rows_by_id is None:
            alive = self.alive.tolist()
            self._rows_by_id = {one: row for row, one in enumerate(self.ids) if alive[row]}
        return self._rows_by_id

    def known(self, ids: Sequence[Id]) -> list[Id]:
        return [image for image in ids if image in self._row_of]

    def rows_of(self, ids: Sequence[Id]) -> Rows:
        """The rows of ids; an unknown id is an error."""
        for image in ids:
            if image not in self._row_of:
                raise SearchError(f"The index must hold the ids that it is asked for. It has no {image!r}.")
        return np.array([self._row_of[image] for image in ids], np.int64)

    def entry(self, row: int) -> Entry:
        return Entry(self.ids[row], self.labels[row], self.metadata[row])

    def remove(self, ids: Sequence[Id]) -> None:
        self.alive[self.rows_of(ids)] = False
        for image in ids:
            del self._row_of[image]

    def compacted(self) -> "Entries":
        """A copy without the removed rows."""
        left = np.flatnonzero(self.alive).tolist()
        new = Entries()
        new.append(
            [self.ids[row] for row in left], [self.labels[row] for row in left], [self.metadata[row] for row in left]
        )
        return new

    def allowed(self, where: Conditions) -> Mask | None:
        """The rows that pass a filter and are not removed; None if that is all of them."""
        if not where:
            return None if len(self) == self.rows else self.alive
        mask = self.alive.copy()
        if "label" in where:
            codes, labels = self._label_codes()
            mask &= np.isin(labels, [codes[text] for text in where["label"] if text in codes])
        accepted = {key: {comparable(value) for value in values} for key, values in where.items() if key != "label"}
        if accepted:
            for row in np.flatnonzero(mask).tolist():
                stored = self.metadata[row] or {}
                mask[row] = all(key in stored and comparable(stored[key]) in some for key, some in accepted.items())
        return mask

    def _label_codes(self) -> tuple[dict[Scalar, int], NDArray[np.int64]]:
        """A number for each label's text, so that a filter by label does not compare strings row by row."""
        if self._codes is None:
            codes: dict[Scalar, int] = {None: -1}
            texts = (None if label is None else str(label) for label in self.labels)
            numbers = [codes.setdefault(text, len(codes)) for text in texts]
            self._codes = codes, np.array(numbers, np.int64)
        return self._codes
