"""The delta rule's own kernels as torch operators, `torch.ops.weft.*`, beside the shared ones that it uses."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from weft.ops.delta_rule.fused.tiling import SHAPED, tile
from weft.ops.fused import operators as shared
from weft.ops.fused.tiling import gate_kind

_SCHEMAS = {
    "key_pairs": "(Tensor k, Tensor? g, Tensor[] tables, Tensor(a!) pairs, int chunk) -> ()",
    "invert_pairs": "(Tensor pairs, Tensor beta, Tensor[] tables, Tensor(a!) inverse, int chunk) -> ()",
    "apply_inverse": "(Tensor inverse, Tensor x, Tensor beta, Tensor? g, Tensor[] tables, Tensor(a!) out, "
    "Tensor(b!)? weighted, int chunk, bool exact, bool reverse) -> ()",
    "decay_keys": "(Tensor k, Tensor g, Tensor[] tables, Tensor(a!) ended, Tensor(b!) whole, int chunk) -> ()",
    "delta_states": "(Tensor k, Tensor? whole, Tensor w, Tensor u, Tensor? boundary, Tensor[] tables, "
    "Tensor(a!) states, Tensor(b!) values, Tensor(c!) final, Tensor(d!)? map_states, Tensor(e!)? map_values, "
    "Tensor(f!)? map_final, int chunk) -> ()",
    "add_entering": "(Tensor left, Tensor entering, Tensor partial, Tensor[] tables, Tensor(a!) out, int chunk, "
    "bool exact) -> ()",
    "delta_state_grads": "(Tensor k, Tensor? whole, Tensor w, Tensor sums, Tensor partial, Tensor? boundary, "
    "Tensor[] tables, Tensor(a!) grad_states, Tensor(b!) grad_values, Tensor(c!) final, int chunk) -> ()",
    "join_key_grads": "(Tensor k, Tensor v, Tensor beta, Tensor y, Tensor dq, Tensor dk_pairs, Tensor[] tables, "
    "Tensor(a!) dk, Tensor(b!)? row_gate, Tensor(c!)? col_gate, Tensor(d!) dbeta, int chunk, "
    "bool vector) -> ()",
}


@functools.cache
def operators() -> Any:
    """``torch.ops.weft`` with these kernels and the shared ones defined; on first use."""
    shared.operators()
    return shared.define(_SCHEMAS, "weft.ops.delta_rule.fused.launch", _count)


def _count(kernel: str, *args: Any, out_val: Any = None, **kwargs: Any) -> int:
    """FLOPs of an operator: its products, as it takes them."""
    given = shared.by_name(kernel, args) | kwargs
    batch, tokens, heads, columns = given[SHAPED[kernel]].shape
    return round(batch * tokens * heads * _products(kernel, given, columns))


def _products(kernel: str, given: Mapping[str, Any], columns: int) -> float:
    """FLOPs for one token and value head."""
    if kernel == "key_pairs":
        k, g = given["k"], given["g"]
        blocks = tile(kernel, given["chunk"], k.shape[-1], k.shape[-1], gate_kind(g), k.dtype == torch.float32)
        return shared.pair_products(gate_kind(g), blocks, k.shape[-1], g)
    if kernel == "invert_pairs":
        return sum(2 * 2 * size * size / 2 for size in (16, 32) if size < columns)
    if kernel == "apply_inverse":
        return 2 * given["inverse"].shape[-1] * columns
    if kernel == "add_entering":
        return 2 * given["left"].shape[-1] * columns
    if kernel in ("decay_keys", "join_key_grads"):
        return 0
    keys = given["w"].shape[-1]
    return 2 * 2 * keys * (columns + (keys if given.get("map_values") is not None else 0))
