"""Final states to every rank, and their gradients back to where they arise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from weft.comm import Call, Pending
from weft.ops.linear_attention.segments import SequencePlan


def share_final_states(
    call: Call, plan: SequencePlan, ended: Mapping[int, Tensor], batch: int, like: Tensor
) -> Pending[Tensor]:
    """All documents' final states ``[B*N, HV, K, V]`` on every rank; ``ended`` holds those of this one.

    One round: each rank sends its own to all others.
    """
    mine = _stack([ended[document] for document in plan.ending_on(call.rank)], like)
    coming = call.all_gather(mine, [batch * len(plan.ending_on(rank)) for rank in range(call.size)])

    def finish() -> Tensor:
        final = like.new_empty(batch * len(plan.ends), *like.shape[1:])
        for rank, states in enumerate(coming.wait()):
            for number, document in enumerate(plan.ending_on(rank)):
                final[_rows(document, batch)] = states[_rows(number, batch)]
        return final

    return Pending(finish)


def collect_final_gradients(call: Call, plan: SequencePlan, grad: Tensor, batch: int) -> Pending[Tensor]:
    """The sum over ranks, in rank order, of the gradients of the final states that arise here; others are zero."""
    coming = call.sum_to_owners(
        [_stack([grad[_rows(d, batch)] for d in plan.ending_on(rank)], grad) for rank in range(call.size)]
    )

    def finish() -> Tensor:
        summed = coming.wait()
        total = torch.zeros_like(grad)
        for number, document in enumerate(plan.ending_on(call.rank)):
            total[_rows(document, batch)] = summed[_rows(number, batch)]
        return total

    return Pending(finish)


def _rows(document: int, batch: int) -> slice:
    return slice(document * batch, (document + 1) * batch)


def _stack(states: Sequence[Tensor], like: Tensor) -> Tensor:
    return torch.cat(list(states)) if states else like.new_empty(0, *like.shape[1:])
