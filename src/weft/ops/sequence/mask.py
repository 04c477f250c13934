"""`Mask`: who sees whom in the whole sequence, as a few slices that every rank has."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch

from weft.comm.arguments import find_flag_fault, find_integer_fault, kind_of, read, show
from weft.comm.opaque import Opaque
from weft.ops.sequence.mask_slices import UNLIMITED, MaskSlice, alongside, count_pairs, find_overlap, tree_slices

_NAMES, _UNSAID = MaskSlice._fields, (0, 0, 0, 0, -UNLIMITED, UNLIMITED)


@dataclass(frozen=True, init=False, eq=False, repr=False)
class Mask(Opaque):
    """Who sees whom: for ``mask=`` of `weft.attention`, the same on every rank, in place of ``causal``.

    ``Mask(slices, total)`` is a mask of slices (q_start, q_stop, k_start, k_stop, low, high) over a sequence of
    ``total`` tokens: query i of the first range sees key j of the second where low <= j - i <= high. Left out or
    None, these are no limit. Positions are those of the whole sequence. What no slice shows is not seen; no two
    slices may show the same key to the same query. `Mask.Slice` has names for the usual kinds.

    | made by                              | a token sees                                                            |
    |--------------------------------------|-------------------------------------------------------------------------|
    | `Mask.full(documents)`               | its whole document                                                      |
    | `Mask.causal(documents)`             | itself and those before it in its document                              |
    | `Mask.documents(cu_seqlens, causal)` | the one or the other                                                    |
    | `Mask.window(left, right, documents)`| those from ``left`` before it to ``right`` after it in its document     |
    | `Mask.prefix_lm(prefix, documents)`  | its document's prefix, and those before it                              |
    | `Mask.chunks(length, documents)`     | those before it in its chunk of its document                            |
    | `Mask.tree(parents, lengths)`        | all of its node's ancestors, and those before it in its node            |

    ``documents``: how many tokens there are, if they are one document, or the boundaries ``[N+1]`` of packed ones
    (`cu_seqlens`). ``a & b`` shows what both show. Masks are equal, and hash alike, if their slices are.

    >>> mask = Mask([Mask.Slice.full((0, 4), (0, 4)), Mask.Slice.causal((4, 10), (2, 10))], total=10)
    >>> mask.pairs, mask.count([0, 4, 6, 10])
    (49, [16, 7, 26])
    >>> mask == Mask([(0, 4, 0, 4), (4, 10, 2, 10, None, 0)], total=10)
    True
    """

    slices: tuple[MaskSlice, ...]  # sorted, `trimmed` and `loosened`
    total: int
    digest: str  # of all of it: what ranks compare

    Slice = MaskSlice

    def __init__(self, slices: Iterable[Sequence[int | None]], total: int) -> None:
        if fault := find_integer_fault("Mask", "total", total, None, least=0):
            raise fault
        total = int(total)
        found = read("Mask", None, lambda: _read_slices(slices, total))
        if isinstance(found, Exception):
            raise found
        numbers = array("q", [total])
        for one in found:
            numbers.extend(one)
        object.__setattr__(self, "slices", tuple(found))
        object.__setattr__(self, "total", total)
        object.__setattr__(self, "digest", hashlib.sha256(numbers.tobytes()).hexdigest()[:32])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mask) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"Mask({len(self.slices)} slices, total={self.total}, digest={self.digest})"

    # Constructors.

    @staticmethod
    def full(documents: Any) -> Mask:
        """A token sees its whole document.

        >>> Mask.full(4).pairs, Mask.full([0, 1, 4]).pairs
        (16, 10)
        """
        bounds = _read_documents("Mask.full", documents)
        return Mask([MaskSlice.full(span, span) for span in pairwise(bounds)], bounds[-1])

    @staticmethod
    def causal(documents: Any) -> Mask:
        """A token sees itself and those before it in its document.

        >>> Mask.causal(4).pairs, Mask.causal([0, 1, 4]).pairs
        (10, 7)
        """
        bounds = _read_documents("Mask.causal", documents)
        return Mask([MaskSlice.causal(span, span) for span in pairwise(bounds)], bounds[-1])

    @staticmethod
    def documents(cu_seqlens: Any, causal: bool = True) -> Mask:
        """Packed documents between boundaries ``[N+1]``: `Mask.causal`, or `Mask.full` without ``causal``."""
        if fault := find_flag_fault("Mask.documents", "causal", causal, None):
            raise fault
        bounds = _read_documents("Mask.documents", cu_seqlens)
        return Mask.causal(bounds) if causal else Mask.full(bounds)

    @staticmethod
    def window(left: int, right: int, documents: Any) -> Mask:
        """A token sees those from ``left`` before it to ``right`` after it in its document, with -1 for no limit.

        >>> Mask.window(2, 0, 10).pairs
        27
        """
        return Mask.full(_read_documents("Mask.window", documents)).within(left, right)

    @staticmethod
    def prefix_lm(prefix: Any, documents: Any) -> Mask:
        """The first ``prefix`` tokens of a document see one another; the rest see them, themselves and those before.

        ``prefix``: one number, or one for each document.

        >>> Mask.prefix_lm([2, 0], [0, 3, 5]).count(range(6))
        [2, 2, 3, 1, 2]
        """
        bounds, name = _read_documents("Mask.prefix_lm", documents), "Mask.prefix_lm"
        prefixes, single = _read_integers(name, "prefix", prefix)
        prefixes *= len(bounds) - 1 if single else 1
        if len(prefixes) != len(bounds) - 1:
            raise ValueError(f"{name}: {len(prefixes)} prefixes for {len(bounds) - 1} documents; give one for each")
        slices = []
        for (start, stop), length in zip(pairwise(bounds), prefixes, strict=True):
            if not 0 <= length <= stop - start:
                raise ValueError(f"{name}: a prefix of {length} tokens in a document of {stop - start}")
            slices.append(MaskSlice.full((start, start + length), (start, start + length)))
            slices.append(MaskSlice.causal((start + length, stop), (start, stop)))
        return Mask(slices, bounds[-1])

    @staticmethod
    def chunks(length: int, documents: Any) -> Mask:
        """A token sees itself and those before it in its chunk; documents are cut into chunks of ``length`` tokens.

        >>> Mask.chunks(2, [0, 3, 5]) == Mask.causal([0, 2, 3, 5])
        True
        """
        if fault := find_integer_fault("Mask.chunks", "length", length, None, least=1):
            raise fault
        bounds, step = _read_documents("Mask.chunks", documents), int(length)
        starts = [at for start, stop in pairwise(bounds) for at in range(start, stop, step)]
        return Mask.causal((*(starts or [0]), bounds[-1]))

    @staticmethod
    def tree(parents: Any, lengths: Any) -> Mask:
        """Shared prefixes: a token sees all of its node's ancestors, and itself and those before it in its node.

        Node n has ``lengths[n]`` tokens and goes on from node ``parents[n]``, which is less than n, or is a root, with
        -1. Nodes lie one after the other; depth first there are no more slices than nodes.

        >>> Mask.tree([-1, 0, 0], [3, 2, 2]).count([0, 3, 5, 7])  # two answers to one question
        [6, 9, 9]
        """
        nodes, _ = _read_integers("Mask.tree", "parents", parents)
        sizes, _ = _read_integers("Mask.tree", "lengths", lengths)
        if len(nodes) != len(sizes) or min(sizes, default=0) < 0:
            raise ValueError(
                f"Mask.tree: lengths must be one for each of the {len(nodes)} parents and not negative, got "
                f"{show(list(sizes))}"
            )
        for node, parent in enumerate(nodes):
            if not -1 <= parent < node:
                raise ValueError(f"Mask.tree: the parent of node {node} must be a node before it or -1, got {parent}")
        bounds = (0, *accumulate(sizes))
        return Mask(tree_slices(nodes, bounds), bounds[-1])

    # What it makes of others, and says.

    def within(self, left: int, right: int) -> Mask:
        """The same through a window: only keys from ``left`` before a query to ``right`` after it; -1 for no limit."""
        for name, side in (("left", left), ("right", right)):
            if fault := find_integer_fault("Mask.window", name, side, None, least=-1):
                raise fault
        low, high = (UNLIMITED if side < 0 else int(side) for side in (left, right))
        band = MaskSlice(0, self.total, 0, self.total, -low, high)
        return self if low == high == UNLIMITED else Mask([one.meet(band) for one in self.slices], self.total)

    def __and__(self, other: Mask) -> Mask:
        """What both show."""
        if not isinstance(other, Mask):
            return NotImplemented
        if self.total != other.total:
            raise ValueError(f"Mask: masks of {self.total} and of {other.total} tokens have nothing in common")
        near = alongside(((one.q_start, one.q_stop) for one in self.slices), other.slices)
        both = zip(self.slices, near, strict=True)
        return Mask([mine.meet(theirs) for mine, others in both for theirs in others], self.total)

    @property
    def pairs(self) -> int:
        """How many pairs of a query and a key see each other."""
        return sum(self.count([0, self.total]))

    def count(self, cuts: Sequence[int]) -> list[int]:
        """Pairs that the queries between consecutive cuts see, which rise: the work of each of those stretches."""
        return count_pairs(self.slices, cuts)


# Reading arguments: what a mask is made from is the same on every rank, so faults are raised here.


def _read_slices(given: Iterable[Sequence[int | None]], total: int) -> list[MaskSlice] | Exception:
    """The slices trimmed and sorted, or what is wrong with them."""
    found = []
    for one in given:
        entries = tuple(one)
        if not 4 <= len(entries) <= len(_NAMES):
            return ValueError(f"Mask: a slice is ({', '.join(_NAMES)}), the last two as needed, got {show(one)}")
        if not all(type(entry) is int for entry in entries):
            for name, entry in zip(_NAMES, entries, strict=False):
                optional = entry is None and name in ("low", "high")
                if not optional and (fault := find_integer_fault("Mask", f"{name} of a slice", entry, None)):
                    return fault
        said = zip((*entries, None, None), _UNSAID, strict=False)
        numbers = (unsaid if entry is None else int(entry) for entry, unsaid in said)
        slice_ = MaskSlice._make(min(max(number, -UNLIMITED), UNLIMITED) for number in numbers)
        if not (0 <= slice_.q_start <= slice_.q_stop <= total and 0 <= slice_.k_start <= slice_.k_stop <= total):
            return ValueError(f"Mask: slice {show(entries)} is not within the {total} tokens of the sequence")
        if not (slice_ := slice_.trimmed()).is_empty:
            found.append(slice_.loosened())
    found.sort()
    if (overlap := find_overlap(found)) is not None:
        twice = overlap[0].meet(overlap[1])
        return ValueError(
            f"Mask: slices {_show(overlap[0])} and {_show(overlap[1])} both show key {twice.first_key(twice.q_start)} "
            f"to query {twice.q_start}; it would count twice"
        )
    return found


def _show(one: MaskSlice) -> str:
    return show(tuple(None if abs(number) == UNLIMITED else number for number in one))


def _read_integers(operation: str, name: str, given: Any) -> tuple[tuple[int, ...], bool]:
    """Integers, whatever holds them, and whether it was a single one. On a device the host waits for them."""

    def reading() -> tuple[tuple[int, ...], bool] | Exception:
        found = torch.as_tensor(given)
        kind = found.dtype
        if found.numel() and (found.is_meta or kind.is_floating_point or kind.is_complex or kind == torch.bool):
            return TypeError(f"{operation}: {name} must be integers, got {kind_of(given)}")
        return tuple(found.reshape(-1).tolist()), found.ndim == 0

    numbers = read(operation, None, reading)
    if isinstance(numbers, Exception):
        raise numbers
    return numbers


def _read_documents(operation: str, documents: Any) -> tuple[int, ...]:
    """The boundaries of documents; of one, if their total is given."""
    bounds, single = _read_integers(operation, "documents", documents)
    bounds = (0, *bounds) if single else bounds
    if len(bounds) < 2 or bounds[0] != 0 or any(a > b for a, b in pairwise(bounds)):
        raise ValueError(
            f"{operation}: documents must be how many tokens there are, or boundaries that rise from 0, got "
            f"{list(bounds[:8])}"
        )
    return bounds
