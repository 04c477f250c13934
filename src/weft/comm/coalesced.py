"""Several tensors for one rank as one message: few messages on any network, one for each peer and direction on NCCL."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weft.comm.call import Call
from weft.comm.wire import Pending

Coalesced = Sequence[tuple[int, Sequence[Tensor]]]  # (rank, contiguous tensors to send or to fill)


def exchange_coalesced(call: Call, sends: Coalesced, receives: Coalesced) -> Pending[None]:
    """`Call.exchange` for lists of tensors; a list of one travels without a copy."""
    opened = [(rank, _room(tensors), tensors) for rank, tensors in receives]
    pending = call.exchange(
        [(rank, _wrap(tensors)) for rank, tensors in sends], [(rank, memory) for rank, memory, _ in opened]
    )

    def finish() -> None:
        pending.wait()
        for _, memory, tensors in opened:
            if len(tensors) > 1:
                pieces = memory.split([tensor.numel() * tensor.element_size() for tensor in tensors])
                for piece, tensor in zip(pieces, tensors, strict=True):
                    _bytes(tensor).copy_(piece)

    return Pending(finish)


def _bytes(tensor: Tensor) -> Tensor:
    """Its memory; a contiguous tensor of one element may have any stride, which no view of bytes may."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _wrap(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat([_bytes(tensor) for tensor in tensors])


def _room(tensors: Sequence[Tensor]) -> Tensor:
    if len(tensors) == 1:
        return tensors[0]
    return tensors[0].new_empty(sum(tensor.numel() * tensor.element_size() for tensor in tensors), dtype=torch.uint8)
