"""The mixer of blocks `d`: a gated delta net, as in Qwen3-Next."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import weft
from weft.parallel.mesh import ParallelMesh, rows_of_tensor_rank
from weft.train.config import TrainConfig

if TYPE_CHECKING:
    from weft.train.model import Cache, Place

TAPS = 4  # of the convolution


class DeltaMixer(nn.Module):
    """A short convolution of q, k and v, the gated delta rule, and a gated norm.

    x ``[1, T, width]`` in and out; q, k, v, gate and out are matrices width x width, a and b heads x width, cut by
    heads over tensor ranks. The rest is small and whole on every rank: ``a_log`` and ``dt_bias`` ``[H]``, ``conv``
    ``[H, 3 D, TAPS]`` (a head's channels of q, k and v), ``norm`` ``[D]``. Across context ranks go the last tokens
    before each run (the halo of the convolution) and one map of the state per head.
    """

    def __init__(self, config: TrainConfig, mesh: ParallelMesh, dtype: torch.dtype) -> None:
        super().__init__()
        self.mesh, self.heads, self.head_dim = mesh, config.heads, config.width // config.heads
        self.q, self.k, self.v, self.gate, self.out = (
            nn.Linear(config.width, config.width, bias=False, dtype=dtype) for _ in range(5)
        )
        self.a, self.b = (nn.Linear(config.width, config.heads, bias=False, dtype=dtype) for _ in range(2))
        # Heads begin with memories of different lengths: decays from 0.73 to 0.998, as in linear attention.
        self.a_log = nn.Parameter(torch.zeros(config.heads, dtype=dtype))
        self.dt_bias = nn.Parameter(-torch.linspace(1.0, 6.0, config.heads, dtype=dtype))
        self.conv = nn.Parameter(torch.empty(config.heads, 3 * self.head_dim, TAPS, dtype=dtype))
        self.norm = nn.Parameter(torch.ones(self.head_dim, dtype=dtype))

    def forward(self, x: Tensor, place: Place, cache: Cache | None) -> Tensor:
        a_log, dt_bias, conv, norm = (
            rows_of_tensor_rank(self.mesh, weight)
            for weight in (self.a_log, self.dt_bias, self.conv, self.norm.expand(self.heads, -1))
        )
        q, k, v, gate = (part(x).unflatten(-1, (-1, self.head_dim)) for part in (self.q, self.k, self.v, self.gate))
        mixed, window = weft.short_conv(
            torch.cat([q, k, v], -1).flatten(2), conv.flatten(0, 1), activation="silu",
            initial_state=None if cache is None else cache.window, output_final_state=cache is not None,
            sequence=place.sequence,
        )  # fmt: skip
        q, k, v = mixed.unflatten(-1, (-1, 3 * self.head_dim)).split(self.head_dim, -1)
        q, k = (F.normalize(part, dim=-1).to(v.dtype) for part in (q, k))  # autocast may norm in fp32
        g = -a_log.exp() * F.softplus(self.a(x).to(dt_bias.dtype) + dt_bias)  # never in bf16
        beta = self.b(x).to(dt_bias.dtype).sigmoid()
        o, state = weft.delta_rule(
            q, k, v, beta, g, initial_state=None if cache is None else cache.state,
            output_final_state=cache is not None, sequence=place.sequence,
        )  # fmt: skip
        if cache is not None:
            cache.window, cache.state = window, state
        o = F.rms_norm(o, (self.head_dim,)) * norm * F.silu(gate)
        return self.out(o.flatten(2))
