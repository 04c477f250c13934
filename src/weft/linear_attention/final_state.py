"""Final states to every rank, and their gradients back to where they arise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from weft.comm import Axis, Pending
from weft.linear_attention.journey import Journey


def share_final_states(
    call: Axis, journey: Journey, ended: Mapping[int, Tensor], batch: int, like: Tensor
) -> Pending[Tensor]:
    """All documents' final states ``[B*N, HV, K, V]`` on every rank; ``ended`` holds those of this one.

    One round: each rank sends its own to all others.
    """
    mine = _stack([ended[document] for document in journey.ending_on(call.rank)], like)
    boxes = [
        mine if rank == call.rank else like.new_empty(batch * len(journey.ending_on(rank)), *like.shape[1:])
        for rank in range(call.size)
    ]
    pending = _exchange(call, [mine] * call.size, boxes)

    def finish() -> Tensor:
        pending.wait()
        final = like.new_empty(batch * len(journey.ends), *like.shape[1:])
        for rank, box in enumerate(boxes):
            for number, document in enumerate(journey.ending_on(rank)):
                final[document * batch : (document + 1) * batch] = box[number * batch : (number + 1) * batch]
        return final

    return Pending(finish)


def collect_final_gradients(call: Axis, journey: Journey, grad: Tensor, batch: int) -> Pending[Tensor]:
    """The sum over ranks, in rank order, of the gradients of the final states that arise here; others are zero."""

    def rows(document: int) -> slice:
        return slice(document * batch, (document + 1) * batch)

    outgoing = [_stack([grad[rows(d)] for d in journey.ending_on(rank)], grad) for rank in range(call.size)]
    mine = outgoing[call.rank]
    boxes = [mine if rank == call.rank else torch.empty_like(mine) for rank in range(call.size)]
    pending = _exchange(call, outgoing, boxes)

    def finish() -> Tensor:
        pending.wait()
        summed = boxes[0].clone()
        for box in boxes[1:]:
            summed += box
        total = torch.zeros_like(grad)
        for number, document in enumerate(journey.ending_on(call.rank)):
            total[rows(document)] = summed[rows(number)]
        return total

    return Pending(finish)


def _stack(states: Sequence[Tensor], like: Tensor) -> Tensor:
    return torch.cat(list(states)) if states else like.new_empty(0, *like.shape[1:])


def _exchange(call: Axis, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> Pending[None]:
    others = [rank for rank in range(call.size) if rank != call.rank]
    return call.exchange([(r, outgoing[r]) for r in others], [(r, incoming[r]) for r in others])
