"""ATen's flash operators for devices: half precision, heads of at most 256, windows, several sequences in one call.

Shapes as in `kernels`, with one head size; results are in half precision. No GPU has run this yet: on the simulated
device the operators are emulated, with their checks.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from weft.comm.device import copy_to_device
from weft.comm.function import keep_tensors
from weft.ops.attention.flash_calls import FlashCall

LARGEST_HEAD = 256  # that flash takes
_aten = torch.ops.aten


def attend(q: Tensor, k: Tensor, v: Tensor, call: FlashCall, scale: float) -> tuple[Tensor, Tensor]:
    """See `kernels.attend_block`."""
    size, (q, k, v) = q.shape[-1], (_for_flash(x, call) for x in (q, k, v))
    sequences, causal, window = _arguments(call, q.device)
    out, lse, *_ = _aten._flash_attention_forward(q, k, v, *sequences, 0.0, causal, False, scale=scale, **window)
    return _from_flash(out, call, size), lse[None] if _is_packed(call) else lse


def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: FlashCall, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """See `kernels.attend_block_backward`."""
    size, (grad, q, k, v, out) = q.shape[-1], (_for_flash(x, call) for x in (grad, q, k, v, out))
    sequences, causal, window = _arguments(call, q.device)
    lse = (lse[0] if _is_packed(call) else lse).contiguous()
    unused = torch.empty(0, dtype=torch.int64, device=q.device)  # of dropout, which there is not
    dq, dk, dv = _aten._flash_attention_backward(
        grad, q, k, v, out, lse, *sequences, 0.0, causal, unused, unused, scale=scale, **window
    )
    return _from_flash(dq, call, size), _from_flash(dk, call, size), _from_flash(dv, call, size)


def _is_packed(call: FlashCall) -> bool:
    """Whether it has several sequences, one after the other without a batch dimension."""
    return len(call.areas) > 1


def _arguments(call: FlashCall, device: torch.device) -> tuple[tuple[Any, ...], bool, dict[str, int]]:
    """(cumulative and largest lengths of queries and keys), whether it is plainly causal, and the window if not."""
    queries, keys = call.lengths
    ends = (_ends(queries, device), _ends(keys, device)) if _is_packed(call) else (None, None)
    causal = (call.left, call.right) == (-1, 0)
    plain = causal or call.left == call.right == -1
    window = {} if plain else {"window_size_left": call.left, "window_size_right": call.right}
    return (*ends, max(queries), max(keys)), causal, window


@keep_tensors(maxsize=64)
def _ends(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    return ends if device.type == "meta" else copy_to_device(ends, device)  # what has no values has no cost either


def _for_flash(x: Tensor, call: FlashCall) -> Tensor:
    """``[B, h, n, D]`` as ``[B, n, h, D]``, of several sequences ``[n, h, D]``, for the operator.

    It reads vectors of a multiple of 8 in pieces of 16 bytes. Zeros at their end change no score, and their own columns
    are cut off again.
    """
    x = x[0].transpose(0, 1) if _is_packed(call) else x.transpose(1, 2)
    if x.shape[-1] % 8:
        return pad(x, (0, -x.shape[-1] % 8))
    whole = x.stride(-1) == 1 and not any(step % 8 for step in (x.storage_offset(), *x.stride()[:-1]))
    return x if whole else x.clone(memory_format=torch.contiguous_format)


def _from_flash(x: Tensor, call: FlashCall, size: int) -> Tensor:
    return (x[None] if _is_packed(call) else x)[..., :size].transpose(1, 2)
