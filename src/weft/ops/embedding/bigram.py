"""`BigramHashEmbedding`: a row for each pair of neighbouring tokens, by a hash."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from weft.comm import Axis
from weft.comm.arguments import find_choice_fault, find_integer_fault, find_tensor_fault, read, read_bounds, show
from weft.comm.device import copy_to_device, start_copy_to_host
from weft.ops.embedding.sharded import ShardedEmbedding
from weft.ops.sequence import Sequence
from weft.ops.sequence.layout import ANY_LENGTHS, LAYOUTS, Bounds, axis_of, read_sequence, resolve, run_lengths

_DEALT = tuple(layout for layout in LAYOUTS if layout not in ANY_LENGTHS)
_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@dataclass(frozen=True)
class _Options:
    batch: int
    layout: str
    cu_seqlens: tuple[int, ...] | None


class BigramHashEmbedding(ShardedEmbedding):
    """A `ShardedEmbedding` of hashed bigrams: token ids ``[B, T]`` in, rows ``[B, T, d]`` out.

    The row of token x[t] is ``(a x[t] XOR b x[t-1]) mod (N-1)`` in int32, with ``multipliers`` (a, b). The first
    token, and the first of every packed document (``cu_seqlens``, the same for every row of the batch), takes the
    reserved last row. The table begins at zero, as one that is added to a residual stream should.

    Where the sequence itself is sharded over ``context_group``, ``cu_seqlens`` are the boundaries in the whole sequence
    and the token before a run's first one comes from the rank that has it: a few integers for each row of the batch.

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
        name, rank = "BigramHashEmbedding", Axis.of(group).rank
        fault = find_integer_fault(name, "num_embeddings", num_embeddings, rank)
        if fault is None and num_embeddings < 2:
            words = f"num_embeddings must be at least 2, one of them reserved, got {num_embeddings}"
            fault = ValueError(f"{name}: {words} (rank {rank})")
        pair = list(multipliers) if isinstance(multipliers, tuple | list) else []
        wrong = (find_integer_fault(name, "multipliers", one, rank) or not -(2**31) <= one < 2**31 for one in pair)
        if fault is None and (len(pair) != 2 or any(wrong)):
            words = f"multipliers must be two integers of 32 bits, got {show(multipliers)}"
            fault = ValueError(f"{name}: {words} (rank {rank})")
        if fault is not None:
            raise fault
        super().__init__(
            num_embeddings, embedding_dim, group=group, ownership=ownership, reduce=reduce, replicate=replicate,
            device=device, dtype=dtype,
        )  # fmt: skip
        self.multipliers = multipliers

    def reset_parameters(self) -> None:
        """Zero."""
        nn.init.zeros_(self.weight)

    def rows_of(self, tokens: Tensor, out: Tensor | None = None, *, cu_seqlens: Any = None) -> Tensor:
        """The hash alone, ``[B, T]`` int32, for a loader that hashes ahead: the ids that `prefetch` takes.

        Pass it to `forward` as ``rows=``. ``out``: where to put it, for example pinned memory. For tokens of a sequence
        that is not sharded.
        """
        bounds = read("BigramHashEmbedding", self.axis.rank, lambda: self._read_bounds(tokens, cu_seqlens))
        if isinstance(bounds, Exception):  # nothing is sent here
            raise bounds
        rows = self._rows_of_whole(tokens, bounds)
        return rows if out is None else out.copy_(rows)

    def _read_bounds(self, tokens: Tensor, cu_seqlens: Any) -> Bounds | Exception | None:
        """Of tokens that are not sharded: where documents begin and end; or what is wrong with them."""
        name, rank = "BigramHashEmbedding", self.axis.rank
        if fault := find_tokens_fault(tokens, rank):
            return fault
        bounds = read_bounds(name, cu_seqlens, rank)
        if isinstance(bounds, tuple) and bounds[-1] != tokens.shape[-1]:
            words = f"cu_seqlens end at {bounds[-1]}, but there are {tokens.shape[-1]} tokens"
            return ValueError(f"{name}: {words} (rank {rank})")
        return bounds

    def _rows_of_whole(self, tokens: Tensor, bounds: Bounds | None) -> Tensor:
        starts = (0,) if bounds is None else bounds[:-1]
        return self._hash(tokens, [start for start in starts if start < tokens.shape[-1]], {})

    def _hash(self, tokens: Tensor, starts: list[int], previous: dict[int, list[int]]) -> Tensor:
        """The rows of tokens ``[..., T]``.

        Documents begin at the positions ``starts``. ``previous``: by position, the tokens before that lie elsewhere.
        """
        before = torch.nn.functional.pad(tokens[..., :-1], (1, 0))
        for at, column in previous.items():
            before[:, at] = copy_to_device(torch.tensor(column, dtype=before.dtype, device="cpu"), before.device)
        is_first = torch.zeros(tokens.shape[-1], dtype=torch.bool, device="cpu")
        is_first[starts] = True
        a, b = (int(number) for number in self.multipliers)
        mixed = (a * tokens.int()) ^ (b * before.int())  # int32 wraps around
        first = copy_to_device(is_first, tokens.device)
        return (mixed % (self.num_embeddings - 1)).masked_fill(first, self.num_embeddings - 1)

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
        if rows is not None and tokens is None:
            return super().forward(rows)
        if context_group is None and sequence is None:
            rank = self.axis.rank
            made = read("embedding", rank, lambda: self._read_whole(tokens, rows, layout, cu_seqlens))
            return self._look_up(made) if isinstance(made, Exception) else super().forward(made)
        return super().forward(self._rows_of_sharded(tokens, rows, cu_seqlens, layout, context_group, sequence))

    def _read_whole(self, tokens: Any, rows: Any, layout: Any, cu_seqlens: Any) -> Tensor | Exception:
        """The rows of tokens that are not sharded, or what is wrong."""
        if tokens is None or rows is not None:
            return _neither(self.axis.rank)
        if layout is not None:
            words = "layout is of a sequence over a context_group, which is missing"
            return ValueError(f"BigramHashEmbedding: {words} (rank {self.axis.rank})")
        bounds = self._read_bounds(tokens, cu_seqlens)
        return bounds if isinstance(bounds, Exception) else self._rows_of_whole(tokens, bounds)

    def _rows_of_sharded(
        self, tokens: Any, rows: Any, cu_seqlens: Any, layout: str | None, context_group: Any, given: Sequence | None
    ) -> Tensor:
        """The hash of this rank's slice: the last token of every run is gathered.

        In a layout where only all lengths say the runs they are gathered before, if no sequence is given.
        """
        operation = "BigramHashEmbedding"
        axis = axis_of(context_group, given)
        dealt = given is None and find_choice_fault(operation, "layout", layout, axis.rank, _DEALT) is None
        found = read(
            operation, axis.rank, lambda: _read_sharded(tokens, rows, cu_seqlens, layout, context_group, given, axis)
        )
        try:
            if isinstance(found, Exception):
                rows_here = math.prod(tokens.shape[:-1]) if type(tokens) is Tensor else 0
                most = 0 if dealt else _most_runs(given) * rows_here
                axis.refuse(f"{operation}.{'lengths' if dealt else 'context'}", found, metadata=1 + most)
            options, batch = found
            if dealt:
                call = axis.begin(f"{operation}.lengths", options, metadata=(batch.shape[1],))
                given = resolve(operation, call, axis, options.layout, options.cu_seqlens)
            numbers = _last_tokens(batch, options.layout, given, axis)
            call = axis.begin(f"{operation}.context", options, metadata=numbers)
            gathered = call.metadata.wait()
        except (ValueError, TypeError, NotImplementedError) as error:
            if self.axis.counter is not axis.counter:  # the rows' other ranks go on to the exchange of rows
                self.axis.publish_fault(operation, error)
            raise
        where = given or resolve(operation, call, axis, options.layout, options.cu_seqlens)
        starts: list[int] = []
        previous: dict[int, list[int]] = {}
        seen: dict[int, int] = {}
        last: list[int] | None = None  # tokens of the run before
        for run in where.runs:
            number = seen[run.rank] = seen.get(run.rank, -1) + 1
            if not run.length:
                continue
            if run.rank == axis.rank:
                if last is not None:
                    previous[run.start] = last
                within = (start - run.offset for start in {0, *(options.cu_seqlens or ())})
                starts += [run.start + at for at in within if 0 <= at < run.length]
            at = 1 + number * len(batch)
            last = list(gathered[run.rank][at : at + len(batch)])
        return self._hash(batch, starts, previous).view(tokens.shape)


