"""Rows as columns: a million candidates in some eighty bytes each, and the arithmetic of a policy over all of them at once."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from llama_ckpt.gc_values import Candidate, RowVersion

Numbers = npt.NDArray[np.int64]

_NONE = -1
_SECONDS_PER_TOKEN = 1e-3  # where nothing of a model was measured: all its rows alike


class Columns:
    """Candidates in order of their number. `parents` are the places of the deltas among them and of what each stands on,
    `extensions` the places of those that go on from another one and of that.
    """

    def __init__(self) -> None:
        self._ids = bytearray()
        self._int64 = {name: array("q") for name in _LONG}
        self._int32 = {name: array("i") for name in _SHORT}
        self._models: dict[str, int] = {}
        self._labels: dict[str, int] = {}
        self._parent_nos, self._extends_nos = (array("q"), array("q")), (array("q"), array("q"))

    @classmethod
    def of(cls, rows: Iterable[Candidate]) -> Columns:
        """Reads the rows once."""
        made = cls()
        for row in rows:
            made._add(row)
        made._finish()
        return made

    def _add(self, row: Candidate) -> None:
        for (places, numbers), number in ((self._parent_nos, row.parent_no), (self._extends_nos, row.extends_no)):
            if number is not None:
                places.append(len(self))
                numbers.append(number)
        self._ids += bytes.fromhex(row.id)
        long, short = self._int64, self._int32
        long["ckpt_no"].append(row.ckpt_no)
        long["file_size"].append(row.file_size)
        long["created_us"].append(row.created_us)
        long["last_used_us"].append(row.last_used_us)
        long["expires_us"].append(_NONE if row.expires_us is None else row.expires_us)
        long["lease_until_us"].append(_NONE if row.lease_until_us is None else row.lease_until_us)
        short["hit_count"].append(min(row.hit_count, 2**31 - 1))
        short["prefill_ms"].append(_NONE if row.prefill_ms is None else min(row.prefill_ms, 2**31 - 1))
        short["n_tokens"].append(row.n_tokens)
        short["pinned"].append(int(row.pinned))
        short["model_no"].append(self._models.setdefault(row.model_name, len(self._models)))
        label = row.label
        short["label_no"].append(_NONE if label is None else self._labels.setdefault(label, len(self._labels)))

    def _finish(self) -> None:
        def column(name: str) -> Numbers:
            if name in self._int64:
                return np.frombuffer(self._int64[name], dtype=np.int64)
            return np.frombuffer(self._int32[name], dtype=np.int32).astype(np.int64)

        self.ckpt_no, self.file_size = column("ckpt_no"), column("file_size")
        self.created_us, self.last_used_us = column("created_us"), column("last_used_us")
        self.hit_count, self.model_no, self.label_no = column("hit_count"), column("model_no"), column("label_no")
        self.pinned, self.n_tokens = column("pinned") != 0, column("n_tokens")
        self._names = list(self._models), list(self._labels)
        self.parents = self._both_here(*self._parent_nos)
        self.extensions = self._both_here(*self._extends_nos)

    def _both_here(self, places: array[int], numbers: array[int]) -> tuple[Numbers, Numbers]:
        """Of rows that name others by number: the places of both, where the other is here, too."""
        mine, named = np.array(places, dtype=np.int64), np.array(numbers, dtype=np.int64)
        first, after = (np.searchsorted(self.ckpt_no, named, side=side) for side in ("left", "right"))
        here = first < after
        return mine[here], first[here]

    def deltas_first(self) -> list[tuple[int, int]]:
        """The places of each delta and of what it stands on, deltas of a delta before it: a delta's number is above its
        parent's.
        """
        children, parents = self.parents
        return list(zip(children[::-1].tolist(), parents[::-1].tolist(), strict=True))

    def __len__(self) -> int:
        return len(self._int64["ckpt_no"])

    def seen(self, i: int) -> RowVersion:
        """A row as it was read."""
        checkpoint_id = self._ids[16 * i : 16 * i + 16].hex()
        return RowVersion(int(self.ckpt_no[i]), checkpoint_id, int(self.last_used_us[i]), int(self.hit_count[i]))

    def model_name(self, i: int) -> str:
        """The name of a row's model."""
        return self._names[0][int(self.model_no[i])]

    def label(self, i: int) -> str | None:
        """A row's label."""
        return None if self.label_no[i] < 0 else self._names[1][int(self.label_no[i])]

    def expired(self, now_us: int) -> npt.NDArray[np.bool_]:
        """Rows whose own time is over."""
        expires_us = np.frombuffer(self._int64["expires_us"], dtype=np.int64)
        over: npt.NDArray[np.bool_] = (expires_us != _NONE) & (expires_us <= now_us)
        return over

    @property
    def lasting(self) -> npt.NDArray[np.bool_]:
        """Rows without a time of their own."""
        never: npt.NDArray[np.bool_] = np.frombuffer(self._int64["expires_us"], dtype=np.int64) == _NONE
        return never

    def leased(self, now_us: int) -> npt.NDArray[np.bool_]:
        """Rows that a reader has claimed."""
        lease_until_us: npt.NDArray[np.int64] = np.frombuffer(self._int64["lease_until_us"], dtype=np.int64)
        leased: npt.NDArray[np.bool_] = lease_until_us > now_us
        return leased

    def rebuild_s(self) -> npt.NDArray[np.float64]:
        """Seconds that evaluating a row's tokens took; where it was not measured, what the model's other rows took a token."""
        prefill_ms = np.frombuffer(self._int32["prefill_ms"], dtype=np.int32)
        measured = prefill_ms != _NONE
        n = len(self._models)
        spent = np.bincount(self.model_no[measured], prefill_ms[measured] / 1000, minlength=n)
        tokens = np.bincount(self.model_no[measured], self.n_tokens[measured], minlength=n)
        per_token = np.where(tokens > 0, spent / np.maximum(tokens, 1), _SECONDS_PER_TOKEN)
        return np.where(measured, prefill_ms / 1000, per_token[self.model_no] * self.n_tokens)


_LONG = ("ckpt_no", "file_size", "created_us", "last_used_us", "expires_us", "lease_until_us")
_SHORT = ("hit_count", "prefill_ms", "n_tokens", "pinned", "model_no", "label_no")
