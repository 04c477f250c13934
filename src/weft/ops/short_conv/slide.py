"""The local convolution: segments laid out with gaps of k-1 zero rows, so that one pass over all of them mixes none."""

from __future__ import annotations

from collections.abc import Sequence as Items

import torch
from torch import Tensor
from torch.nn import functional


def slide(rows: Tensor, weight: Tensor) -> Tensor:
    """y_r = sum_i weight_i rows_{r+i}: [..., R + k - 1, D] with weight [D, k] -> [..., R, D]."""
    taps = weight.shape[1]
    count = rows.shape[-2] - taps + 1
    total = rows.narrow(-2, 0, count) * weight[:, 0]
    for i in range(1, taps):
        total.addcmul_(rows.narrow(-2, i, count), weight[:, i])
    return total


def weight_gradient(rows: Tensor, grad: Tensor, taps: int) -> Tensor:
    """The gradient [D, k] of the weight of `slide`, from that of its result."""
    count, dims = grad.shape[-2], tuple(range(grad.dim() - 1))
    return torch.stack([(rows.narrow(-2, i, count) * grad).sum(dims) for i in range(taps)], dim=1)


class Gaps:
    """Where the tokens [B, T, D] of segments, (start, length) one after the other, lie with gaps between them."""

    def __init__(self, segments: Items[tuple[int, int]], tokens: int, taps: int, device: torch.device) -> None:
        self._gap, self._segments, self._tokens = taps - 1, len(segments), tokens
        self._at: Tensor | None = None
        if len(segments) > 1 and self._gap:
            parts = [torch.arange(n, device=device) + (at + s * self._gap) for s, (at, n) in enumerate(segments)]
            self._at = torch.cat(parts)

    @property
    def rows(self) -> int:
        """Of the result of a slide."""
        return self._tokens + max(self._segments - 1, 0) * self._gap

    def lay(self, x: Tensor, after: bool = False) -> Tensor:
        """[B, T, D] -> [B, rows + k - 1, D], with a gap before each segment; or ``after`` it."""
        if self._at is None:
            return functional.pad(x, (0, 0, 0, self._gap) if after else (0, 0, self._gap, 0))
        laid = x.new_zeros(x.shape[0], self.rows + self._gap, x.shape[2])
        return laid.index_copy_(1, self._at if after else self._at + self._gap, x)

    def take(self, rows: Tensor) -> Tensor:
        """The tokens' rows of a slide's result, [B, T, D]."""
        return rows if self._at is None else rows.index_select(1, self._at)
