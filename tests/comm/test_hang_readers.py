"""What finding out why nobody answers costs on many ranks, and who does it: detectors on a store that counts."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta

import pytest

from weft.comm import hang
from weft.comm.hang import HangDetector
from weft.comm.wire import CallRecord


class Clock:
    """Time that passes only where somebody sleeps."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class CountingStore:
    """The rendezvous store as one rank sees it. ``reads`` counts keys by rank."""

    def __init__(self, rank: int, kept: dict[str, bytes], reads: Counter[int]) -> None:
        self.rank, self.kept, self.reads = rank, kept, reads

    def clone(self) -> CountingStore:
        return self

    def set(self, key: str, value: str) -> None:
        self.kept[key] = value.encode()

    def get(self, key: str) -> bytes:
        self.reads[self.rank] += 1
        return self.kept[key]

    def check(self, keys: list[str]) -> bool:
        self.reads[self.rank] += len(keys)
        return all(key in self.kept for key in keys)

    def add(self, key: str, amount: int) -> int:
        self.reads[self.rank] += 1
        self.kept[key] = str(int(self.kept.get(key, b"0")) + amount).encode()
        return int(self.kept[key])

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        self.reads[self.rank] += 1
        if self.kept.get(key, b"").decode() == expected:
            self.kept[key] = value.encode()
        return self.kept.get(key, b"")


class World:
    """Detectors of ``size`` ranks that look in turn, every period."""

    def __init__(self, size: int, clock: Clock) -> None:
        self.clock, self.reads, self.kept = clock, Counter[int](), dict[str, bytes]()
        self.closed: list[int] = []
        self.detectors = {rank: self.detector(rank, size) for rank in range(size)}
        self.waits = {}

    def detector(self, rank: int, size: int) -> HangDetector:
        store = CountingStore(rank, self.kept, self.reads)
        detector = HangDetector(rank, size, store, timedelta(seconds=40), lambda: self.closed.append(rank))
        hang._detectors.discard(detector)  # a watching thread that earlier tests have started leaves it alone
        return detector

    def call(self, rank: int, number: int, operation: str = "scan") -> None:
        """The rank makes a call and waits in it."""
        self.stop_waiting(rank)
        record = CallRecord("world", number, operation, (), number)
        self.detectors[rank].announce(record)
        self.waits[rank] = self.detectors[rank].waiting(record)
        self.waits[rank].__enter__()

    def stop_waiting(self, rank: int) -> None:
        if rank in self.waits:
            self.detectors[rank]._waits.clear()

    def pass_seconds(self, seconds: float, dead: tuple[int, ...] = ()) -> None:
        until = self.clock.now + seconds
        while self.clock.now < until:
            self.clock.sleep(hang.PERIOD)
            for rank, detector in self.detectors.items():
                if rank not in dead:
                    detector.inspect()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(hang, "time", clock)
    monkeypatch.setattr(hang, "_watcher", object())  # nobody looks but the test
    monkeypatch.setattr(hang, "_detectors", set())
    return clock


def reads_until_closed(size: int, clock: Clock) -> Counter[int]:
    """All ranks but the last make a call and wait; the last makes another one."""
    world = World(size, clock)
    for rank in range(size):
        world.call(rank, 1, "scan" if rank < size - 1 else "gather")
    start = clock.now
    world.pass_seconds(3)
    assert set(world.closed) == set(range(size))
    assert b"the ranks disagree" in world.kept["closed"] and clock.now - start < 5
    return world.reads


def test_reads_grow_with_the_ranks_and_not_with_their_square(clock: Clock) -> None:
    few, many = reads_until_closed(16, clock), reads_until_closed(64, clock)
    reader = max(few, key=few.__getitem__)
    assert reader == max(many, key=many.__getitem__)
    assert {many[rank] for rank in range(64) if rank != reader} == {few[rank] for rank in range(16) if rank != reader}
    assert max(few[rank] for rank in range(16) if rank != reader) < 40
    assert many[reader] <= 4 * few[reader] and many.total() <= 4 * few.total()


def test_a_long_wait_for_a_slow_rank_costs_everybody_the_same(clock: Clock) -> None:
    """Nothing new has been published, so nobody reads it again."""
    world = World(64, clock)
    for rank in range(1, 64):
        world.call(rank, 1)
    world.pass_seconds(3)
    world.reads.clear()
    world.pass_seconds(10)
    assert not world.closed and max(world.reads.values()) <= 3 * 10 / hang.PERIOD + 3
    world.call(0, 1, "gather")
    world.pass_seconds(4)
    assert set(world.closed) == set(range(64))


@pytest.mark.parametrize("end", ["dies", "waits no longer"])
def test_a_reader_is_followed_by_another_rank(clock: Clock, end: str) -> None:
    world = World(8, clock)
    for rank in range(7):
        world.call(rank, 1)
    world.pass_seconds(2)
    reader = int(world.kept["reader"].split()[0])
    dead = (reader,) if end == "dies" else ()
    if end == "waits no longer":
        world.stop_waiting(reader)
    start = clock.now
    world.call(7, 1, "gather")
    world.pass_seconds(hang.PATIENCE + hang.LEASE + 6 * hang.PERIOD, dead)
    assert clock.now - start < 5
    assert int(world.kept["reader"].split()[0]) != reader
    assert set(world.closed) == set(range(8)) - {reader}


def test_a_reader_that_was_only_slow_does_no_harm(clock: Clock) -> None:
    """Two readers find the same, and the reason is written once."""
    world = World(4, clock)
    for rank in range(4):
        world.call(rank, 1, "scan" if rank else "gather")
    world.pass_seconds(hang.PATIENCE)
    first = int(world.kept.get("reader", b"0").split()[0])
    world.pass_seconds(4, dead=(first,))
    reason = world.kept["closed"]
    world.pass_seconds(1)
    assert world.kept["closed"] == reason and set(world.closed) == {0, 1, 2, 3}


def test_a_refusal_is_found_by_a_rank_that_does_not_wait_for_it(clock: Clock) -> None:
    """The reader refused the call, too, and waits elsewhere: it finds the reason of the one who does wait."""
    world = World(3, clock)
    fault = CallRecord("world", 1, "scan", (), 0, ("ValueError", "not this"))
    for rank in (0, 1):
        world.detectors[rank].refuse(fault)
    record = CallRecord("other", 1, "gather", (), 7)
    world.detectors[0].announce(record)
    world.detectors[0].refuse(fault)
    with world.detectors[0].waiting(record):
        world.pass_seconds(3)
        assert not world.closed and world.kept["reader"].startswith(b"0 ")
        world.call(2, 1)
        world.pass_seconds(3)
    assert b"not this" in world.kept["closed"]
