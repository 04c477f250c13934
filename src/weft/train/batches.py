"""`Batches`: which tokens a rank computes on in each step, read ahead and with their bigram rows hashed.

A corpus is cut into sequences of ``length`` tokens. Every epoch takes them all once, in an order that depends on seed
and epoch alone; a step takes the next ``batch`` of them, whatever the mesh is:

    sequences of the step   s0 s1 s2 s3 | s4 s5 s6 s7       data rank r takes the r-th part
    packed row              one after the other: documents (cut where sequences end) are marked by cu_seqlens
    context rank            its slice of the row, by the layout
"""

from __future__ import annotations

import hashlib
import sys
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.ops.sequence.layout import shard_runs
from weft.ops.sequence.operation import cut
from weft.train.corpus import Corpus

IGNORED = -100  # the target of a token that does not count, as in torch's cross_entropy
HashRows = Callable[[Tensor, tuple[int, ...]], Tensor]  # of tokens [1, T] with cu_seqlens: rows [1, T]


@dataclass(frozen=True, eq=False)
class Batch:
    """What one rank computes on in a step: its part of its data rank's packed sequences.

    tokens: ``[1, t]`` int64. targets: ``[1, t]`` int64, the token after each, or -100 where there is nothing to learn
    (see `validation_batches`). positions: ``[1, t]`` int64, the place within the document. rows: ``[1, t]`` int32, of
    the bigram table. cu_seqlens: boundaries of documents in the data rank's whole row.
    """

    tokens: Tensor
    targets: Tensor
    positions: Tensor
    rows: Tensor
    cu_seqlens: tuple[int, ...]


@dataclass(frozen=True)
class Shard:
    """A rank's place on the mesh; ``layout`` is how context ranks share a row: see `weft.shard`."""

    data_rank: int = 0
    data_size: int = 1
    context_rank: int = 0
    context_size: int = 1
    layout: str = "contiguous"


class Batches(Iterator[Batch], AbstractContextManager["Batches"]):
    """The batches of one rank from ``position`` on, without end; the next ``read_ahead`` are made by a thread.

    hash_rows: `BigramHashEmbedding.rows_of`, called with the whole row and its cu_seqlens. seed: None takes sequences
    as they lie. stop: end at this position; the last batch may be smaller and is filled up (see `validation_batches`).
    Nothing crosses ranks.

    ``position`` is the number of sequences in the batches handed out so far, of all data ranks and epochs: to go on
    from there later, on any mesh.

    >>> from weft.train.corpus import open_corpus
    >>> rows = lambda tokens, bounds: tokens.int()
    >>> with Batches(open_corpus(None), Shard(), length=64, batch=8, hash_rows=rows) as batches:
    ...     next(batches).tokens.shape, batches.position
    (torch.Size([1, 512]), 8)
    """

    def __init__(
        self,
        corpus: Corpus,
        shard: Shard,
        *,
        length: int,
        batch: int,
        hash_rows: HashRows,
        seed: int | None = 0,
        position: int = 0,
        read_ahead: int = 2,
        stop: int = sys.maxsize,
    ) -> None:
        self.position, self._batch, self._stop = position, batch, stop
        # It knows nothing of this object, so that both can be forgotten; then, and at exit, its thread ends.
        self._source = _batches(_Stream(corpus, length, seed), shard, batch, position, stop, hash_rows)
        self._thread = ThreadPoolExecutor(1, "weft-read-ahead")
        self._ahead = deque(self._thread.submit(next, self._source) for _ in range(read_ahead))

    def __next__(self) -> Batch:
        batch = self.peek()
        self._ahead.popleft()
        self._ahead.append(self._thread.submit(next, self._source))
        self.position = min(self.position + self._batch, self._stop)
        return batch

    def peek(self) -> Batch:
        """The next batch, which stays the next: its rows can be fetched already. StopIteration after the last.

        An error of the thread is raised where its batch would have come, and again at every later call.
        """
        if not self._ahead:
            raise RuntimeError("Batches: closed; nothing can be read any more")
        return self._ahead[0].result()

    def close(self) -> None:
        """End the thread; what was made ahead is dropped. May be called twice."""
        self._ahead.clear()
        self._thread.shutdown(cancel_futures=True)

    def __exit__(self, *error: object) -> None:
        self.close()


