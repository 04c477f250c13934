"""Which rank owns which row of a table."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from weft.comm.arguments import find_choice_fault

KINDS = ("strided", "contiguous")


@dataclass(frozen=True)
class Ownership:
    """The owners of ``rows`` rows among ``size`` ranks.

    ``strided``: row i belongs to rank i mod P, which spreads frequent ids (hashes, tokens sorted by frequency) evenly.
    ``contiguous``: rank r owns the r-th ceil(N/P) rows, as a DTensor with ``Shard(0)`` has them.

    A row's *place* is its number among its owner's rows; its *slot* is ``owner * stride + place``, so that
    sorting slots sorts by owner, then by place.

    >>> Ownership("strided", 5, 2).count(0), Ownership("contiguous", 5, 4).count(3)
    (3, 0)
    """

    kind: str
    rows: int
    size: int

    @property
    def stride(self) -> int:
        """Slots of an owner: the most rows any rank has."""
        return max(1, -(-self.rows // self.size))

    def count(self, rank: int) -> int:
        """Rows of a rank."""
        if self.kind == "strided":
            return max(0, -(-(self.rows - rank) // self.size))
        return min(self.stride, max(0, self.rows - rank * self.stride))

    def ids(self, rank: int) -> slice:
        """The rows of a rank, by place, as a slice of all rows."""
        if self.kind == "strided":
            return slice(min(rank, self.rows), None, self.size)
        return slice(min(rank * self.stride, self.rows), min((rank + 1) * self.stride, self.rows))

    def slots(self, ids: Tensor) -> Tensor:
        """The slot of each id, int64."""
        ids = ids.long()
        return ids % self.size * self.stride + ids // self.size if self.kind == "strided" else ids

    def ids_at(self, slots: Tensor) -> Tensor:
        """The id of each slot."""
        return slots % self.stride * self.size + slots // self.stride if self.kind == "strided" else slots


def find_ownership_fault(operation: str, kind: object, rank: int) -> Exception | None:
    """The error for an ownership nobody knows."""
    return find_choice_fault(operation, "ownership", kind, rank, KINDS)
