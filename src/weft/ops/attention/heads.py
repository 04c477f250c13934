"""Ulysses in integers: which heads a rank computes, in which parts, and where its tokens lie then."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

from weft.ops.attention.gather import choose_strides
from weft.ops.sequence.runs import TokenRun, join_pieces


@dataclass(frozen=True)
class HeadPart:
    """Heads of one rank that are computed together: query heads ``first : last`` of ``kv_first : kv_last``.

    They are whole groups (all query heads of each key/value head), or some query heads of a single key/value head,
    ``is_split``: other ranks have the rest of them, and the gradients of its keys are sums over these ranks.
    """

    first: int = 0
    last: int = 0
    kv_first: int = 0
    kv_last: int = 0
    is_split: bool = False

    @property
    def heads(self) -> int:
        return self.last - self.first

    @property
    def kv_heads(self) -> int:
        return self.kv_last - self.kv_first

    @property
    def queries(self) -> slice:
        return slice(self.first, self.last)

    @property
    def keys(self) -> slice:
        return slice(self.kv_first, self.kv_last)


NO_HEADS = HeadPart()


@lru_cache(maxsize=64)
def deal_heads(heads: int, kv_heads: int, size: int) -> tuple[int, ...]:
    """How many query heads each rank computes, in the order of the heads.

    No rank has more than it must, heads / P rounded up. Among such deals, the one with the fewest key/value heads on
    all ranks together, as one whose query heads are on several ranks goes to each of them; then the most even one.
    It is found by going from rank to rank over the heads that are dealt so far.

    >>> deal_heads(8, 4, 2), deal_heads(6, 3, 2), deal_heads(4, 2, 3), deal_heads(5, 5, 3), deal_heads(3, 1, 5)
    ((4, 4), (3, 3), (2, 2, 0), (2, 2, 1), (1, 1, 1, 0, 0))
    """
    shared, most, takers = heads // kv_heads, -(-heads // size), min(size, heads)
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {0: (0, 0, ())}  # dealt -> (copies, squares, fewer first)
    for _ in range(takers):
        longer: dict[int, tuple[int, int, tuple[int, ...]]] = {}
        for dealt, (copies, squares, deal) in best.items():
            for more in range(min(most, heads - dealt) + 1):
                end = dealt + more
                touched = -(-end // shared) - dealt // shared if more else 0
                found = copies + touched, squares + more * more, (*deal, -more)
                longer[end] = min(found, longer.get(end, found))
        best = longer
    return (*(-less for less in best[heads][2]), *[0] * (size - takers))


@lru_cache(maxsize=64)
def head_parts(heads: int, kv_heads: int, size: int) -> tuple[tuple[HeadPart, ...], ...]:
    """The parts of each rank, in the order of the heads; all ranks have as many, the last may be `NO_HEADS`.

    Whole groups begin and end with a single one: nothing hides the first part and the last.

    >>> [[(part.heads, part.kv_heads) for part in parts] for parts in head_parts(6, 3, 2)]
    [[(2, 1), (1, 1)], [(1, 1), (2, 1)]]
    """
    shared, ranks = heads // kv_heads, []
    for end, count in zip(accumulate(deal := deal_heads(heads, kv_heads, size)), deal, strict=True):
        begin = min(end, -(-(end - count) // shared) * shared)  # of the first whole group, if there is one
        groups = (end - begin) // shared
        strides = choose_strides(groups, groups) if groups else ()
        edges = (end - count, *(begin + shared * done for done in accumulate(strides, initial=0)), end)
        ranks.append(
            [
                HeadPart(first, last, first // shared, -(-last // shared), (last - first) % shared > 0)
                for first, last in pairwise(edges)
                if first < last
            ]
        )
    most = max(map(len, ranks))
    return tuple((*parts, *[NO_HEADS] * (most - len(parts))) for parts in ranks)


@lru_cache(maxsize=64)
def group_runs(
    runs: tuple[TokenRun, ...], groups: int, inner: int
) -> tuple[tuple[TokenRun, ...], tuple[tuple[TokenRun, ...], ...]]:
    """Where tokens lie when each ``inner`` consecutive ranks put theirs together, in the order of the sequence.

    The runs of these groups in the sequence; and for each group where its ranks' runs (by rank in the group) lie in it.

    >>> group_runs((TokenRun(0, 0, 2, 0), TokenRun(1, 0, 4, 2), TokenRun(0, 2, 2, 6)), 1, 2)[0]
    (TokenRun(rank=0, start=0, length=8, offset=0),)
    """
    placed: list[list[TokenRun]] = [[] for _ in range(groups)]
    tokens = [0] * groups
    for run in runs:
        group, member = divmod(run.rank, inner)
        placed[group].append(TokenRun(member, run.start, run.length, tokens[group]))
        tokens[group] += run.length
    joined = join_pieces(((run.rank // inner, run.length) for run in runs), groups)
    return joined, tuple(map(tuple, placed))
