"""The launches of the delta rule's own Triton kernels: sizes, blocks and grids. This module imports Triton."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from weft.ops.delta_rule.fused import backward, forward
from weft.ops.delta_rule.fused.tiling import SHAPED, tile
from weft.ops.fused.launch import Launch, count_blocks, gather_arguments, log_kind
from weft.ops.fused.tiling import gate_kind, precision

_KERNELS: dict[str, Any] = {
    kernel.__name__: kernel
    for kernel in (
        forward.key_pairs, forward.invert_pairs, forward.apply_inverse, forward.decay_keys, forward.delta_states,
        forward.add_entering, backward.delta_state_grads, backward.join_key_grads,
    )
}  # fmt: skip


def make_launch(name: str, given: Mapping[str, Any]) -> Launch:
    """The launch of a kernel with the arguments of its operator, by name and in their order."""
    kernel, tables, g, k = _KERNELS[name], given["tables"], given.get("g"), given.get("k")
    batch, tokens, value_heads, columns = given[SHAPED[name]].shape
    chunk, gate = given["chunk"], gate_kind(g)
    if name == "join_key_grads":
        gate = "none" if given["row_gate"] is None else "vector" if given["vector"] else "scalar"
    elif "whole" in given and g is None:
        gate = "none" if given["whole"] is None else "vector" if given["whole"].dim() == 4 else "scalar"
    read = given.get("x", given.get("left")) if k is None else k
    keys = columns if read is None else read.shape[-1]
    exact = given.get("exact", k is not None and k.dtype == torch.float32)
    tiling = tile(name, chunk, keys, columns, gate, exact)
    levels = min(chunk, tiling.rows).bit_length() - 1
    parts = 0 if given.get("row_gate") is None else given["row_gate"].shape[0]
    constants = {
        "K": keys, "V": columns, "BC": tiling.chunk, "BR": tiling.rows, "BK": tiling.keys, "BV": tiling.values,
        "GATE": gate, "DOT": precision(exact), "LEVELS": levels, "LOGS": log_kind(g), "PARTS": parts,
        "REVERSE": given.get("reverse"), "HAS_BOUNDARY": given.get("boundary") is not None,
        "HAS_MAP": given.get("map_states") is not None,
    }  # fmt: skip
    sizes = {
        "tokens_all": tokens, "batch": batch, "value_heads": value_heads, "gate_group": 1,
        "group": 1 if read is None else value_heads // read.shape[2],
    }  # fmt: skip
    programs, blocks = tables[0].shape[0], count_blocks(columns, tiling.values)
    if name in ("delta_states", "delta_state_grads"):
        programs = sizes["segments"] = tables[2].shape[0]
        blocks += count_blocks(keys, tiling.values) if given.get("map_states") is not None else 0
    elif name == "key_pairs":
        programs, blocks = programs * (tiling.chunk // tiling.rows), 1
    elif name in ("invert_pairs", "join_key_grads"):
        blocks = 1
    arguments = gather_arguments(kernel, given, sizes)
    used = {key: value for key, value in constants.items() if key in kernel.arg_names}
    return Launch(kernel, (programs, blocks, batch * value_heads), arguments, used, tiling.warps)
