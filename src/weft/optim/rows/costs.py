"""What the two ways of a row step cost on this machine, measured once for each width and dtype."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from weft.optim.rows.steps import AdamStep, Shard, step_dense, step_rows


@dataclass(frozen=True)
class RowCosts:
    """Seconds for each row: stepped by copies, stepped where it lies, and kept by copies while others are stepped."""

    copied: float
    in_place: float
    kept: float

    def prefer_dense(self, touched: int, rows: int) -> bool:
        """Whether a step of ``touched`` of ``rows`` rows is cheaper where they lie."""
        return rows * self.in_place + (rows - touched) * self.kept < touched * self.copied

    @staticmethod
    def measure(shard: Shard) -> RowCosts:
        """Time both ways on scratch rows of the same kind, a few milliseconds."""
        rows = shard.block
        weight = torch.zeros(rows, shard.width, dtype=shard.weight.dtype, device=shard.weight.device)
        moments = [shard.exp_avg.new_ones(rows, shard.width) for _ in range(2)]
        scratch, grads = Shard(weight, moments[0], moments[1]), shard.exp_avg.new_ones(rows, shard.width)
        places, step = torch.arange(rows, device=weight.device), AdamStep(1, 0.0, (0.9, 0.999), 1e-8, 0.0)

        def seconds(way: Callable[..., None], chosen: torch.Tensor) -> float:
            best = float("inf")
            for _ in range(3):
                start = time.perf_counter()
                way(scratch, chosen, grads[: len(chosen)], step)
                best = min(best, time.perf_counter() - start)
            return best

        copied, dense = seconds(step_rows, places), seconds(step_dense, places)
        half = seconds(step_dense, places[::2].contiguous())
        return RowCosts(copied / rows, dense / rows, max(0.0, 2 * (half - dense) / rows))
