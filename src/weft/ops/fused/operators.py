"""The kernels as torch operators, `torch.ops.weft.*`, with their FLOPs: what traces and virtual time see of them.

An operator's tensors are what its kernel reads and writes, each once; on meta tensors it does nothing, so that a
virtual machine counts its bytes and FLOPs. The products of a kernel are counted as it takes them.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.ops.fused.tiling import Tiling, gate_kind, operands, tile

_SCHEMAS = {
    "chunk_states": "(Tensor x, Tensor y, Tensor? g, Tensor[] tables, Tensor(a!)? states, Tensor(b!)? since, "
    "Tensor(c!) sums, Tensor(d!)? sum_logs, float scale, int chunk, bool reverse) -> ()",
    "scan_pieces": "(Tensor sums, Tensor? sum_logs, Tensor? boundary, Tensor[] tables, Tensor(a!) arriving, "
    "Tensor(b!) final, Tensor(c!)? final_log, bool reverse) -> ()",
    "output_intra": "(Tensor q, Tensor k, Tensor y, Tensor? g, Tensor[] tables, Tensor(a!) partial, float scale, "
    "int chunk, bool reverse) -> ()",
    "output_inter": "(Tensor x, Tensor? g, Tensor[] tables, Tensor states, Tensor? since, Tensor? arriving, "
    "Tensor partial, Tensor(a!) out, float scale, int chunk, bool reverse) -> ()",
    "query_grads": "(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor do, Tensor[] tables, Tensor states, "
    "Tensor? since, Tensor? arriving, Tensor(a!) dq, Tensor(b!)? row_gate, float scale, int chunk, "
    "bool strict) -> ()",
    "key_grads": "(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor do, Tensor[] tables, Tensor(a!) dk, "
    "Tensor(b!)? col_gate, float scale, int chunk, bool strict) -> ()",
    "key_finish": "(Tensor k, Tensor v, Tensor? g, Tensor[] tables, Tensor? states, Tensor? since, "
    "Tensor? arriving, Tensor grad_states, Tensor? until, Tensor? grad_arriving, Tensor dk_inner, "
    "Tensor? row_gate, Tensor? col_gate, Tensor(a!) dk, Tensor(b!)? dg, int chunk) -> ()",
}


def pair_products(gate: str, tiling: Tiling, keys: int, g: Tensor | None) -> float:
    """FLOPs of one token's pairs, each with all of K: a block of tokens meets itself and the blocks before it.

    With a vector gate a block meets itself in a product for each halving, and one or, with logs in fp32, two products
    for the sums of logs.
    """
    row = 2 * tiling.rows * keys  # one token and a block of tokens
    logs = 2 if g is not None and g.dtype == torch.float32 else 1
    inner = (tiling.rows.bit_length() - 1) * (1 + logs) * row if gate == "vector" else row
    return inner + (tiling.chunk // tiling.rows - 1) / 2 * row


def products(kernel: str, g: Tensor | None, tiling: Tiling, keys: int, values: int) -> float:
    """FLOPs of the matrix products of a kernel for one token and value head.

    A kernel on blocks of tokens works on the pairs (i, j <= i) of the blocks of a chunk; what its grid repeats for
    blocks of K or V is counted.
    """
    gate, state = gate_kind(g), 2 * keys * values
    parts_k, parts_v = -(-keys // tiling.keys), -(-values // tiling.values)
    row_v = (tiling.chunk // tiling.rows + 1) / 2 * 2 * tiling.rows * values  # one token's pairs, all of V
    scores = pair_products(gate, tiling, keys, g)
    return {
        "chunk_states": state,
        "output_intra": parts_v * scores + row_v,
        "output_inter": state,
        "query_grads": parts_k * row_v + scores + state,
        "key_grads": parts_k * row_v + scores,
        "key_finish": state + (2 * tiling.chunk * keys if gate == "vector" else 0),
    }[kernel]


def by_name(kernel: str, args: Sequence[Any]) -> dict[str, Any]:
    """The arguments of an operator with their names."""
    return dict(zip(_names(kernel), args, strict=False))


@functools.cache
def _names(kernel: str) -> list[str]:
    return [argument.name for argument in getattr(torch.ops.weft, kernel).default._schema.arguments]


def _count(kernel: str, *args: Any, out_val: Any = None, **kwargs: Any) -> int:
    """FLOPs of an operator."""
    if kernel == "scan_pieces":
        return 0
    given = by_name(kernel, args) | kwargs
    (x, y), g = operands(given), given["g"]
    batch, tokens, heads, values = y.shape
    tiling = tile(kernel, given["chunk"], x.shape[-1], values, gate_kind(g), x.dtype, y.dtype)
    return round(batch * tokens * heads * products(kernel, g, tiling, x.shape[-1], values))


@functools.cache
def operators() -> Any:
    """``torch.ops.weft`` with these kernels defined; on first use, since importing weft does no work."""
    return define(_SCHEMAS, "weft.ops.fused.launch", _count)


def define(schemas: Mapping[str, str], module: str, count: Callable[..., int]) -> Any:
    """Define operators with their FLOPs; `make_launch` of ``module``, which imports Triton, is what they launch."""
    from torch.utils.flop_counter import register_flop_formula  # imports triton where that is installed

    library = torch.library.Library("weft", "FRAGMENT")
    for kernel, schema in schemas.items():
        _modules[kernel] = module
        library.define(kernel + schema)
        for key in ("CPU", "CUDA"):
            library.impl(kernel, lambda *args, kernel=kernel: launch_of(kernel, args).run(), key)
        library.impl(kernel, lambda *args: None, "Meta")
        register_flop_formula(getattr(torch.ops.weft, kernel), get_raw=True)(functools.partial(count, kernel))
    _kept.append(library)  # an operator lives as long as the library that defined it
    return torch.ops.weft


def launch_of(kernel: str, args: Sequence[Any]) -> Any:
    """The launch of an operator's kernel with these arguments."""
    return importlib.import_module(_modules[kernel]).make_launch(kernel, by_name(kernel, args))


_modules: dict[str, str] = {}
_kept: list[torch.library.Library] = []
