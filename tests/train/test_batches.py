"""`Batches`: the same global batch on every mesh, the same stream from any position, and a thread that ends."""

from __future__ import annotations

import gc
import itertools
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

import weft
from weft.ops.sequence.layout import LAYOUTS, shard_runs
from weft.train.batches import IGNORED, Batch, Batches, Shard, validation_batches
from weft.train.corpus import Corpus

LENGTH, BATCH = 7, 4
ROWS = 101
TABLE = weft.BigramHashEmbedding(ROWS, 1)
FIELDS = ("tokens", "targets", "positions", "rows")


def hash_rows(tokens: Tensor, bounds: tuple[int, ...]) -> Tensor:
    return TABLE.rows_of(tokens, cu_seqlens=bounds)


def numbers(total: int = 143, documents: int = 30) -> Corpus:
    """A corpus whose tokens are their own places, so that a token says where it was."""
    order = torch.randperm(total - 1, generator=torch.Generator().manual_seed(3))[: documents - 1] + 1
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), order.sort().values])
    return Corpus("numbers", torch.arange(total, dtype=torch.int32), starts, total, "")


def batches(corpus: Corpus, shard: Shard = Shard(), **options: object) -> Batches:  # noqa: B008 it is frozen
    return Batches(corpus, shard, **{"length": LENGTH, "batch": BATCH, "hash_rows": hash_rows, "seed": 1, **options})


def take(stream: Batches, count: int) -> list[Batch]:
    with stream:
        return list(itertools.islice(stream, count))


def same(one: Batch, two: Batch) -> bool:
    equal = all(torch.equal(getattr(one, name), getattr(two, name)) for name in FIELDS)
    return equal and one.cu_seqlens == two.cu_seqlens


