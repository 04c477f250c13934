"""`BigramHashEmbedding`: a row for each pair of neighbouring tokens, by a hash."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from weft.embedding.sharded import ShardedEmbedding
from weft.sequence import Sequence
from weft.sequence.layout import run_lengths
from weft.sequence.sequence import read_bounds, read_sequence, settle


class BigramHashEmbedding(ShardedEmbedding):
    """A `ShardedEmbedding` of hashed bigrams: token ids ``[B, T]`` in, rows ``[B, T, d]`` out.

    The row of token x[t] is ``(a x[t] XOR b x[t-1]) mod (N-1)`` in int32, with ``multipliers`` (a, b). The first
    token, and the first of every packed document (``cu_seqlens``, the same for every row of the batch), takes the
    reserved last row. The table begins at zero, as one that is added to a residual stream should.

    Where the sequence itself is sharded over ``context_group``, ``cu_seqlens`` are the boundaries in the whole sequence
    and the token before a run's first one is told by the rank that has it: a few integers for each row of the batch.

    >>> BigramHashEmbedding(101, 4)(torch.tensor([[5, 6, 7]])).shape
    torch.Size([1, 3, 4])
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        multipliers: tuple[int, int] = (36313, 27191),
        group: Any = None,
        ownership: str = "strided",
        reduce: str = "mean",
        replicate: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if num_embeddings < 2:
            raise ValueError(
                f"BigramHashEmbedding: num_embeddings must be at least 2, one of them reserved, got {num_embeddings}"
            )
        super().__init__(
            num_embeddings, embedding_dim, group=group, ownership=ownership, reduce=reduce, replicate=replicate,
            device=device, dtype=dtype,
        )  # fmt: skip
        self.multipliers = multipliers

    def reset_parameters(self) -> None:
        """Zero."""
        nn.init.zeros_(self.weight)

    def rows_of(self, tokens: Tensor, out: Tensor | None = None, *, cu_seqlens: Any = None) -> Tensor:
        """The hash alone, ``[B, T]`` int32, for a loader that hashes ahead; pass it to `forward` as ``rows=``.

        ``out``: where to put it, for example pinned memory. For tokens of a sequence that is not sharded.
        """
        bounds, fault = read_bounds("BigramHashEmbedding", cu_seqlens, self.axis.rank)
        if fault is None and bounds is not None and bounds[-1] != tokens.shape[-1]:
            fault = ValueError(
                f"BigramHashEmbedding: cu_seqlens end at {bounds[-1]}, but there are {tokens.shape[-1]} tokens "
                f"(rank {self.axis.rank})"
            )
        if fault is not None:
            raise fault
        starts = [0] if bounds is None else [start for start in bounds[:-1] if start < tokens.shape[-1]]
        before = torch.nn.functional.pad(tokens[..., :-1], (1, 0))
        is_first = torch.zeros(tokens.shape[-1], dtype=torch.bool, device=tokens.device)
        is_first[starts if tokens.shape[-1] else []] = True
        rows = self._hash(tokens, before, is_first)
        return rows if out is None else out.copy_(rows)

    def _hash(self, tokens: Tensor, before: Tensor, is_first: Tensor) -> Tensor:
        a, b = (torch.tensor(number, dtype=torch.int32, device=tokens.device) for number in self.multipliers)
        mixed = (a * tokens.int()) ^ (b * before.int())  # int32 wraps around
        return (mixed % (self.num_embeddings - 1)).masked_fill(is_first, self.num_embeddings - 1)

    def forward(
        self,
        tokens: Tensor | None = None,
        *,
        rows: Tensor | None = None,
        cu_seqlens: Any = None,
        layout: str | None = None,
        context_group: Any = None,
        sequence: Sequence | None = None,
    ) -> Tensor:
        """The rows of the bigrams that end at each token, ``[B, T, d]``.

        ``rows``: their ids from `rows_of`, instead of ``tokens``. ``layout`` and ``context_group``, or ``sequence``:
        how a sharded sequence lies on ranks.
        """
        if (tokens is None) == (rows is None):
            raise TypeError(f"BigramHashEmbedding: pass either tokens or rows (rank {self.axis.rank})")
        if rows is not None:
            return super().forward(rows)
        assert tokens is not None
        if context_group is None and sequence is None:
            if layout is not None:
                raise ValueError("BigramHashEmbedding: layout is of a sequence over a context_group, which is missing")
            return super().forward(self.rows_of(tokens, cu_seqlens=cu_seqlens))
        return super().forward(self._rows_of_sharded(tokens, cu_seqlens, layout, context_group, sequence))

    def prefetch(self, ids: Tensor) -> None:
        """Start fetching the rows of the next batch: ``ids`` are what `rows_of` gives, and then ``rows=``."""
        super().prefetch(ids)

    def _rows_of_sharded(
        self, tokens: Tensor, cu_seqlens: Any, layout: str | None, context_group: Any, given: Sequence | None
    ) -> Tensor:
        """The hash of this rank's slice: the last token of every run is told to all."""
        operation, length = "BigramHashEmbedding", tokens.shape[-1]
        axis, layout, bounds, fault = read_sequence(operation, length, layout, cu_seqlens, context_group, given)
        batch = tokens.reshape(math.prod(tokens.shape[:-1]), length)
        cuts = run_lengths(length, layout, axis.rank, axis.size) if fault is None else []
        ends = [sum(cuts[: index + 1]) for index in range(len(cuts))]
        last = [batch[:, end - 1].tolist() if cut else [0] * len(batch) for cut, end in zip(cuts, ends, strict=True)]
        numbers = [length, *(token for run in last for token in run)]
        numbers += [0] * (1 + 2 * len(batch) - len(numbers))  # a rank has one run or two
        options = None if fault else _Options(len(batch), layout, bounds)
        call = axis.begin(f"{operation}.context", options, tell=numbers, fault=fault)
        told = call.told.wait()
        where = given or settle(operation, call, axis, layout, bounds)
        before = torch.nn.functional.pad(batch[:, :-1], (1, 0))
        is_first = torch.zeros(length, dtype=torch.bool, device=tokens.device)
        starts = {0, *(bounds or ())}
        seen: dict[int, int] = {}
        previous: list[int] | None = None
        for run in where.runs:
            number = seen[run.rank] = seen.get(run.rank, -1) + 1
            if not run.length:
                continue
            if run.rank == axis.rank:
                if previous is not None:
                    before[:, run.start] = torch.tensor(previous, dtype=before.dtype, device=before.device)
                for start in starts:
                    if run.offset <= start < run.offset + run.length:
                        is_first[run.start + start - run.offset] = True
            at = 1 + number * len(batch)
            previous = list(told[run.rank][at : at + len(batch)])
        return self._hash(batch, before, is_first).view(tokens.shape)


@dataclass(frozen=True)
class _Options:
    batch: int
    layout: str
    cu_seqlens: tuple[int, ...] | None
