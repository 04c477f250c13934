"""What takes rounds of messages on a call: schedules along paths of ranks, and the gathering of metadata.

A *path* is a chain of ranks; a rank may stand in it more than once (a zigzag layout passes every rank twice), and a
rank may stand in many paths (one for each packed document). A *schedule* runs at one place of one path, as a
generator: it first says what it will receive and in which round, is sent this rank's value when that is computed, then
yields a `Round` for each round in which it sends or receives, and returns its result.

`ScheduleExecutor` runs all schedules of a rank. Their messages of one round to one peer are one message, and a round's
messages are one exchange: few messages on any network, and one order of exchanges on all ranks, without which a network
that keeps messages in one line (NCCL) would deadlock.

Metadata are a few integers of every rank for every rank, and whether the ranks agree. A rank sends 1 if it found a
fault in its arguments (else 0), the digest of its signature, and the operation's own integers (a length, counts). The
tag does not depend on the options, so ranks that differ still get each other's. Only when something is wrong do they
exchange more: their signatures or faults as text, and all raise the same.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor

from weft.comm.call import Call, Expected, coalesce, empty_coalesced, split_coalesced
from weft.comm.wire import Pending, diagnose, dump_records, load_records, mix
from weft.errors import error_of

if TYPE_CHECKING:
    from weft.comm.axis import Axis

T = TypeVar("T")
FAN_OUT = 16  # ranks up to which everybody writes to everybody; beyond, messages double on the way: log2(P) of them


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


def gather_metadata(
    call: Call, numbers: Sequence[int], to_each: Sequence[Sequence[int]] | None = None
) -> Pending[list[tuple[int, ...]]]:
    """Start the round. ``wait()`` gives everybody's ``numbers`` by rank, or raises what is wrong.

    ``to_each[r]`` are further integers that only rank r gets, as many for every rank; they follow the others.
    """
    record = call.record
    digest = zlib.crc32(repr((record.operation, record.signature)).encode())
    mine = torch.tensor([int(record.fault is not None), digest, *numbers], device=call.wire.host)
    apart = None if to_each is None else torch.tensor(to_each, dtype=torch.int64, device=call.wire.host)
    coming = _share(call, mine, "numbers", apart)

    def finish() -> list[tuple[int, ...]]:
        table = [tuple(row) for row in coming.wait().tolist()]
        if any(row[0] or row[1] != digest for row in table):
            _raise_diagnosis(call)
        return [row[2:] for row in table]

    return Pending(finish)


def _share(call: Call, mine: Tensor, purpose: str, apart: Tensor | None = None) -> Pending[Tensor]:
    """Everybody's ``mine`` ``[n]`` as ``[P, n]``: one round on few ranks, log2(P) rounds on many.

    ``apart`` ``[P, m]`` holds what each rank alone gets; with it the result is ``[P, n + m]``.
    """
    # Ranks that send more or fewer integers must not meet: a message of another length breaks a connection.
    widths = f"{len(mine)}+{0 if apart is None else apart.shape[1]}"
    words = f"{call.counter.name} {call.record.operation} {purpose} {widths}"
    tag = mix(zlib.crc32(words.encode()), call.record.number)
    if call.size <= FAN_OUT:
        everything = mine.expand(call.size, -1)
        return _fan_out(call, tag, everything if apart is None else torch.cat([everything, apart], 1))
    shared = _double(call, mine, lambda lane, sends, receives: lane.exchange_on_host(tag, sends, receives))
    if apart is None:
        return shared
    direct = _fan_out(call, mix(tag, 1), apart)
    return Pending(lambda: torch.cat([shared.wait(), direct.wait()], 1))


def _fan_out(call: Call, tag: int, outgoing: Tensor) -> Pending[Tensor]:
    """Row r to rank r; the rows every rank sent here."""
    received = torch.empty_like(outgoing, memory_format=torch.contiguous_format)
    received[call.rank] = outgoing[call.rank]
    sends = [(other, outgoing[other].contiguous()) for other in call.others]
    pending = call.exchange_on_host(tag, sends, [(other, received[other]) for other in call.others])

    def finish() -> Tensor:
        pending.wait()
        return received

    return Pending(finish)


def gather_rows(call: Call, mine: Tensor) -> Pending[Tensor]:
    """Everybody's ``mine`` ``[n]``, a few numbers, as ``[P, n]`` where it lies; on many ranks log2(P) messages each."""
    if call.size <= FAN_OUT:
        coming = call.all_gather(mine)
        return Pending(lambda: torch.stack(coming.wait()))
    return _double(call, mine, Call.exchange)


def _double(call: Call, mine: Tensor, exchange: Callable[..., Pending[None]]) -> Pending[Tensor]:
    """Everybody's ``mine``: in each round a rank passes on all it knows."""
    size, rank = call.size, call.rank
    table = mine.new_empty(size, len(mine))
    table[0] = mine  # row i: of rank - i

    def rounds(lane: Call) -> None:
        known = 1
        while known < size:
            count = min(known, size - known)
            receives = [((rank - known) % size, table[known : known + count])]
            exchange(lane, [((rank + known) % size, table[:count])], receives).wait()
            known += count

    pending = call.start(rounds, table.device, [table])

    def finish() -> Tensor:
        pending.wait()
        return table.flip(0).roll(rank + 1, 0)  # row i: of rank i

    return Pending(finish)


def gather_text(axis: Axis, operation: str, mine: str) -> list[str]:
    """Every rank's text, by rank. All ranks must call it.

    >>> from weft.comm import Axis
    >>> gather_text(Axis.of(None), "greet", "hello")
    ['hello']
    """
    return [data.decode() for data in gather_bytes(axis, f"{operation}.text", mine.encode())]


def gather_bytes(axis: Axis, operation: str, mine: bytes) -> list[bytes]:
    """Every rank's bytes, by rank, over the side of the host. All ranks must call it."""
    call = axis.begin(operation, metadata=[len(mine)])
    return _share_bytes(call, mine, [size for (size,) in call.metadata.wait()])


def _share_bytes(call: Call, mine: bytes, sizes: Sequence[int]) -> list[bytes]:
    if call.size == 1:
        return [mine]
    padded = torch.frombuffer(bytearray(mine.ljust(max(1, *sizes), b"\0")), dtype=torch.uint8).to(call.wire.host)
    rows = _share(call, padded, "bytes").wait().tolist()
    return [bytes(row[:size]) for row, size in zip(rows, sizes, strict=True)]


def _raise_diagnosis(call: Call) -> None:
    """Exchange records as text; raise the first rank's fault or the disagreement. `Axis.begin` raises the own fault."""
    words = dump_records([call.record]).encode()
    sizes = _share(call, torch.tensor([len(words)], device=call.wire.host), "sizes").wait().flatten().tolist()
    texts = _share_bytes(call, words, sizes)
    if call.record.fault is not None:
        return
    diagnosis = diagnose({rank: load_records(text)[0] for rank, text in enumerate(texts)}, call.size)
    assert diagnosis is not None, "digests differ, so do the signatures"
    raise error_of(diagnosis)