def validation_batches(
    corpus: Corpus, shard: Shard, *, length: int, batch: int, at_most: int, hash_rows: HashRows
) -> Batches:
    """At most ``at_most`` batches from the start of a held-out part, in order: the same sequences on any mesh.

    A corpus with fewer sequences gives fewer batches, the last one smaller. Every data rank gets as many sequences in a
    batch as the others: where they do not divide, the last ranks get a sequence again whose targets are all -100. So
    the loss is the sum over targets that are not -100, divided by their number, both summed over the ranks.
    """
    stop = min(at_most * batch, _Stream(corpus, length, None).count)
    return Batches(corpus, shard, length=length, batch=batch, hash_rows=hash_rows, seed=None, stop=stop)


class _Stream:
    """The sequences of a corpus, epoch after epoch, by their number in the stream. ``seed`` None: as they lie."""

    def __init__(self, corpus: Corpus, length: int, seed: int | None) -> None:
        self.corpus, self.length, self.seed = corpus, length, seed
        self.count = (len(corpus.tokens) - 1) // length
        if self.count < 1:
            raise ValueError(
                f"train: --data has {len(corpus.tokens)} tokens ({corpus.name}), but one sequence and its target need "
                f"{length + 1}; give more text or a smaller --length"
            )
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.int64)

    def numbers(self, first: int, count: int) -> list[int]:
        """Which sequences of the corpus are at ``first : first + count`` of the stream."""
        found: list[int] = []
        while len(found) < count:
            epoch, at = divmod(first + len(found), self.count)
            found += self._order_of(epoch)[at : at + count - len(found)].tolist()
        return found

    def _order_of(self, epoch: int) -> Tensor:
        if epoch != self._epoch:
            mixed = hashlib.sha256(f"{self.seed} {epoch}".encode()).digest()  # neighbouring seeds share no epoch
            generator = torch.Generator().manual_seed(int.from_bytes(mixed[:4], "little"))
            in_order = self.seed is None
            self._order = torch.arange(self.count) if in_order else torch.randperm(self.count, generator=generator)
            self._epoch = epoch
        return self._order

    def row(self, numbers: list[int]) -> tuple[Tensor, Tensor, tuple[int, ...]]:
        """(tokens ``[T]``, targets ``[T]``, cu_seqlens) of these sequences, one after the other."""
        begins = torch.tensor(numbers, dtype=torch.int64) * self.length
        pieces = [self.corpus.tokens[begin : begin + self.length + 1].long() for begin in begins.tolist()]
        starts = self.corpus.starts
        low = torch.searchsorted(starts, begins, right=True).tolist()
        high = torch.searchsorted(starts, begins + self.length).tolist()
        bounds: list[int] = []
        for index, begin in enumerate(begins.tolist()):
            offset = index * self.length
            bounds += [offset, *(starts[low[index] : high[index]] - begin + offset).tolist()]
        bounds.append(len(numbers) * self.length)
        return torch.cat([piece[:-1] for piece in pieces]), torch.cat([piece[1:] for piece in pieces]), tuple(bounds)


def _batches(
    stream: _Stream, shard: Shard, batch: int, position: int, stop: int, hash_rows: HashRows
) -> Iterator[Batch]:
    while position < stop:
        whole = min(batch, stop - position)
        share = -(-whole // shard.data_size)
        first = position + shard.data_rank * share
        real = max(0, min(share, position + whole - first))
        numbers = stream.numbers(first, real) or stream.numbers(position, 1)
        numbers += numbers[-1:] * (share - len(numbers))
        tokens, targets, bounds = stream.row(numbers)  # the whole row of a data rank
        targets[real * stream.length :] = IGNORED
        starts = torch.tensor(bounds[:-1], dtype=torch.int64)
        lengths = torch.tensor(bounds[1:], dtype=torch.int64) - starts
        positions = torch.arange(len(tokens)) - starts.repeat_interleave(lengths)
        whole_row = tokens[None], targets[None], positions[None], hash_rows(tokens[None], bounds)
        runs = shard_runs(len(tokens), shard.layout, shard.context_size, bounds)
        mine = [cut(part, 1, runs, shard.context_rank) for part in whole_row]
        yield Batch(mine[0], mine[1], mine[2], mine[3], bounds)
        position += whole
