"""The launches of the Triton kernels: strides, blocks and grids. This module imports Triton.

Where a kernel's class of decay does not touch a tensor, another one stands in its place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from weft.ops.fused import backward, forward
from weft.ops.fused.tiling import PAIRS, gate_kind, operands, precision, tile


@dataclass(frozen=True)
class Launch:
    """A kernel with all it needs: what `run` starts, and what is compiled ahead of time."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    warps: int
    stages: ClassVar[int] = 2
    registers: ClassVar[int] = 255  # of a thread: left alone, the compiler spills a few to fit one more program

    def run(self) -> None:
        """Start it on the device of its first argument: Triton takes the current one."""
        device = self.arguments[0].device
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            self.kernel[self.grid](*self.arguments, **self.constants, **self.options)

    @property
    def options(self) -> dict[str, int]:
        """Options of the compiler."""
        return {"num_warps": self.warps, "num_stages": self.stages, "maxnreg": self.registers}


_KERNELS: dict[str, Any] = {
    kernel.__name__: kernel
    for kernel in (
        forward.chunk_states, forward.scan_pieces, forward.output_intra, forward.output_inter, backward.query_grads,
        backward.key_grads, backward.key_finish,
    )
}  # fmt: skip


def make_launch(name: str, given: Mapping[str, Any]) -> Launch:
    """The launch of a kernel with the arguments of its operator, by name and in their order."""
    if name == "scan_pieces":
        return _scan_pieces(**given)
    kernel, g, tables, chunk = _KERNELS[name], given["g"], given["tables"], given["chunk"]
    x, y = operands(given)
    batch, tokens, value_heads, values = y.shape
    keys, gate = x.shape[-1], gate_kind(g)
    tiling = tile(name, chunk, keys, values, gate, x.dtype, y.dtype)
    sizes = {
        "tokens_all": tokens, "batch": batch, "value_heads": value_heads, "group": value_heads // x.shape[2],
        "gate_group": 1 if g is None else value_heads // g.shape[0 if g.dim() == 1 else 2],
    }  # fmt: skip
    arguments = gather_arguments(kernel, given, sizes)
    constants = {
        "K": keys, "V": values, "BC": tiling.chunk, "BK": tiling.keys, "BV": tiling.values, "GATE": gate,
        "DOT": precision(x.dtype == torch.float32),
    }  # fmt: skip
    for flag in ("reverse", "strict"):
        if flag in given:
            constants[flag.upper()] = given[flag]
    if name in ("output_inter", "query_grads", "key_finish"):
        constants["PIECES"] = given["grad_arriving" if name == "key_finish" else "arriving"] is not None
    chunks, by_keys, by_values = (
        tables[0].shape[0],
        count_blocks(keys, tiling.keys),
        count_blocks(values, tiling.values),
    )
    parts = by_keys if name in ("query_grads", "key_grads", "key_finish") else by_values
    if name in PAIRS:
        # Halvings of a block of tokens, and how logs are summed for them.
        constants |= {"BR": tiling.rows, "LEVELS": min(chunk, tiling.rows).bit_length() - 1, "LOGS": log_kind(g)}
        chunks *= tiling.chunk // tiling.rows
    elif name == "chunk_states":
        constants |= {"BR": tiling.rows, "KEEP": given["states"] is not None}
        chunks, parts = tables[2].shape[0], by_keys * by_values
    elif name == "key_finish":
        one_gate = gate in ("constant", "scalar")
        constants["PARTS"] = given["row_gate"].shape[0] if one_gate else 1
        parts = 1 if one_gate else by_keys
    return Launch(kernel, (chunks, parts, batch * value_heads), arguments, constants, tiling.warps)


def gather_arguments(kernel: Any, given: Mapping[str, Any], sizes: Mapping[str, int]) -> tuple[Any, ...]:
    """The operator's tensors (``tables`` one by one) and numbers, then strides and sizes by the kernel's names.

    Where a tensor is not there the first one stands in its place. ``chunk`` and flags are no arguments of a kernel.
    """
    stand_in = next(iter(given.values()))
    arguments: list[Any] = []
    strides: dict[str, int] = {}
    for key, value in given.items():
        if key == "tables":
            arguments += value
        elif not isinstance(value, int):
            tensor = stand_in if value is None else value
            arguments.append(tensor)
            if isinstance(tensor, Tensor):
                strides |= {f"{key}_{dim}": stride for dim, stride in zip("bth", _strides(tensor), strict=False)}
    rest = (name for name in kernel.arg_names[len(arguments) :] if not name.isupper())
    return (*arguments, *(strides[name] if name in strides else sizes[name] for name in rest))


def log_kind(g: Tensor | None) -> str:
    """How logs are summed in a product: as two numbers that tf32 holds, or as one."""
    return "fp32" if g is not None and g.dtype == torch.float32 else "half"


def _strides(x: Tensor) -> Sequence[int]:
    """Of batch, token and head; the last dimension lies together. A gate without tokens has none."""
    return (0, 0, 0) if x.dim() == 1 else x.stride()[:3]


def count_blocks(dim: int, block: int) -> int:
    """Blocks that cover a dimension."""
    return -(-dim // block)


def _scan_pieces(
    sums: Tensor, sum_logs: Tensor | None, boundary: Tensor | None, tables: Sequence[Tensor], arriving: Tensor,
    final: Tensor, final_log: Tensor | None, reverse: bool,
) -> Launch:  # fmt: skip
    """See `forward.scan_pieces`; ``tables`` are segment_first and segment_last."""
    _, batch, value_heads, keys, values = sums.shape
    gate = "none" if sum_logs is None else "vector" if sum_logs.dim() == 4 else "scalar"
    tiling = tile("scan_pieces", 1, keys, values, gate, sums.dtype)
    segments = tables[0].shape[0]
    logs = (sums, sums) if sum_logs is None or final_log is None else (sum_logs, final_log)
    arguments = (
        sums, logs[0], sums if boundary is None else boundary, *tables, arriving, final, logs[1], batch, value_heads,
        segments,
    )  # fmt: skip
    constants = {
        "K": keys, "V": values, "BK": tiling.keys, "BV": tiling.values, "GATE": gate, "REVERSE": reverse,
        "HAS_BOUNDARY": boundary is not None,
    }  # fmt: skip
    grid = segments, count_blocks(keys, tiling.keys) * count_blocks(values, tiling.values), batch * value_heads
    return Launch(forward.scan_pieces, grid, arguments, constants, tiling.warps)
