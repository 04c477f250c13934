"""`Batches`: which tokens a rank computes on in each step, read ahead and with their bigram rows hashed.

A corpus is cut into sequences of ``length`` tokens. Every epoch takes them all once, in an order that depends on seed
and epoch alone; a step takes the next ``batch`` of them, whatever the mesh is:

    sequences of the step   s0 s1 s2 s3 | s4 s5 s6 s7       data rank r takes the r-th part
    packed row              one after the other: documents (cut where sequences end) are marked by cu_seqlens
    context rank            its slice of the row, by the layout
"""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from weft.ops.sequence.layout import find_layout_fault, shard_lengths
from weft.ops.sequence.operation import cut
from weft.train.corpus import Corpus

IGNORED = -100  # the target of a token that does not count, as in torch's cross_entropy
_END_OF_THREAD = 10.0  # seconds that `close` waits for a batch that is being made
HashRows = Callable[[Tensor, tuple[int, ...]], Tensor]  # of tokens [1, T] with cu_seqlens: rows [1, T]


@dataclass(frozen=True, eq=False)
class Batch:
    """What one rank computes on in a step: its part of its data rank's packed sequences.

    tokens: ``[1, t]`` int64. targets: ``[1, t]`` int64, the token after each, or -100 where there is nothing to learn
    (see `validation_batches`). positions: ``[1, t]`` int64, the place within the document. rows: ``[1, t]`` int32, of
    the bigram table. cu_seqlens: boundaries of documents in the data rank's whole row. sequence: how many sequences of
    the stream, over all epochs and data ranks, come before this row.
    """

    tokens: Tensor
    targets: Tensor
    positions: Tensor
    rows: Tensor
    cu_seqlens: tuple[int, ...]
    sequence: int


class Batches:
    """The batches of one rank from ``position`` on, without end; the next ``read_ahead`` are made by a thread.

    data_rank, data_size, context_rank, context_size: this rank's place on the mesh; layout: how the context ranks share
    a row, "contiguous" or "zigzag". hash_rows: `BigramHashEmbedding.rows_of`, called with the whole row and its
    cu_seqlens. shuffle: False takes sequences as they lie. stop: end at this position; the last batch may be smaller
    and is filled up (see `validation_batches`). Nothing crosses ranks.

    ``position`` is the number of sequences in the batches handed out so far, of all data ranks and epochs: to go on
    from there later, on any mesh. ``sequences``: of one epoch.

    >>> from weft.train.corpus import open_corpus
    >>> with Batches(open_corpus(None), length=64, batch=8, hash_rows=lambda tokens, bounds: tokens.int()) as batches:
    ...     next(batches).tokens.shape, batches.position
    (torch.Size([1, 512]), 8)
    """

    def __init__(
        self,
        corpus: Corpus,
        *,
        length: int,
        batch: int,
        hash_rows: HashRows,
        seed: int = 0,
        data_rank: int = 0,
        data_size: int = 1,
        context_rank: int = 0,
        context_size: int = 1,
        layout: str = "contiguous",
        position: int = 0,
        read_ahead: int = 2,
        shuffle: bool = True,
        stop: int | None = None,
    ) -> None:
        stream = _Stream(corpus, length, seed if shuffle else None)
        place = _Place(data_rank, data_size, context_rank, context_size, layout)
        if fault := _find_fault(batch, position, place, stop):
            raise fault
        self.position, self.sequences = position, stream.count
        self._batch, self._stop = batch, stop
        self._ahead = _ReadAhead(_batches(stream, place, batch, position, stop, hash_rows), read_ahead)
        # Also at exit: a daemon thread that is stopped within an operator of torch takes the process with it.
        self._close = weakref.finalize(self, self._ahead.end)

    @property
    def epoch(self) -> int:
        """How many times every sequence has been handed out."""
        return self.position // self.sequences

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Batch:
        batch = self._ahead.take()
        after = self.position + self._batch
        self.position = after if self._stop is None else min(after, self._stop)
        return batch

    def peek(self) -> Batch:
        """The next batch, which stays the next: its rows can be fetched already. StopIteration after the last."""
        return self._ahead.peek()

    def close(self) -> None:
        """End the thread that reads ahead. May be called twice."""
        self._close()

    def __enter__(self) -> Batches:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def validation_batches(
    corpus: Corpus, *, length: int, batch: int, at_most: int, hash_rows: HashRows, **place: Any
) -> Batches:
    """At most ``at_most`` batches from the start of a held-out part, in order: the same sequences on any mesh.

    ``place``: this rank's place on the mesh, as for `Batches`.

    A corpus with fewer sequences gives fewer batches, the last one smaller. Every data rank gets as many sequences in a
    batch as the others: where they do not divide, the last ranks get a sequence again whose targets are all -100. So
    the loss is the sum over targets that are not -100, divided by their number, both summed over the ranks.
    """
    if at_most < 1:
        raise ValueError(f"train: at least 1 validation batch is needed, got {at_most}")
    stop = min(at_most * batch, _Stream(corpus, length, None).count)
    return Batches(corpus, length=length, batch=batch, hash_rows=hash_rows, shuffle=False, stop=stop, **place)


