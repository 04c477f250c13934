"""`mamba2`: the public operation, as linear attention between two maps of single tokens."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from weft.comm import Axis
from weft.comm.function import eager
from weft.ops.mamba2.arguments import Mamba2Scan, Options, read_options
from weft.ops.scan.arguments import choose_backend
from weft.ops.sequence.layout import Sequence, read_on_axis


@eager
def mamba2(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    chunk_size: int | None = None,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    return_final_states: bool = False,
    layout: str | None = None,
    method: str = "auto",
    backend: str = "auto",
    sequence: Sequence | None = None,
    group: Any = None,
) -> tuple[Tensor, Tensor | None]:
    """Mamba-2's scan over a sequence that lies on the ranks of ``group``: (y, final states or None).

    S_t = exp(A d_t) S_{t-1} + d_t x_t B_t^T ;  y_t = (S_t C_t + D x_t) silu(z_t), with time steps
    d = clamp(softplus(dt + dt_bias), *dt_limit), exactly as on one device. Names, shapes and defaults are those of
    mamba_ssm's ``mamba_chunk_scan_combined``; softplus only with ``dt_softplus``, D, z and `dt_bias` only if given.

    | tensor           | shape                                      | on this rank                            |
    |------------------|--------------------------------------------|-----------------------------------------|
    | x, z, y          | ``[B, T, H, P]``                           | its T tokens; T may differ and may be 0 |
    | dt               | ``[B, T, H]``                              | its T tokens                            |
    | B, C             | ``[B, T, G, N]``, H a multiple of G        | its T tokens                            |
    | A, `dt_bias`, D  | ``[H]``, ``[H]``, ``[H]`` or ``[H, P]``    | the whole, on every rank; A <= 0        |
    | `initial_states` | ``[B, H, P, N]``, packed ``[docs, H, P, N]`` | the whole, on every rank              |
    | final states     | as `initial_states`, fp32 (fp64 for fp64)  | the whole, on every rank                |
    | `cu_seqlens`     | ``[docs+1]``, of the whole sequence, B = 1 | the whole, on every rank                |

    It is `weft.linear_attention` of q = C, k = B, v = d x and g = A d: what crosses ranks, ``method``, ``backend``,
    ``layout`` and ``sequence`` are described there. Time steps, gates and the sums after the scan are fp32 whatever x
    is; y has the dtype of x. Gradients of x, dt, B, C and z are this rank's; A, D and `dt_bias` get this rank's part
    (they add up to the whole); `initial_states` get theirs on the rank where the document begins; gradients of the
    final states add up over the ranks that use them.

    >>> x, dt, A = torch.randn(1, 10, 4, 8), torch.rand(1, 10, 4), -torch.ones(4)
    >>> B = C = torch.randn(1, 10, 2, 16)
    >>> y, states = mamba2(x, dt, A, B, C, D=torch.ones(4), return_final_states=True)
    >>> y.shape, states.shape
    (torch.Size([1, 10, 4, 8]), torch.Size([1, 4, 8, 16]))
    """
    given = {"x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D, "z": z, "dt_bias": dt_bias,
             "initial_states": initial_states}  # fmt: skip

    def reading(axis: Axis) -> Options | Exception:
        where = (layout, cu_seqlens, group, sequence)
        how = (dt_softplus, dt_limit, return_final_states, method, chunk_size, backend)
        return read_options(axis.rank, given, where, how)

    axis, options = read_on_axis("mamba2", group, sequence, reading)
    steps = _time_steps(dt, dt_bias, options)
    q, k = (one.to(options.dtype) for one in (C, B))
    v, g = (x * steps.unsqueeze(-1)).to(options.dtype), A.to(steps.dtype) * steps
    start = None if initial_states is None else initial_states.mT.contiguous()
    kernels = choose_backend(backend, q, v, {"g": g}, options.chunk_size)
    y, final = Mamba2Scan.apply(q, k, v, g, start, options, axis, sequence, kernels)
    if D is not None:
        y = y + x * D.to(steps.dtype).reshape(len(A), -1)
    if z is not None:
        y = y * silu(z.to(steps.dtype))
    return y.to(x.dtype), None if final is None else final.mT.contiguous()


def _time_steps(dt: Tensor, bias: Tensor | None, options: Options) -> Tensor:
    """How far each token moves its states: [B, T, H], in fp32 or better."""
    steps = dt.to(torch.promote_types(options.dtype, torch.float32))
    if bias is not None:
        steps = steps + bias.to(steps.dtype)
    if options.dt_softplus:
        steps = softplus(steps)
    return steps.clamp(*options.dt_limit)
