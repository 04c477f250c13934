"""`linear_attention`: the public operation and its checks."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from weft.comm import Axis
from weft.comm.function import eager
from weft.ops.fused.tiling import choose_backend, find_triton_fault
from weft.ops.linear_attention.distributed import CHUNK_SIZE, FORWARD, LinearAttention, Options
from weft.ops.scan.arguments import StateArguments
from weft.ops.sequence.layout import Sequence, read_on_axis


@eager
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
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
    """Linear attention with decay over a sequence that lies on the ranks of ``group``: (o, final state or None).

    S_t = exp(g_t) S_{t-1} + k_t^T v_t ;  o_t = scale * q_t S_t, exactly as on one device. It is always causal: a token
    sees itself and those before it.

    | tensor          | shape                                       | on this rank                               |
    |-----------------|---------------------------------------------|--------------------------------------------|
    | q, k            | ``[B, T, H, K]``                            | its T tokens; T may differ and may be 0    |
    | v, o            | ``[B, T, HV, V]``, HV a multiple of H       | its T tokens                               |
    | g               | None, ``[H]``, ``[B, T, H]``, ``[B, T, H, K]`` | log decay, <= 0 (HV in place of H too)  |
    | `initial_state` | ``[B, HV, K, V]``, packed ``[N, HV, K, V]`` | the whole, on every rank                   |
    | final state     | as `initial_state`, fp32 (fp64 for fp64)    | the whole, on every rank                   |
    | `cu_seqlens`    | ``[N+1]``, of the whole sequence, B = 1     | the whole, on every rank                   |

    What crosses ranks: one state for each document that spans ranks, by ``method`` (of `weft.ops.scan.METHODS` or
    "auto"), while the within-chunk part is computed; forward a prefix, backward a suffix. Final states go to
    every rank only if asked for. Gradients: those of q, k, v and gates are this rank's; a constant ``g`` gets
    this rank's part (they add up to the whole); `initial_state` gets its gradient on the rank where the sequence
    begins; gradients of the final state add up over the ranks that use it.

    ``layout`` is "contiguous" (if left out) or "zigzag" (see `weft.shard`); ``sequence`` (see `weft.sequence`) is given
    in place of ``layout``, ``cu_seqlens`` and ``group`` and saves the round of integers in which lengths are gathered.
    ``scale`` defaults to K^-0.5; ``chunk_size`` (a power of two) to what is fastest. ``backend`` is the local kernels:
    "torch", "triton" (fused; CUDA, K and V up to 256, no fp64), or "auto": Triton on CUDA where it can.

    >>> q = k = v = torch.randn(1, 10, 2, 4)
    >>> o, state = linear_attention(q, k, v, torch.tensor([-0.1, -0.2]), output_final_state=True)
    >>> o.shape, state.shape
    (torch.Size([1, 10, 2, 4]), torch.Size([1, 2, 4, 4]))
    """

    given = StateArguments(
        "linear_attention", q, k, v, {}, g, scale, initial_state, output_final_state, cu_seqlens, layout,
        method, chunk_size, backend, sequence, group,
    )  # fmt: skip

    def read_options(axis: Axis) -> Options | Exception:
        def find_backend_fault(place: str) -> Exception | None:
            if backend != "triton" or (reason := find_triton_fault(q, v, {"g": g}, chunk_size or CHUNK_SIZE)) is None:
                return None
            return ValueError(f"linear_attention: backend 'triton' {reason} {place}; backend='torch' takes it")

        find_gate_fault = functools.partial(_find_gate_fault, q, v, g)
        return given.read(Options, axis.rank, tuple(FORWARD), find_gate_fault, find_backend_fault)

    axis, options = read_on_axis("linear_attention", group, sequence, read_options)
    kernels = choose_backend(backend, q, v, {"g": g}, options.chunk_size)
    o, final = LinearAttention.apply(q, k, v, g, initial_state, options, axis, sequence, kernels)
    return o, final


def _find_gate_fault(q: Tensor, v: Tensor, g: Tensor | None, place: str) -> Exception | None:
    (batch, tokens, heads, keys), value_heads = q.shape, v.shape[2]
    shapes = [shape for h in (heads, value_heads) for shape in ((h,), (batch, tokens, h), (batch, tokens, h, keys))]
    if g is not None and tuple(g.shape) not in shapes:
        wanted = "[H], [B, T, H] or [B, T, H, K]"
        return ValueError(f"linear_attention: g {list(g.shape)} is not {wanted} of q {list(q.shape)} {place}")
    return None
