"""What fla's kernels do with queries, keys, betas and gates before the delta rule, as flags ask for it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from weft.comm.arguments import find_number_fault
from weft.integrations.fla.keywords import find_wrong_flag, find_wrong_tensor

_EPSILON = 1e-6  # of the norm of queries and keys


@dataclass(frozen=True)
class Gate:
    """``g`` as it was given, of the shape that ``words`` say; with ``from_raw`` it becomes the log of a decay here."""

    g: Tensor
    words: str
    from_raw: bool = False
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None
    lower_bound: float | None = None
    safe: bool = False


@dataclass(frozen=True)
class Rates:
    """Arguments of the function ``name`` that the flags after them change."""

    name: str
    q: Tensor
    k: Tensor
    beta: Tensor
    l2norm: bool = False
    sigmoid: bool = False
    doubled: bool = False
    gate: Gate | None = None


def find_rate_fault(rates: Rates, rank: int, initial_state: Any, v_first: Any) -> Exception | None:
    """The first thing wrong with flags and kinds; shapes are looked at by `weft.delta_rule`, but for the gate's."""
    name, gate = rates.name, rates.gate
    flags = {
        "use_qk_l2norm_in_kernel": rates.l2norm, "use_beta_sigmoid_in_kernel": rates.sigmoid,
        "allow_neg_eigval": rates.doubled, "state_v_first": v_first,
    }  # fmt: skip
    tensors = {"q": rates.q, "k": rates.k, "beta": rates.beta}
    if fault := (
        find_wrong_flag(name, rank, flags)
        or find_wrong_tensor(name, rank, tensors, {"initial_state": initial_state})
        or (None if gate is None else _find_gate_fault(name, gate, rank))
    ):
        return fault
    if rates.doubled and not rates.sigmoid:
        return ValueError(f"{name}: allow_neg_eigval=True needs use_beta_sigmoid_in_kernel=True (rank {rank})")
    return None


def _find_gate_fault(name: str, gate: Gate, rank: int) -> Exception | None:
    flags = {"use_gate_in_kernel": gate.from_raw, "safe_gate": gate.safe}
    if fault := find_wrong_flag(name, rank, flags) or find_wrong_tensor(name, rank, {"g": gate.g}):
        return fault
    g, dims = gate.g, gate.words.count(",") + 1
    if g.ndim != dims:
        return ValueError(f"{name}: g must be {gate.words}, got {list(g.shape)} (rank {rank})")
    bound = gate.lower_bound
    given = {"A_log": gate.A_log, "dt_bias": gate.dt_bias, "lower_bound": bound}
    if not gate.from_raw:
        unused = [keyword for keyword, value in given.items() if value is not None]
        return ValueError(f"{name}: {unused[0]} needs use_gate_in_kernel=True (rank {rank})") if unused else None
    if bound is not None:
        if fault := find_number_fault(name, "lower_bound", bound, rank):
            return fault
        if bound >= 0:
            return ValueError(f"{name}: lower_bound must be negative, got {bound} (rank {rank})")
    elif gate.safe or gate.A_log is None:
        missing = "lower_bound" if gate.safe else "A_log"
        return ValueError(f"{name}: use_gate_in_kernel=True needs {missing} (rank {rank})")
    if fault := find_wrong_tensor(name, rank, {}, {"A_log": gate.A_log, "dt_bias": gate.dt_bias}):
        return fault
    for keyword, value, count in (
        ("A_log", gate.A_log, g.shape[2]), ("dt_bias", gate.dt_bias, math.prod(g.shape[2:])),
    ):  # fmt: skip
        if value is not None and value.device != g.device:
            return ValueError(f"{name}: {keyword} is on {value.device}, g on {g.device} (rank {rank})")
        if value is not None and value.numel() != count:
            return ValueError(f"{name}: {keyword} must have {count} entries, got {value.numel()} (rank {rank})")
    return None


def normalize(rates: Rates) -> tuple[Tensor, Tensor]:
    """Queries and keys of length 1, if that is asked for."""
    return (_unit(rates.q), _unit(rates.k)) if rates.l2norm else (rates.q, rates.k)


def _unit(x: Tensor) -> Tensor:
    wide = _widen(x)
    return (wide * (wide.square().sum(-1, keepdim=True) + _EPSILON).rsqrt()).to(x.dtype)


def write_strength(rates: Rates) -> Tensor:
    """beta, from its logits if they were given."""
    return _widen(rates.beta).sigmoid() * (2 if rates.doubled else 1) if rates.sigmoid else rates.beta


def log_decay(gate: Gate | None) -> Tensor | None:
    """g, from the raw one if that was given."""
    if gate is None or not gate.from_raw:
        return None if gate is None else gate.g
    g = _widen(gate.g)
    if gate.dt_bias is not None:
        g = g + gate.dt_bias.to(g.dtype).view(g.shape[2:])
    rate = None if gate.A_log is None else gate.A_log.to(g.dtype).exp().view(-1, *[1] * (g.ndim - 3))
    if gate.lower_bound is None:
        assert rate is not None
        return -rate * softplus(g)
    return gate.lower_bound * (g if rate is None else rate * g).sigmoid()


def _widen(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
