"""The kernels as torch operators, `torch.ops.weft.*`, with their FLOPs: what traces and virtual time see of them.

An operator's tensors are what its kernel reads and writes, each once; on meta tensors it does nothing, so that a
virtual machine counts its bytes and FLOPs. The products of a kernel are counted as it takes them.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from weft.linear_attention.fused.tiling import gate_kind

_SCHEMAS = {
    "chunk_states": "(Tensor x, Tensor y, Tensor? g, Tensor[] tables, Tensor(a!) states, Tensor(b!)? since, "
    "Tensor(c!) sums, Tensor(d!)? sum_logs, float scale, int chunk, bool reverse) -> ()",
    "scan_pieces": "(Tensor sums, Tensor? sum_logs, Tensor? boundary, Tensor[] tables, Tensor(a!) arriving, "
    "Tensor(b!) final, Tensor(c!)? final_log, bool reverse) -> ()",
    "output_intra": "(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor[] tables, Tensor(a!) partial, float scale, "
    "int chunk) -> ()",
    "output_inter": "(Tensor q, Tensor? g, Tensor[] tables, Tensor states, Tensor? since, Tensor arriving, "
    "Tensor partial, Tensor(a!) o, float scale, int chunk) -> ()",
    "intra_backward": "(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor do, Tensor[] tables, Tensor states, "
    "Tensor? since, Tensor arriving, Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv, Tensor(d!)? dg, float scale, "
    "int chunk) -> ()",
    "inter_backward": "(Tensor k, Tensor v, Tensor? g, Tensor[] tables, Tensor? states, Tensor? since, "
    "Tensor? arriving, Tensor grad_states, Tensor? until, Tensor grad_arriving, Tensor dk_inner, Tensor dv_inner, "
    "Tensor? dg_inner, Tensor(a!) dk, Tensor(b!) dv, Tensor(c!)? dg, int chunk) -> ()",
}


def products(kernel: str, gate: str, chunk: int, keys: int, values: int, log_products: int = 1) -> int:
    """FLOPs of the matrix products of a kernel for one token and value head.

    ``log_products`` is what a sum of logs takes: one product, or three where g is fp32.
    """
    rows, levels = max(16, chunk), chunk.bit_length() - 1
    state = 2 * keys * values
    square_k, square_v = 2 * rows * keys, 2 * rows * values
    vector = gate == "vector"
    logs = log_products * square_k if vector else 0
    scores = levels * (logs + square_k) if vector else square_k
    gated = gate in ("constant", "scalar")
    return {
        "chunk_states": state + logs,
        "scan_pieces": 0,
        "output_intra": scores + square_v,
        "output_inter": state + logs,
        "intra_backward": scores + 2 * square_v + state
        + (levels * (logs + 3 * square_k) + logs + square_k if vector else 2 * square_k)
        + (2 * rows * rows if gated else 0),
        "inter_backward": 2 * state + (2 * logs + square_k if vector else 0),
    }[kernel]  # fmt: skip


def _formula(kernel: str) -> Any:
    def count(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        if kernel == "scan_pieces":
            return 0
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        keys = tensors[0].shape[-1]
        like_v = {"chunk_states": args[1], "output_inter": args[7], "inter_backward": args[1]}.get(kernel, args[2])
        g = {"chunk_states": args[2], "output_inter": args[1], "inter_backward": args[2]}.get(kernel, args[3])
        chunk = args[-2] if kernel == "chunk_states" else args[-1]
        batch, tokens, heads, values = like_v.shape
        gate = gate_kind(g)
        logs = 3 if g is not None and g.dtype == torch.float32 else 1
        return batch * tokens * heads * products(kernel, gate, chunk, keys, values, logs)

    return count


def _launch(kernel: str) -> Any:
    def launch(*args: Any) -> None:
        getattr(importlib.import_module("weft.linear_attention.fused.launch"), kernel)(*args).run()

    return launch


@functools.cache
def operators() -> Any:
    """``torch.ops.weft`` with the kernels defined; on first use, since importing weft does no work."""
    library = torch.library.Library("weft", "FRAGMENT")
    for kernel, schema in _SCHEMAS.items():
        library.define(kernel + schema)
        for key in ("CPU", "CUDA"):
            library.impl(kernel, _launch(kernel), key)
        library.impl(kernel, lambda *args: None, "Meta")
        register_flop_formula(getattr(torch.ops.weft, kernel), get_raw=True)(_formula(kernel))
    _kept.append(library)  # an operator lives as long as the library that defined it
    return torch.ops.weft


_kept: list[torch.library.Library] = []
