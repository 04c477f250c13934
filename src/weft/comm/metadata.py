"""The metadata of a call: a few integers of every rank for every rank, and whether the ranks agree. Also text.

A rank sends 1 if it found a fault in its arguments (else 0), the digest of its signature, and the operation's own
integers (a length, counts). The tag does not depend on the options, so ranks that differ still get each other's. Only
when something is wrong do they exchange more: their signatures or faults as text, and all raise the same.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from weft.comm.call import Call
from weft.comm.records import diagnose, dump_records, load_records, mix
from weft.comm.wire import Pending
from weft.errors import error_of

if TYPE_CHECKING:
    from weft.comm.axis import Axis

FAN_OUT = 16  # ranks up to which everybody writes to everybody; beyond, messages double on the way: log2(P) of them


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
    shared = _double(call, tag, mine)
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


def _double(call: Call, tag: int, mine: Tensor) -> Pending[Tensor]:
    """Everybody's ``mine``: in each round a rank passes on all it knows."""
    size, rank = call.size, call.rank
    table = mine.new_empty(size, len(mine))
    table[0] = mine  # row i: of rank - i

    def rounds(lane: Call) -> None:
        known = 1
        while known < size:
            count = min(known, size - known)
            lane.exchange_on_host(
                tag, [((rank + known) % size, table[:count])], [((rank - known) % size, table[known : known + count])]
            ).wait()
            known += count

    pending = call.start(rounds, table.device, [table])

    def finish() -> Tensor:
        pending.wait()
        return table[[(rank - other) % size for other in range(size)]]

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
