"""Candidates as columns: a million of them in some eighty bytes each, so that a policy is computed over all of them at once."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from llama_ckpt.gc_values import Candidate, RowVersion

Numbers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

_NONE = -1
_SECONDS_PER_TOKEN = 1e-3  # if no row of a model was measured: the same for all its rows
_MAX_INT32 = 2**31 - 1


@dataclass(frozen=True, slots=True, eq=False)
class Relation:
    """Pairs of rows, by their indices in the columns: row `children[k]` names row `parents[k]`. The pairs are in order of their
    children.
    """

    children: Numbers
    parents: Numbers

    def pairs_children_first(self) -> list[tuple[int, int]]:
        """The pairs from the last child to the first, so that the children of a row come before the row itself. This needs
        children that come after their parents, as deltas do: a delta's number is above its parent's.
        """
        return list(zip(self.children[::-1].tolist(), self.parents[::-1].tolist(), strict=True))


class _Rows:
    """The values of rows as they are read, one array a column: no Python object stays for a row."""

    def __init__(self, rows: Iterable[Candidate]) -> None:
        self.ids = bytearray()
        self.int64 = {name: array("q") for name in _INT64}
        self.int32 = {name: array("i") for name in _INT32}
        self.models: dict[str, int] = {}
        self.labels: dict[str, int] = {}
        self.parents, self.extended = (array("q"), array("q")), (array("q"), array("q"))
        for row in rows:
            self._add(row)

    def _add(self, row: Candidate) -> None:
        for (children, numbers), number in ((self.parents, row.parent_no), (self.extended, row.extends_no)):
            if number is not None:
                children.append(len(self.int64["ckpt_no"]))
                numbers.append(number)
        self.ids += bytes.fromhex(row.id)
        int64, int32 = self.int64, self.int32
        int64["ckpt_no"].append(row.ckpt_no)
        int64["file_size"].append(row.file_size)
        int64["created_us"].append(row.created_us)
        int64["last_used_us"].append(row.last_used_us)
        int64["expires_us"].append(_NONE if row.expires_us is None else row.expires_us)
        int64["lease_until_us"].append(_NONE if row.lease_until_us is None else row.lease_until_us)
        int32["hit_count"].append(min(row.hit_count, _MAX_INT32))
        int32["prefill_ms"].append(_NONE if row.prefill_ms is None else min(row.prefill_ms, _MAX_INT32))
        int32["n_tokens"].append(row.n_tokens)
        int32["pinned"].append(int(row.pinned))
        int32["model_no"].append(self.models.setdefault(row.model_name, len(self.models)))
        label = row.label
        int32["label_no"].append(_NONE if label is None else self.labels.setdefault(label, len(self.labels)))

    def column(self, name: str) -> Numbers:
        """A column: a view of 64-bit values, a copy of 32-bit ones."""
        if name in self.int64:
            return np.frombuffer(self.int64[name], dtype=np.int64)
        return np.frombuffer(self.int32[name], dtype=np.int32).astype(np.int64)


class Columns:
    """Candidates in order of their number, one array a column. `parents` relates each delta to its parent, `extensions` each
    row to the shorter row that it extends; both only for pairs of rows that are both here.
    """

    def __init__(self, rows: _Rows) -> None:
        self._ids = rows.ids
        self._models, self._labels = list(rows.models), list(rows.labels)
        self.ckpt_no, self.file_size = rows.column("ckpt_no"), rows.column("file_size")
        self.created_us, self.last_used_us = rows.column("created_us"), rows.column("last_used_us")
        self._expires_us, self._lease_until_us = rows.column("expires_us"), rows.column("lease_until_us")
        self.hit_count, self.n_tokens = rows.column("hit_count"), rows.column("n_tokens")
        self.model_no, self.label_no = rows.column("model_no"), rows.column("label_no")
        self.pinned: Mask = rows.column("pinned") != 0
        self._prefill_ms = np.frombuffer(rows.int32["prefill_ms"], dtype=np.int32)
        self.parents, self.extensions = self._relation(*rows.parents), self._relation(*rows.extended)

    @classmethod
    def from_rows(cls, rows: Iterable[Candidate]) -> Columns:
        """The columns of rows that come in order of their number. Reads the rows once."""
        return cls(_Rows(rows))

    def _relation(self, children: array[int], parent_nos: array[int]) -> Relation:
        """The pairs whose parent, given by its number, is here, too."""
        child, named = np.array(children, dtype=np.int64), np.array(parent_nos, dtype=np.int64)
        first, after = (np.searchsorted(self.ckpt_no, named, side=side) for side in ("left", "right"))
        is_here = first < after
        return Relation(child[is_here], first[is_here])

    def __len__(self) -> int:
        return len(self.ckpt_no)

    def version(self, i: int) -> RowVersion:
        """The version of row `i` that was read."""
        checkpoint_id = self._ids[16 * i : 16 * i + 16].hex()
        return RowVersion(int(self.ckpt_no[i]), checkpoint_id, int(self.last_used_us[i]), int(self.hit_count[i]))

    def model_name(self, i: int) -> str:
        """The name of the model of row `i`."""
        return self._models[int(self.model_no[i])]

    def label(self, i: int) -> str | None:
        """The label of row `i`."""
        return None if self.label_no[i] < 0 else self._labels[int(self.label_no[i])]

    def expired(self, now_us: int) -> Mask:
        """Rows whose own expiry has passed."""
        expired: Mask = (self._expires_us != _NONE) & (self._expires_us <= now_us)
        return expired

    @property
    def without_expiry(self) -> Mask:
        """Rows that have no expiry of their own."""
        without: Mask = self._expires_us == _NONE
        return without

    def leased(self, now_us: int) -> Mask:
        """Rows that a reader has leased."""
        leased: Mask = self._lease_until_us > now_us
        return leased

    def rebuild_s(self) -> npt.NDArray[np.float64]:
        """Seconds to evaluate each row's tokens again: as measured, or the model's mean time per token over its measured rows."""
        prefill_ms = self._prefill_ms
        measured = prefill_ms != _NONE
        n_models = len(self._models)
        spent_s = np.bincount(self.model_no[measured], prefill_ms[measured] / 1000, minlength=n_models)
        tokens = np.bincount(self.model_no[measured], self.n_tokens[measured], minlength=n_models)
        per_token = np.where(tokens > 0, spent_s / np.maximum(tokens, 1), _SECONDS_PER_TOKEN)
        return np.where(measured, prefill_ms / 1000, per_token[self.model_no] * self.n_tokens)


_INT64 = ("ckpt_no", "file_size", "created_us", "last_used_us", "expires_us", "lease_until_us")
_INT32 = ("hit_count", "prefill_ms", "n_tokens", "pinned", "model_no", "label_no")
