"""The delta rule's family under fla's names: DeltaNet, gated delta net, KDA."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from weft.comm.function import eager
from weft.integrations.fla.keywords import find_refused, prepare, read_boundaries, turn
from weft.integrations.fla.rates import Gate, Rates, find_rate_fault, log_decay, normalize, write_strength
from weft.ops.delta_rule import delta_rule
from weft.ops.sequence import Sequence

Out = tuple[Tensor, Tensor | None]


@eager
def chunk_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None, *, chunk_size: int | None = None, group: Any = None,
    layout: str | None = None, method: str = "auto", sequence: Sequence | None = None, **kwargs: Any,
) -> Out:  # fmt: skip
    """DeltaNet; q, k ``[B, T, H, K]``, v, o ``[B, T, H, V]``, beta ``[B, T, H]``, states ``[N, H, K, V]``.

    >>> import torch
    >>> q, beta = torch.randn(1, 6, 2, 4), torch.rand(1, 6, 2)
    >>> chunk_delta_rule(q, q, q, beta, use_qk_l2norm_in_kernel=True)[0].shape
    torch.Size([1, 6, 2, 4])
    """
    return _run(
        Rates("chunk_delta_rule", q, k, beta, use_qk_l2norm_in_kernel), v, initial_state, False,
        (cu_seqlens, cu_seqlens_cpu), kwargs, scale=scale, output_final_state=output_final_state,
        chunk_size=chunk_size, layout=layout, method=method, sequence=sequence, group=group,
    )  # fmt: skip


@eager
def chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False, state_v_first: bool = False,
    cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None, chunk_indices: Tensor | None = None,
    cp_context: Any = None, *, use_gate_in_kernel: bool = False, A_log: Tensor | None = None,
    dt_bias: Tensor | None = None, chunk_size: int | None = None, group: Any = None, layout: str | None = None,
    method: str = "auto", sequence: Sequence | None = None, **kwargs: Any,
) -> Out:  # fmt: skip
    """Gated delta net; g, beta ``[B, T, HV]``, v, o ``[B, T, HV, V]``, states ``[N, HV, K, V]``.

    With ``use_gate_in_kernel`` the log decay is -exp(A_log) softplus(g + dt_bias), both parameters ``[HV]`` and on
    every rank; they get this rank's part of their gradients.

    >>> import torch
    >>> q, beta = torch.randn(1, 6, 2, 4), torch.rand(1, 6, 2)
    >>> o, state = chunk_gated_delta_rule(q, q / 4, q, -beta, beta, output_final_state=True)
    >>> o.shape, state.shape
    (torch.Size([1, 6, 2, 4]), torch.Size([1, 2, 4, 4]))
    """
    gate = Gate(g, "[B, T, HV]", use_gate_in_kernel, A_log, dt_bias)
    rates = Rates(
        "chunk_gated_delta_rule",
        q,
        k,
        beta,
        use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
        gate,
    )
    return _run(
        rates, v, initial_state, state_v_first, (cu_seqlens, cu_seqlens_cpu),
        {"chunk_indices": chunk_indices, "cp_context": cp_context, **kwargs}, scale=scale,
        output_final_state=output_final_state, chunk_size=chunk_size, layout=layout, method=method, sequence=sequence,
        group=group,
    )  # fmt: skip


@eager
def chunk_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False, use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False,
    safe_gate: bool = False, lower_bound: float | None = None, disable_recompute: bool = False,
    return_intermediate_states: bool = False, state_v_first: bool = False, cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None, cp_context: Any = None, use_graph: bool = False,
    max_num_seqs: int | None = None, *, A_log: Tensor | None = None, dt_bias: Tensor | None = None,
    chunk_size: int | None = None, group: Any = None, layout: str | None = None, method: str = "auto",
    sequence: Sequence | None = None, **kwargs: Any,
) -> Out:  # fmt: skip
    """KDA; g ``[B, T, HV, K]``, beta ``[B, T, HV]``, v, o ``[B, T, HV, V]``, states ``[N, HV, K, V]``.

    With ``use_gate_in_kernel`` the log decay is -exp(A_log) softplus(g + dt_bias) or, with ``lower_bound``,
    lower_bound sigmoid(exp(A_log) (g + dt_bias)); ``A_log`` ``[HV]`` (None with a bound: without that factor) and
    ``dt_bias`` ``[HV * K]`` are on every rank and get this rank's part of their gradients. ``safe_gate`` promises that
    log decays are bounded, which nothing here needs.

    >>> import torch
    >>> q, beta = torch.randn(1, 6, 2, 4), torch.rand(1, 6, 2)
    >>> chunk_kda(q, q / 4, q, -q.abs(), beta)[0].shape
    torch.Size([1, 6, 2, 4])
    """
    gate = Gate(g, "[B, T, HV, K]", use_gate_in_kernel, A_log, dt_bias, lower_bound, safe_gate)
    rates = Rates("chunk_kda", q, k, beta, use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, gate)
    refused = {
        "disable_recompute": disable_recompute, "return_intermediate_states": return_intermediate_states,
        "cp_context": cp_context, "use_graph": use_graph, "max_num_seqs": max_num_seqs, **kwargs,
    }  # fmt: skip
    return _run(
        rates, v, initial_state, state_v_first, (cu_seqlens, cu_seqlens_cpu), refused, scale=scale,
        output_final_state=output_final_state, chunk_size=chunk_size, layout=layout, method=method, sequence=sequence,
        group=group,
    )  # fmt: skip


def _run(
    rates: Rates, v: Tensor, initial_state: Tensor | None, v_first: bool, boundaries: tuple[Any, Any],
    refused: dict[str, Any], *, group: Any, sequence: Sequence | None, **options: Any,
) -> Out:  # fmt: skip
    """`weft.delta_rule` of what the flags make of the tensors."""
    name = rates.name

    def preparing(rank: int) -> tuple[Any, ...] | Exception:
        bounds = read_boundaries(name, rank, *boundaries)
        if isinstance(bounds, Exception):
            return bounds
        fault = find_refused(name, rank, refused) or find_rate_fault(rates, rank, initial_state, v_first)
        if fault is not None:
            return fault
        queries, keys = normalize(rates)
        return queries, keys, write_strength(rates), log_decay(rates.gate), turn(initial_state, v_first), bounds[0]

    q, k, beta, g, start, bounds = prepare(name, "delta_rule", group, sequence, preparing)
    o, final = delta_rule(
        q, k, v, beta, g, initial_state=start, cu_seqlens=bounds, sequence=sequence, group=group, **options
    )
    return o, turn(final, v_first)
