"""Schedules that run along paths of ranks and advance together, round by round.

A *path* is a chain of ranks; a rank may stand in it more than once (a zigzag layout passes every rank twice), and a
rank may stand in many paths (one for each packed document). A *schedule* runs at one place of one path, as a
generator: it first says what it will receive and in which round, is sent this rank's value when that is computed, then
yields a `Round` for each round in which it sends or receives, and returns its result.

`ScheduleExecutor` runs all schedules of a rank. Their messages of one round to one peer are one message, and a round's
messages are one exchange: few messages on any network, and one order of exchanges on all ranks, without which a network
that keeps messages in one line (NCCL) would deadlock.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import Tensor

from weft.comm.call import Call, Expected
from weft.comm.wire import Pending, coalesce, empty_coalesced, split_coalesced

T = TypeVar("T")


@dataclass(frozen=True)
class Path:
    """A chain of ranks seen from place ``rank`` of it. ``name`` tells the paths of one call apart.

    >>> Path((4, 7, 9), 1).reversed()
    Path(ranks=(9, 7, 4), rank=1, name=0)
    """

    ranks: tuple[int, ...]
    rank: int
    name: int = 0

    @staticmethod
    def along(call: Call) -> Path:
        """All ranks of a call, in order."""
        return Path(tuple(range(call.size)), call.rank)

    @property
    def size(self) -> int:
        return len(self.ranks)

    def reversed(self) -> Path:
        """The path walked from its end: a suffix scan is the prefix schedule on this."""
        return Path(self.ranks[::-1], self.size - 1 - self.rank, self.name)


@dataclass(frozen=True)
class Expect:
    """What a schedule will receive: (round, place on the path, contiguous tensor to fill).

    ``memory``: all else that it has made before it is sent its value, and will work in. A lane must be given it too.
    """

    receives: Sequence[tuple[int, int, Tensor]]
    memory: Sequence[Tensor] = ()


@dataclass(frozen=True)
class Round:
    """A round of a schedule: (place on the path, contiguous tensor to send). Numbers rise; both ends use the same.

    The schedule goes on when everything expected in this round is there and, unless ``sends_later``, what it sends
    has arrived. Tensors sent later must not be touched until the schedule has ended.
    """

    number: int
    sends: Sequence[tuple[int, Tensor]] = ()
    sends_later: bool = False


Schedule = Generator[Expect | Round, Any, T]
_Key = tuple[int, int, int]  # path, place it comes from, place it goes to: the order within a merged message


class ScheduleExecutor(Generic[T]):
    """The schedules of this rank in one call. Making it posts all receives, where the network allows that.

    ``run`` may be given to a lane, which must then be given ``buffers`` too.
    """

    def __init__(self, call: Call, schedules: Sequence[tuple[Path, Schedule[T]]]) -> None:
        self._schedules = schedules
        self._to_self: dict[tuple[int, _Key], Tensor] = {}
        self.buffers: list[Tensor] = []  # all memory that was made for the schedules before they run
        coming: dict[int, dict[int, list[tuple[_Key, Tensor]]]] = defaultdict(lambda: defaultdict(list))
        for path, schedule in schedules:
            expect = next(schedule)
            assert isinstance(expect, Expect), "a schedule first says what it will receive"
            self.buffers += [*expect.memory, *(tensor for _, _, tensor in expect.receives)]
            for number, source, tensor in expect.receives:
                key = (path.name, source, path.rank)
                if path.ranks[source] == call.rank:
                    self._to_self[number, key] = tensor
                elif tensor.numel():
                    coming[number][path.ranks[source]].append((key, tensor))
        self._expected: dict[int, Expected] = {}
        self._buffers: dict[int, list[tuple[Tensor, list[Tensor]]]] = {}  # of each round, and the tensors they fill
        for number in sorted(coming):
            ranks = sorted(coming[number])
            tensors = [_in_order(coming[number][rank]) for rank in ranks]
            buffers = [empty_coalesced(some) for some in tensors]
            self._expected[number] = call.expect(list(zip(ranks, buffers, strict=True)))
            self._buffers[number] = list(zip(buffers, tensors, strict=True))
            self.buffers += buffers

    def run(self, call: Call, values: Sequence[Any]) -> list[T]:
        """Send every schedule its value, do the rounds, return the results. ``call``: the same, or a lane of it."""
        results: list[Any] = [None] * len(self._schedules)
        rounds: dict[int, Round] = {}

        def resume(index: int, value: Any) -> None:
            try:
                step = self._schedules[index][1].send(value)
                assert isinstance(step, Round)
                rounds[index] = step
            except StopIteration as stop:
                rounds.pop(index, None)
                results[index] = stop.value

        for index, value in enumerate(values):
            resume(index, value)
        unfinished: list[Pending[None]] = []
        while rounds:
            number = min(step.number for step in rounds.values())
            now = {index: step for index, step in rounds.items() if step.number == number}
            expected = self._expected.pop(number, None)
            pending = call.exchange(self._outgoing(call, number, now), () if expected is None else expected)
            if any(step.sends_later for step in now.values()):
                unfinished.append(pending)
                if expected is not None:
                    expected.wait()
            else:
                pending.wait()
            for buffer, tensors in self._buffers.pop(number, ()):
                split_coalesced(buffer, tensors)
            for index in now:
                resume(index, None)
        for pending in unfinished:
            pending.wait()
        return results

    def _outgoing(self, call: Call, number: int, rounds: dict[int, Round]) -> list[tuple[int, Tensor]]:
        """The messages of a round, one for each peer; what stays on this rank is handed over at once."""
        outgoing: dict[int, list[tuple[_Key, Tensor]]] = defaultdict(list)
        for index, step in rounds.items():
            path = self._schedules[index][0]
            for place, tensor in step.sends:
                key = (path.name, path.rank, place)
                if path.ranks[place] == call.rank:
                    target = self._to_self.pop((number, key))
                    target.copy_(tensor.view(target.shape))
                elif tensor.numel():
                    outgoing[path.ranks[place]].append((key, tensor))
        return [(rank, coalesce(_in_order(keyed))) for rank, keyed in sorted(outgoing.items())]


def _in_order(keyed: list[tuple[_Key, Tensor]]) -> list[Tensor]:
    """The tensors of a message in the order that both of its ends know."""
    return [tensor for _, tensor in sorted(keyed, key=lambda part: part[0])]
