"""Linear attention with gates under fla's names: GLA and simple GLA."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from weft.comm.function import eager
from weft.integrations.fla.keywords import (
    find_refused,
    find_wrong_flag,
    find_wrong_tensor,
    prepare,
    read_boundaries,
    turn,
)
from weft.ops.linear_attention import linear_attention
from weft.ops.sequence import Sequence

Out = tuple[Tensor, Tensor | None]


@eager
def chunk_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, state_v_first: bool = False, cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None, *, group: Any = None, layout: str | None = None, method: str = "auto",
    sequence: Sequence | None = None,
) -> Out:  # fmt: skip
    """GLA; q, k and the log decay g ``[B, T, H, K]``, v, o ``[B, T, H, V]``, states ``[N, H, K, V]``.

    >>> import torch
    >>> q = torch.randn(1, 6, 2, 4)
    >>> chunk_gla(q, q, q, -q.abs())[0].shape
    torch.Size([1, 6, 2, 4])
    """
    return _run(
        "chunk_gla", q, k, v, {"g": (g, 4)}, initial_state, state_v_first, (cu_seqlens, cu_seqlens_cpu), {},
        scale=scale, output_final_state=output_final_state, layout=layout, method=method, sequence=sequence,
        group=group,
    )  # fmt: skip


@eager
def chunk_simple_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, g_gamma: Tensor | None = None,
    scale: float | None = None, initial_state: Tensor | None = None, output_final_state: bool = False,
    state_v_first: bool = False, cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None, *,
    chunk_size: int | None = None, group: Any = None, layout: str | None = None, method: str = "auto",
    sequence: Sequence | None = None, **kwargs: Any,
) -> Out:  # fmt: skip
    """Simple GLA; the log decay is g ``[B, T, H]`` or the constant g_gamma ``[H]``, which may be learned here.

    >>> import torch
    >>> q = torch.randn(1, 6, 2, 4)
    >>> chunk_simple_gla(q, q, q, g_gamma=torch.tensor([-0.1, -0.2]))[0].shape
    torch.Size([1, 6, 2, 4])
    """
    gates = {name: (gate, dims) for name, gate, dims in (("g", g, 3), ("g_gamma", g_gamma, 1)) if gate is not None}
    return _run(
        "chunk_simple_gla", q, k, v, gates, initial_state, state_v_first, (cu_seqlens, cu_seqlens_cpu), kwargs,
        scale=scale, output_final_state=output_final_state, chunk_size=chunk_size, layout=layout, method=method,
        sequence=sequence, group=group,
    )  # fmt: skip


def _run(
    name: str, q: Tensor, k: Tensor, v: Tensor, gates: dict[str, tuple[Any, int]], initial_state: Tensor | None,
    v_first: bool, boundaries: tuple[Any, Any], refused: dict[str, Any], *, group: Any, sequence: Sequence | None,
    **options: Any,
) -> Out:  # fmt: skip
    """`weft.linear_attention`; ``gates``: those given by name, each with the dimensions that it must have."""

    def preparing(rank: int) -> tuple[Any, ...] | Exception:
        bounds = read_boundaries(name, rank, *boundaries)
        if isinstance(bounds, Exception):
            return bounds
        tensors = {label: gate for label, (gate, _) in gates.items()}
        fault = (
            find_refused(name, rank, refused)
            or find_wrong_flag(name, rank, {"state_v_first": v_first})
            or find_wrong_tensor(name, rank, tensors, {"initial_state": initial_state})
        )
        if fault is not None:
            return fault
        if len(gates) > 1:
            return ValueError(f"{name}: pass g or g_gamma, not both (rank {rank})")
        for label, (gate, dims) in gates.items():
            if gate.ndim != dims:
                shown = {1: "[H]", 3: "[B, T, H]", 4: "[B, T, H, K]"}[dims]
                return ValueError(f"{name}: {label} must be {shown}, got {list(gate.shape)} (rank {rank})")
        return next((gate for gate, _ in gates.values()), None), turn(initial_state, v_first), bounds[0]

    g, start, bounds = prepare(name, "linear_attention", group, sequence, preparing)
    o, final = linear_attention(
        q, k, v, g, initial_state=start, cu_seqlens=bounds, sequence=sequence, group=group, **options
    )
    return o, turn(final, v_first)
