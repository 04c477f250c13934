"""`delta_rule`: the public operation and its checks."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from weft.comm import Axis
from weft.comm.function import eager
from weft.ops.delta_rule.distributed import FORWARD, DeltaRule, Options
from weft.ops.delta_rule.fused.tiling import MAX_CHUNK
from weft.ops.fused.tiling import choose_backend, find_triton_fault
from weft.ops.scan.arguments import StateArguments
from weft.ops.sequence.layout import Sequence, read_on_axis


@eager
def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    layout: str | None = None,
    method: str = "auto",
    chunk_size: int | None = None,
    backend: str = "auto",
    sequence: Sequence | None = None,
    group: Any = None,
) -> tuple[Tensor, Tensor | None]:
    """The delta rule over a sequence that lies on the ranks of ``group``: (o, final state or None).

    S_t = (I - beta_t k_t^T k_t) Diag(exp(g_t)) S_{t-1} + beta_t k_t^T v_t ;  o_t = scale * q_t S_t, exactly as on one
    device: DeltaNet (no ``g``), gated delta net (one number per token and head) and KDA (one per key, too). It is
    always causal. Keys are taken as they are: models normalise them before.

    | tensor          | shape                                       | on this rank                               |
    |-----------------|---------------------------------------------|--------------------------------------------|
    | q, k            | ``[B, T, H, K]``                            | its T tokens; T may differ and may be 0    |
    | v, o            | ``[B, T, HV, V]``, HV a multiple of H       | its T tokens                               |
    | beta            | ``[B, T, HV]``                              | its T tokens                               |
    | g               | None, ``[B, T, HV]``, ``[B, T, HV, K]``     | log decay, <= 0                            |
    | `initial_state` | ``[B, HV, K, V]``, packed ``[N, HV, K, V]`` | the whole, on every rank                   |
    | final state     | as `initial_state`, fp32 (fp64 for fp64)    | the whole, on every rank                   |
    | `cu_seqlens`    | ``[N+1]``, of the whole sequence, B = 1     | the whole, on every rank                   |

    What crosses ranks: one map [K, K + V] per head for each document that spans ranks, by ``method`` (of
    `weft.ops.scan.METHODS` or "auto"; "ring" and "pipeline" send states only), while outputs are computed; forward a
    prefix, backward a suffix. Final states go to every rank only if asked for. Gradients: those of q, k, v, beta and g
    are this rank's; `initial_state` gets its gradient on the rank where the sequence begins; gradients of the final
    state add up over the ranks that use it.

    ``layout`` is "contiguous" (if left out) or "zigzag" (see `weft.shard`); ``sequence`` (see `weft.sequence`) is given
    in place of ``layout``, ``cu_seqlens`` and ``group`` and saves the round of integers in which lengths are gathered.
    ``scale`` defaults to K^-0.5; ``chunk_size`` (a power of two) to what is fastest. ``backend`` is the local kernels:
    "torch", "triton" (fused; CUDA, K and V up to 256, chunks up to 64, no fp64), or "auto": Triton on CUDA where it
    can.

    >>> q = k = torch.nn.functional.normalize(torch.randn(1, 10, 2, 4), dim=-1)
    >>> o, state = delta_rule(q, k, torch.randn(1, 10, 2, 3), torch.rand(1, 10, 2), output_final_state=True)
    >>> o.shape, state.shape
    (torch.Size([1, 10, 2, 3]), torch.Size([1, 2, 4, 3]))
    """

    given = StateArguments(
        "delta_rule", q, k, v, {"beta": beta}, g, scale, initial_state, output_final_state, cu_seqlens, layout,
        method, chunk_size, backend, sequence, group,
    )  # fmt: skip

    others = {"beta": beta, "g": g}

    def read_options(axis: Axis) -> Options | Exception:
        def find_backend_fault(place: str) -> Exception | None:
            size = chunk_size or Options.chunk_size_on(q.device.type)
            if backend != "triton" or (reason := find_triton_fault(q, v, others, size, MAX_CHUNK)) is None:
                return None
            return ValueError(f"delta_rule: backend 'triton' {reason} {place}; backend='torch' takes it")

        find_gate_fault = functools.partial(_find_gate_fault, q, v, beta, g)
        return given.read(Options, axis.rank, tuple(FORWARD), find_gate_fault, find_backend_fault)

    axis, options = read_on_axis("delta_rule", group, sequence, read_options)
    kernels = choose_backend(backend, q, v, others, options.chunk_size, MAX_CHUNK)
    o, final = DeltaRule.apply(q, k, v, beta, g, initial_state, options, axis, sequence, kernels)
    return o, final


def _find_gate_fault(q: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, place: str) -> Exception | None:
    rates = v.shape[:3]
    if beta.shape != rates:
        return ValueError(f"delta_rule: beta must be [B, T, HV] = {list(rates)}, got {list(beta.shape)} {place}")
    if g is not None and g.shape not in (rates, (*rates, q.shape[3])):
        wanted = f"[B, T, HV] = {list(rates)} nor [B, T, HV, K] = {[*rates, q.shape[3]]}"
        return ValueError(f"delta_rule: g {list(g.shape)} is neither {wanted} {place}")
    return None
