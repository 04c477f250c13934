"""The one small round of integers of a call: what every rank tells, and whether they agree.

A rank tells 1 if it found a fault in its arguments (else 0), the digest of its signature, and the operation's own
integers (a length, counts). The tag does not depend on the options, so ranks that differ still hear each other. Only
when something is wrong do they tell each other more: their signatures or faults as text, and all raise the same.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from weft.comm.counter import mix
from weft.comm.wire import Pending
from weft.errors import CallRecord, diagnose, error_of

if TYPE_CHECKING:
    from weft.comm.call import Call

FAN_OUT = 16  # ranks up to which everybody writes to everybody; beyond, messages double on the way: log2(P) of them


def gather_metadata(
    call: Call, numbers: Sequence[int], to_each: Sequence[Sequence[int]] | None = None
) -> Pending[list[tuple[int, ...]]]:
    """Start the round. ``wait()`` gives everybody's ``numbers`` by rank, or raises what is wrong.

    ``to_each[r]`` are further integers that only rank r hears, as many for every rank; they follow the others.
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

    ``apart`` ``[P, m]`` holds what each rank alone hears; with it the result is ``[P, n + m]``.
    """
    # Ranks that tell more or fewer integers must not meet: a message of another length breaks a connection.
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
    heard = torch.empty_like(outgoing, memory_format=torch.contiguous_format)
    heard[call.rank] = outgoing[call.rank]
    sends = [(other, outgoing[other].contiguous()) for other in call.others]
    pending = call.exchange_on_host(tag, sends, [(other, heard[other]) for other in call.others])

    def finish() -> Tensor:
        pending.wait()
        return heard

    return Pending(finish)


def _double(call: Call, tag: int, mine: Tensor) -> Pending[Tensor]:
    """Everybody's ``mine``: in each round a rank passes on all it knows."""
    size, rank = call.size, call.rank
    table = mine.new_empty(size, len(mine))
    table[0] = mine  # row i: what rank - i told

    def rounds(lane: Call) -> None:
        known = 1
        while known < size:
            count = min(known, size - known)
            lane.exchange_on_host(
                tag, [((rank + known) % size, table[:count])], [((rank - known) % size, table[known : known + count])]
            ).wait()
            known += count

    pending = call.start(rounds)

    def finish() -> Tensor:
        pending.wait()
        return table[[(rank - other) % size for other in range(size)]]

    return Pending(finish)


def _raise_diagnosis(call: Call) -> None:
    """Exchange records as text; raise the first rank's fault or the disagreement. `Axis.begin` raises the own fault."""
    record = call.record
    words = json.dumps([record.operation, record.signature, record.fault]).encode()
    text = torch.tensor(list(words), dtype=torch.uint8, device=call.wire.host)
    sizes = _share(call, torch.tensor([len(words)], device=call.wire.host), "sizes").wait().flatten().tolist()
    padded = text.new_zeros(max(sizes))
    padded[: len(words)] = text
    told = _share(call, padded, "words").wait()
    if record.fault is not None:
        return
    records = {}
    for rank, size in enumerate(sizes):
        operation, signature, fault = json.loads(bytes(told[rank, :size].tolist()))
        pairs = tuple((name, value) for name, value in signature)
        records[rank] = CallRecord(record.counter, record.number, operation, pairs, 0, fault and tuple(fault))
    diagnosis = diagnose(records, call.size)
    assert diagnosis is not None, "digests differ, so do the signatures"
    raise error_of(diagnosis)