@dataclass(frozen=True)
class _Place:
    data_rank: int
    data_size: int
    context_rank: int
    context_size: int
    layout: str


def _find_fault(batch: int, position: int, place: _Place, stop: int | None) -> Exception | None:
    size = place.data_size
    if batch < 1:
        return ValueError(f"train: --batch must be at least 1 sequence, got {batch}")
    if position < 0:
        return ValueError(f"train: the position in the data must not be negative, got {position}")
    if not 0 <= place.data_rank < size:
        return ValueError(f"train: there is no data rank {place.data_rank} among {size}")
    if not 0 <= place.context_rank < place.context_size:
        return ValueError(f"train: there is no context rank {place.context_rank} among {place.context_size}")
    if stop is None and batch % size:
        return ValueError(
            f"train: --batch {batch} sequences cannot be shared by {size} data ranks; it must be a multiple of {size}, "
            f"for example {batch // size * size or size}"
        )
    return find_layout_fault("train", place.layout, place.context_rank)


class _Stream:
    """The sequences of a corpus, epoch after epoch, by their number in the stream. ``seed`` None: as they lie."""

    def __init__(self, corpus: Corpus, length: int, seed: int | None) -> None:
        if length < 1:
            raise ValueError(f"train: --length must be at least 1 token, got {length}")
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
    stream: _Stream, place: _Place, batch: int, position: int, stop: int | None, hash_rows: HashRows
) -> Iterator[Batch]:
    while stop is None or position < stop:
        whole = batch if stop is None else min(batch, stop - position)
        share = -(-whole // place.data_size)
        first = position + place.data_rank * share
        real = max(0, min(share, position + whole - first))
        numbers = stream.numbers(first, real) or stream.numbers(position, 1)
        numbers += numbers[-1:] * (share - len(numbers))
        tokens, targets, bounds = stream.row(numbers)  # the whole row of a data rank
        targets[real * stream.length :] = IGNORED
        starts = torch.tensor(bounds[:-1], dtype=torch.int64)
        lengths = torch.tensor(bounds[1:], dtype=torch.int64) - starts
        positions = torch.arange(len(tokens)) - starts.repeat_interleave(lengths)
        whole_row = tokens[None], targets[None], positions[None], hash_rows(tokens[None], bounds)
        shards = shard_lengths(len(tokens), place.layout, place.context_size)
        mine = [cut(part, 1, shards, place.layout, place.context_rank) for part in whole_row]
        yield Batch(mine[0], mine[1], mine[2], mine[3], cu_seqlens=bounds, sequence=first)
        position += whole


class _ReadAhead:
    """The batches of ``source`` in their order, up to ``count`` of them made ahead by a thread.

    An error of ``source`` is raised where its batch would have come, and again at every later call. The reader is not
    known here, so that it can be forgotten; then it calls `end`.
    """

    def __init__(self, source: Iterator[Batch], count: int) -> None:
        if count < 1:
            raise ValueError(f"ReadAhead: count must be at least 1, got {count}")
        self._free = threading.Semaphore(count)
        self._made: SimpleQueue[Batch | BaseException] = SimpleQueue()
        self._next: Batch | BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._fill, args=(source,), name="weft-read-ahead", daemon=True)
        self._thread.start()

    def _fill(self, source: Iterator[Batch]) -> None:
        try:
            while self._free.acquire() and not self._closed:
                self._made.put(next(source))
        except BaseException as error:  # it is the reader's, and so is the StopIteration after the last
            self._made.put(error)

    def peek(self) -> Batch:
        if self._next is None and not self._closed:
            self._next = self._made.get()
        if self._closed or self._next is None:
            raise RuntimeError("ReadAhead: closed; nothing can be read any more")
        if isinstance(self._next, BaseException):
            raise self._next
        return self._next

    def take(self) -> Batch:
        batch, self._next = self.peek(), None
        self._free.release()
        return batch

    def end(self) -> None:
        """End the thread; what was made ahead is dropped."""
        self._closed = True
        self._free.release()
        self._made.put(StopIteration())  # wakes a reader that waits in another thread
        if self._thread is not threading.current_thread():  # the last reference may end anywhere
            self._thread.join(_END_OF_THREAD)
