"""The distributed convolution: the local part, and beside it the halo; backward the same with gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.comm import Axis
from weft.comm.function import RankFunction
from weft.ops.sequence.layout import ANY_LENGTHS, Bounds, Sequence, resolve, run_lengths
from weft.ops.short_conv.halo import HaloPlan, Window, fetch, give_back, plan_halo
from weft.ops.short_conv.slide import Gaps, slide, weight_gradient


@dataclass(frozen=True)
class Options:
    """What the ranks must have in common: everything but their lengths."""

    x: tuple[int, int]
    weight: tuple[int, ...]
    bias: bool
    activation: str | None
    dtype: torch.dtype
    device: str  # its type
    initial_state: tuple[int, ...] | None
    output_final_state: bool
    cu_seqlens: Bounds | None
    layout: str
    lengths: tuple[int, ...] | None  # of a sequence that was made before
    gradients: tuple[bool, ...]

    @property
    def wide(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)


class ShortConv(RankFunction):
    """y and the final states of a causal convolution of each channel.

    | crosses ranks | forward                                        | backward                             |
    |---------------|------------------------------------------------|--------------------------------------|
    | lengths       | a few integers; none if ``sequence`` is given  |                                      |
    | halo          | the k-1 tokens before each segment, to its rank | their gradients, back, fp32          |
    | final states  | the last k-1 tokens of documents, to every rank, if asked for | their gradients, back |

    Kept for the backward: the inputs and the windows of this rank.
    """

    operation = "short_conv"

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, initial: Tensor | None, options: Options, axis: Axis,
        sequence: Sequence | None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        tokens, rows, bounds = x.shape[1], weight.shape[1] - 1, options.cu_seqlens
        call = axis.begin("short_conv", options, metadata=None if sequence else (tokens,))
        local = None
        if sequence is None and bounds is None and options.layout in ANY_LENGTHS:  # no other rank's length is needed
            local = _convolve(x, weight, bias, _own_runs(options.layout, tokens, axis), options.wide)
        sequence = sequence or resolve("short_conv", call, axis, options.layout, bounds)
        finals = options.output_final_state
        plan = plan_halo(sequence.runs, axis.size, bounds, rows, axis.rank, finals)
        coming = fetch(call, plan, x, None if initial is None else _windows_of(initial, bounds), rows, options.wide)
        if local is None:
            local = _convolve(x, weight, bias, _places(plan), options.wide)
        halo = coming.wait()
        _add_heads(local, halo, weight, plan.segments)
        ctx.save_for_backward(x, weight, bias, initial, halo)
        ctx.axis = axis
        ctx.how = options, plan, call.number
        ctx.set_materialize_grads(False)
        y = torch.nn.functional.silu(local) if options.activation == "silu" else local
        return y.to(x.dtype), _final(halo, plan, bounds, x.dtype) if finals else None

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor | None, grad_final: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight, bias, initial, halo = ctx.saved_tensors
        options, plan, number = ctx.how
        call = ctx.axis.begin("short_conv.backward", options, of=number)
        wide, taps, segments = options.wide, weight.shape[1], plan.segments
        grad = torch.zeros_like(x, dtype=wide) if grad_y is None else grad_y.to(wide)
        gaps = Gaps(_places(plan), x.shape[1], taps, x.device)
        if options.activation == "silu":
            local = _convolve(x, weight, bias, _places(plan), wide)
            _add_heads(local, halo, weight, segments)
            gate = local.sigmoid()
            grad = grad * gate * (1 + local * (1 - gate))
        # What the windows get: of a segment from its first k-1 tokens, of a final state what was given for it.
        heads = halo.new_zeros(len(segments), x.shape[0], 2 * (taps - 1), x.shape[2])
        for number, window in enumerate(segments):
            count = min(window.length, taps - 1)
            heads[number, :, taps - 1 : taps - 1 + count] = grad[:, window.start : window.start + count]
        turned = weight.detach().to(wide).flip(1)
        windows = torch.zeros_like(halo)
        windows[: len(segments)] = slide(heads, turned)
        if grad_final is not None:
            windows[len(segments) :] = _windows_of(grad_final.to(wide), options.cu_seqlens)
        returning = give_back(call, plan, windows)
        laid = gaps.lay(grad, after=True)
        dx = gaps.take(slide(laid, turned))
        dweight = weight_gradient(gaps.lay(x.detach().to(wide)), laid.narrow(1, 0, gaps.rows), taps)
        before = torch.cat([halo[: len(segments)], torch.zeros_like(halo[: len(segments)])], dim=2)
        dweight += weight_gradient(before, heads[:, :, taps - 1 :], taps)
        dbias = None if bias is None else grad.sum((0, 1)).to(bias.dtype)
        for piece, part in returning.wait():
            dx[:, piece.start : piece.start + piece.length] += part
        start = _initial_gradient(initial, plan, windows, options.cu_seqlens)
        return dx.to(x.dtype), dweight.to(weight.dtype), dbias, start, None, None, None


def _own_runs(layout: str, tokens: int, axis: Axis) -> list[tuple[int, int]]:
    """(start, length) of this rank's runs that hold tokens."""
    runs, start = [], 0
    for count in run_lengths(tokens, layout, axis.rank, axis.size):
        runs.append((start, count))
        start += count
    return [run for run in runs if run[1]]


def _places(plan: HaloPlan) -> list[tuple[int, int]]:
    return [(window.start, window.length) for window in plan.segments]


def _convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, segments: list[tuple[int, int]], wide: torch.dtype
) -> Tensor:
    """Every segment as if nothing came before it, [B, T, D]."""
    gaps = Gaps(segments, x.shape[1], weight.shape[1], x.device)
    local = gaps.take(slide(gaps.lay(x.detach().to(wide)), weight.detach().to(wide)))
    return local if bias is None else local.add_(bias.detach())


def _add_heads(local: Tensor, halo: Tensor, weight: Tensor, segments: list[Window]) -> None:
    """Add what the windows give to the first tokens of their segments, in place."""
    windows = halo[: len(segments)]
    heads = slide(torch.cat([windows, torch.zeros_like(windows)], dim=2), weight.detach().to(halo.dtype))
    for number, window in enumerate(segments):
        count = min(window.length, halo.shape[2])
        local[:, window.start : window.start + count] += heads[number, :, :count]


def _windows_of(states: Tensor, bounds: Bounds | None) -> Tensor:
    """States [B, D, k-1], packed [N, D, k-1], as windows [N, B, k-1, D]."""
    return states.detach().mT.unsqueeze(0 if bounds is None else 1)


def _final(halo: Tensor, plan: HaloPlan, bounds: Bounds | None, dtype: torch.dtype) -> Tensor:
    """The windows at the ends of documents as states: the inverse of `_windows_of`."""
    return halo[len(plan.segments) :].squeeze(0 if bounds is None else 1).mT.to(dtype, copy=True).contiguous()


def _initial_gradient(initial: Tensor | None, plan: HaloPlan, windows: Tensor, bounds: Bounds | None) -> Tensor | None:
    """What this rank's windows give to the initial states."""
    if initial is None:
        return None
    total = torch.zeros_like(initial, dtype=windows.dtype)
    by_document, rows = total.mT.unsqueeze(0 if bounds is None else 1), windows.shape[2]
    for number, window in enumerate(plan.windows):
        if window.offset < rows:
            by_document[window.document, :, window.offset :] += windows[number, :, : rows - window.offset]
    return total.to(initial.dtype)
