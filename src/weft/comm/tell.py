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


def tell(call: Call, numbers: Sequence[int]) -> Pending[list[tuple[int, ...]]]:
    """Start the round. ``wait()`` gives everybody's ``numbers`` by rank, or raises what is wrong."""
    record = call.record
    digest = zlib.crc32(repr((record.operation, record.signature)).encode())
    mine = torch.tensor([int(record.fault is not None), digest, *numbers], device=call.wire.host)
    coming = _share(call, mine, "numbers")

    def finish() -> list[tuple[int, ...]]:
        table = [tuple(row) for row in coming.wait().tolist()]
        if any(row[0] or row[1] != digest for row in table):
            _raise_diagnosis(call)
        return [row[2:] for row in table]

    return Pending(finish)


def _share(call: Call, mine: Tensor, purpose: str) -> Pending[Tensor]:
    """Everybody's ``mine`` ``[n]`` as ``[P, n]``: one round on few ranks, log2(P) rounds on many."""
    tag = mix(zlib.crc32(f"{call.counter.name} {call.record.operation} {purpose}".encode()), call.record.number)
    size, rank = call.size, call.rank
    table = mine.new_empty(size, len(mine))
    table[0] = mine  # row i: what rank - i told
    if size <= FAN_OUT:
        sends = [(other, mine) for other in call.others]
        receives = [((rank - row) % size, table[row]) for row in range(1, size)]
        pending = call.exchange_on_host(tag, sends, receives)
    else:

        def double(lane: Call) -> None:
            known = 1
            while known < size:
                count = min(known, size - known)
                lane.exchange_on_host(
                    tag, [((rank + known) % size, table[:count])],
                    [((rank - known) % size, table[known : known + count])],
                ).wait()  # fmt: skip
                known += count

        pending = call.start(double)

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