def _read_sharded(
    tokens: Any, rows: Any, cu_seqlens: Any, layout: str | None, group: Any, given: Any, axis: Axis
) -> tuple[_Options, Tensor] | Exception:
    """(what ranks must have in common, tokens ``[B, T]``); or a fault."""
    if tokens is None or rows is not None:
        return _neither(axis.rank)
    if fault := find_tokens_fault(tokens, axis.rank):
        return fault
    length = tokens.shape[-1]
    where = read_sequence("BigramHashEmbedding", axis.rank, length, layout, cu_seqlens, group, given)
    if isinstance(where, Exception):
        return where
    batch = tokens.reshape(math.prod(tokens.shape[:-1]), length)
    return _Options(len(batch), *where), batch


def _last_tokens(batch: Tensor, layout: str, given: Sequence | None, axis: Axis) -> list[int]:
    """This rank's length and the last token of each of its runs, filled up to as many as a rank can have."""
    rows, length = batch.shape
    if given is None:
        cuts = run_lengths(length, layout, axis.rank, axis.size)
    else:
        cuts = [run.length for run in given.runs if run.rank == axis.rank]
    ends = [end - 1 for cut, end in zip(cuts, accumulate(cuts), strict=True) if cut]
    columns = [batch[:, end] for end in ends] or [batch[:, :0].reshape(-1)]
    last = iter(start_copy_to_host(torch.cat(columns)).wait().view(len(ends), rows).tolist())  # one read
    numbers = [length]
    for cut in cuts:
        numbers += next(last) if cut else [0] * rows
    return numbers + [0] * (1 + _most_runs(given) * rows - len(numbers))


def _most_runs(given: Any) -> int:
    """The most runs that a rank has."""
    dealt = given.dealt if isinstance(given, Sequence) else None
    return 2 if dealt is None else max(Counter(run.rank for run in dealt).values())


def find_tokens_fault(tokens: Any, rank: int) -> Exception | None:
    """What is wrong with token ids ``[..., T]``."""
    name = "BigramHashEmbedding"
    if fault := find_tensor_fault(name, "tokens", tokens, rank, _DTYPES, "a tensor of integers"):
        return fault
    if tokens.ndim < 1 or tokens.is_meta:
        words = f"of shape {list(tokens.shape)} on {tokens.device.type}"
        return ValueError(f"{name}: tokens must be [..., T], with values, got a tensor {words} (rank {rank})")
    return None


def _neither(rank: int) -> TypeError:
    return TypeError(f"BigramHashEmbedding: pass either tokens or rows (rank {rank})")