def sequences_of(batch: Batch) -> list[int]:
    """Which sequences are in a row that is not cut."""
    return (batch.tokens.view(-1, LENGTH)[:, 0] // LENGTH).tolist()


def put_together(parts: list[Batch], layout: str) -> Batch:
    """A data rank's row again, from the parts of its context ranks."""
    total = parts[0].cu_seqlens[-1]
    runs = shard_runs(total, layout, len(parts), parts[0].cu_seqlens)
    assert all(part.cu_seqlens == parts[0].cu_seqlens for part in parts)
    assert sum(part.tokens.shape[1] for part in parts) == total  # no token twice
    rows = (
        torch.cat([getattr(parts[run.rank], name)[:, run.start : run.start + run.length] for run in runs], 1)
        for name in FIELDS
    )
    return Batch(*rows, parts[0].cu_seqlens)


@pytest.mark.parametrize("seed", [1, None])
def test_a_whole_row(seed: int | None) -> None:
    """Against the definition, token by token."""
    corpus = numbers()
    starts = set(corpus.starts.tolist())
    for batch in take(batches(corpus, seed=seed), 12):
        bounds, positions = [], []
        for at, token in enumerate(batch.tokens[0].tolist()):
            if at % LENGTH == 0 or token in starts:
                bounds.append(at)
            positions.append(at - bounds[-1])
        assert batch.cu_seqlens == (*bounds, BATCH * LENGTH)
        assert batch.positions.tolist() == [positions]
        assert torch.equal(batch.targets, batch.tokens + 1)
        for first in batch.tokens[0, ::LENGTH].tolist():
            assert first % LENGTH == 0
        assert all(batch.tokens[0, n] == batch.tokens[0, n - 1] + 1 for n in range(BATCH * LENGTH) if n % LENGTH)
        assert torch.equal(batch.rows, hash_rows(batch.tokens, batch.cu_seqlens))
        reserved = (batch.rows[0] == ROWS - 1).nonzero().view(-1).tolist()
        assert reserved == bounds  # the first token of every document has no token before it
        assert [getattr(batch, name).dtype for name in FIELDS] == [torch.int64] * 3 + [torch.int32]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("length", [LENGTH, 1])
def test_the_global_batch_is_the_same_on_every_mesh(layout: str, length: int) -> None:
    corpus, steps = numbers(), 8
    alone = take(batches(corpus, length=length), steps)
    for data, context in itertools.product((1, 2, 4), (1, 2, 3, 5)):
        ranks = [
            [
                take(batches(corpus, Shard(row, data, column, context, layout), length=length), steps)
                for column in range(context)
            ]
            for row in range(data)
        ]
        for step, whole in enumerate(alone):
            rows = [put_together([rank[step] for rank in row], layout) for row in ranks]
            share = BATCH // data * length
            for name in FIELDS:
                assert torch.equal(torch.cat([getattr(row, name) for row in rows], 1), getattr(whole, name))
            bounds = {bound + at * share for at, row in enumerate(rows) for bound in row.cu_seqlens}
            assert bounds == set(whole.cu_seqlens)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_cut_is_that_of_weft_shard(layout: str) -> None:
    corpus = numbers()
    whole = take(batches(corpus), 1)[0]

    def program(axis: weft.Axis) -> bool:
        part = take(batches(corpus, Shard(0, 1, axis.rank, 3, layout)), 1)[0]
        where = weft.sequence(part.tokens.shape[1], layout=layout, cu_seqlens=part.cu_seqlens, group=axis)
        assert torch.equal(where.positions(), part.positions[0])
        return torch.equal(weft.shard(whole.tokens, 1, sequence=where), part.tokens)

    assert weft.world.VirtualWorld(3).run(program).results == [True] * 3


@pytest.mark.parametrize("batch", [1, 3, BATCH, 20, 45])  # of 20 sequences: within epochs, across, several at once
def test_every_epoch_takes_everything_once_in_another_order(batch: int) -> None:
    corpus = numbers()
    taken = [number for made in take(batches(corpus, batch=batch), -(-60 // batch)) for number in sequences_of(made)]
    epochs = [taken[at : at + 20] for at in (0, 20, 40)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert list(range(20)) not in epochs
    other = take(batches(corpus, batch=20, seed=2), 2)
    assert all(sequences_of(made) not in epochs for made in other)
    ordered = take(batches(corpus, batch=batch, seed=None), 2)
    assert [n for made in ordered for n in sequences_of(made)] == [n % 20 for n in range(2 * batch)]


@pytest.mark.parametrize("batch", [BATCH, 3])
def test_a_stream_goes_on_from_any_position(batch: int) -> None:
    corpus = numbers()
    shard = Shard(0, 1, 1, 2)
    whole = take(batches(corpus, shard, batch=batch), 14)
    for step in range(13):
        stream = batches(corpus, shard, batch=batch, position=step * batch)
        assert stream.position == step * batch
        assert all(same(one, two) for one, two in zip(take(stream, 14 - step), whole[step:], strict=True))


def test_position_counts_what_was_handed_out() -> None:
    made = threading.Semaphore(0)

    def count(tokens: Tensor, bounds: tuple[int, ...]) -> Tensor:
        made.release()
        return hash_rows(tokens, bounds)

    with batches(numbers(), hash_rows=count, read_ahead=3, position=8) as stream:
        for _ in range(3):
            assert made.acquire(timeout=30)  # three are ahead
        assert stream.position == 8
        ahead = stream.peek()
        assert stream.peek() is ahead and stream.position == 8
        assert next(stream) is ahead and stream.position == 12
        assert made.acquire(timeout=30)  # one was taken, one more is made
        assert stream.peek() is not ahead and stream.peek() is next(stream)
        assert made.acquire(timeout=30) and not made.acquire(timeout=0.05)  # and no more than three
        next(stream)
        assert stream.position == 20


def test_an_error_in_the_thread_reaches_the_reader_at_its_batch() -> None:
    seen = itertools.count()

    def fail_at_third(tokens: Tensor, bounds: tuple[int, ...]) -> Tensor:
        if next(seen) == 2:
            raise OSError("the disk is gone")
        return hash_rows(tokens, bounds)

    with batches(numbers(), hash_rows=fail_at_third) as stream:
        assert sequences_of(next(stream)) and sequences_of(next(stream))
        for again in (stream.peek, stream.__next__, stream.__next__):
            with pytest.raises(OSError, match="the disk is gone"):
                again()
        assert stream.position == 2 * BATCH


def readers() -> int:
    return sum(thread.name.startswith("weft-read-ahead") for thread in threading.enumerate())


def test_the_thread_ends() -> None:
    gc.collect()
    before = readers()
    making, closing = threading.Event(), threading.Event()

    def hold(tokens: Tensor, bounds: tuple[int, ...]) -> Tensor:
        making.set()
        assert closing.wait(30)
        return hash_rows(tokens, bounds)

    stream = batches(numbers(), hash_rows=hold)
    assert making.wait(30) and readers() == before + 1
    threading.Timer(0.05, closing.set).start()
    stream.close()  # while a batch is being made
    stream.close()
    assert readers() == before
    for read in (stream.__next__, stream.peek):
        with pytest.raises(RuntimeError, match="closed"):
            read()
    filled = batches(numbers())
    filled.peek()
    filled.close()
    with pytest.raises(RuntimeError, match="closed"):
        next(filled)
    forgotten = batches(numbers())
    next(forgotten)
    del forgotten
    gc.collect()
    deadline = time.monotonic() + 30
    while readers() > before and time.monotonic() < deadline:
        time.sleep(0.01)  # it makes what was asked for, then ends by itself
    assert readers() == before


def test_python_ends_while_the_thread_reads_a_mapped_file(tmp_path: Path) -> None:
    """And torch does not warn that such a file cannot be written to."""
    path = tmp_path / "x.bin"
    path.write_bytes(bytes(1 << 20))
    code = (
        "import sys; from pathlib import Path; from weft.train.batches import Batches, Shard\n"
        "from weft.train.corpus import open_corpus\n"
        "corpus = open_corpus(Path(sys.argv[1]))\n"
        "stream = Batches(corpus, Shard(), length=1 << 10, batch=64, hash_rows=lambda x, b: x.int(), read_ahead=1000)\n"
        "next(stream)"
    )
    command = [sys.executable, "-W", "error", "-c", code, str(path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


def test_too_little_data_is_refused() -> None:
    corpus = numbers()
    words = r"--data has 143 tokens \(numbers\), but one sequence .* need 144; .* smaller --length"
    with pytest.raises(ValueError, match=words):
        batches(corpus, length=143)
    assert len(take(batches(corpus, length=142), 1)) == 1


@pytest.mark.parametrize(
    ("batch", "at_most", "wanted"),
    [(4, 2, [4, 4]), (4, 100, [4, 4, 4, 4, 4]), (6, 100, [6, 6, 6, 2]), (50, 3, [20]), (1, 3, [1, 1, 1])],
)
def test_validation_is_over_the_same_sequences_on_any_mesh(batch: int, at_most: int, wanted: list[int]) -> None:
    corpus = numbers()
    for data, context in ((1, 1), (2, 1), (4, 3), (7, 2)):
        found: list[list[int]] = [[] for _ in wanted]
        for row in range(data):
            parts = []
            for column in range(context):
                shard = Shard(row, data, column, context, "zigzag")
                stream = validation_batches(
                    corpus, shard, length=LENGTH, batch=batch, at_most=at_most, hash_rows=hash_rows
                )
                parts.append(list(stream))
                assert stream.position == sum(wanted)
                with pytest.raises(StopIteration):
                    stream.peek()
            for step, whole in enumerate(map(list, zip(*parts, strict=True))):
                one = put_together(whole, "zigzag")
                share = -(-wanted[step] // data)
                assert one.tokens.shape == (1, share * LENGTH)  # as long as the others'
                counts = one.targets != IGNORED
                assert torch.equal(one.targets[counts], one.tokens[counts] + 1)
                found[step] += one.tokens[counts].tolist()
        ends = list(itertools.accumulate(wanted, initial=0))
        assert found == [list(range(a * LENGTH, b * LENGTH)) for a, b in itertools.pairwise(ends)]
