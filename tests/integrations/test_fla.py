"""fla's names over ranks, against its naive operations: outputs, states and every gradient."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from test_linear_attention import Case, slice_of
from torch import Tensor
from torch.nn.functional import conv1d, silu
from worlds import virtual_world

import weft
from weft.integrations import fla as ours
from weft.ops.sequence.layout import shard_lengths

TOTAL, HEADS, VALUE_HEADS, KEYS, VALUE_DIM = 26, 2, 4, 4, 3
BOUNDS = [0, 5, 14, TOTAL]
WHOLE = ("initial_state", "A_log", "dt_bias", "g_gamma", "weight", "bias")  # on every rank
HOMES = {
    "causal_conv1d": "fla.modules.conv", "chunk_delta_rule": "fla.ops.delta_rule", "chunk_kda": "fla.ops.kda",
    "chunk_gated_delta_rule": "fla.ops.gated_delta_rule", "chunk_gla": "fla.ops.gla",
    "chunk_simple_gla": "fla.ops.simple_gla",
}  # fmt: skip
ALL_FLAGS = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True,
             "use_gate_in_kernel": True, "state_v_first": True}  # fmt: skip
# The function, its options, and inputs beside those it needs.
VARIANTS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "delta": ("chunk_delta_rule", {}, ()),
    "delta of length 1": ("chunk_delta_rule", {"use_qk_l2norm_in_kernel": True}, ("initial_state",)),
    "gated": ("chunk_gated_delta_rule", {"scale": 0.3}, ("initial_state",)),
    "gated, logits": ("chunk_gated_delta_rule", {"use_beta_sigmoid_in_kernel": True}, ()),
    "gated, all flags": ("chunk_gated_delta_rule", ALL_FLAGS, ("A_log", "dt_bias", "initial_state")),
    "gated, no bias": ("chunk_gated_delta_rule", {"use_gate_in_kernel": True}, ("A_log",)),
    "kda": ("chunk_kda", {"scale": 0.3, "safe_gate": True}, ("initial_state",)),
    "kda, all flags": ("chunk_kda", ALL_FLAGS, ("A_log", "dt_bias", "initial_state")),
    "kda, bounded": ("chunk_kda", {"use_gate_in_kernel": True, "safe_gate": True, "lower_bound": -5.0},
                     ("A_log", "dt_bias")),
    "kda, bounded alone": ("chunk_kda", {"use_gate_in_kernel": True, "lower_bound": -2.0}, ()),
    "gla": ("chunk_gla", {}, ("initial_state",)),
    "gla, values first": ("chunk_gla", {"state_v_first": True}, ("initial_state",)),
    "simple gla": ("chunk_simple_gla", {"scale": 0.3}, ("g", "initial_state")),
    "retention": ("chunk_simple_gla", {"state_v_first": True, "chunk_size": 16}, ("g_gamma", "initial_state")),
    "no decay": ("chunk_simple_gla", {}, ()),
}  # fmt: skip


def draw_inputs(name: str, options: dict[str, Any], others: tuple[str, ...], packed: bool) -> dict[str, Tensor]:
    make = torch.Generator().manual_seed(len(others) + len(options))

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=make)

    batch, states = (1, len(BOUNDS) - 1) if packed else (2, 2)
    heads = HEADS if name in ("chunk_delta_rule", "chunk_gla", "chunk_simple_gla") else VALUE_HEADS
    tokens = (batch, TOTAL, heads)
    found = {"q": draw(batch, TOTAL, HEADS, KEYS), "k": draw(batch, TOTAL, HEADS, KEYS) / 2}
    found["v"] = draw(*tokens, VALUE_DIM)
    if "gla" not in name:
        found["beta"] = draw(*tokens) if options.get("use_beta_sigmoid_in_kernel") else 2 * draw(*tokens).sigmoid()
    if name in ("chunk_kda", "chunk_gla", "chunk_gated_delta_rule") or "g" in others:
        raw = draw(*tokens, KEYS) if name in ("chunk_kda", "chunk_gla") else draw(*tokens)
        found["g"] = raw if options.get("use_gate_in_kernel") else -raw.abs() / 5
    state = (VALUE_DIM, KEYS) if options.get("state_v_first") else (KEYS, VALUE_DIM)
    every = {
        "A_log": draw(heads) / 2, "dt_bias": draw(heads * KEYS if name == "chunk_kda" else heads),
        "g_gamma": -draw(heads).abs() / 5, "initial_state": draw(states, heads, *state),
    }  # fmt: skip
    return {**found, **{one: every[one] for one in others if one in every}}


def naive(name: str, options: dict[str, Any], x: dict[str, Tensor], bounds: list[int]) -> tuple[Tensor, Tensor]:
    """fla's own recurrence of each document, after what its flags mean in plain words."""
    module = importlib.import_module(f"{HOMES[name]}.naive")
    x, first = dict(x), options.get("state_v_first", False)
    if options.get("use_qk_l2norm_in_kernel"):
        x |= {one: x[one] / (x[one].square().sum(-1, keepdim=True) + 1e-6).sqrt() for one in ("q", "k")}
    if options.get("use_beta_sigmoid_in_kernel"):
        x["beta"] = x["beta"].sigmoid() * (2 if options.get("allow_neg_eigval") else 1)
    if options.get("use_gate_in_kernel"):
        gates = importlib.import_module(f"{HOMES[name]}.gate")
        given = [x["g"], x.get("A_log"), x.get("dt_bias")]
        if "lower_bound" in options:
            x["g"] = gates.naive_kda_lowerbound_gate(*given, options["lower_bound"])
        else:
            x["g"] = (gates.naive_kda_gate if name == "chunk_kda" else gates.naive_gdn_gate)(*given)
    if name == "chunk_simple_gla" and "g" not in x:
        x["g"] = x.get("g_gamma", torch.zeros(HEADS)).expand(*x["q"].shape[:3])
    q, k = (x[one].repeat_interleave(x["v"].shape[2] // HEADS, 2) for one in ("q", "k"))
    batch, rest = len(q), {"scale": options["scale"]} if "scale" in options else {}
    outs, states = [], []
    for number, (begin, end) in enumerate(pairwise(bounds)):

        def cut(one: Tensor, begin: int = begin, end: int = end) -> Tensor:
            return one[:, begin:end]

        start = None if "initial_state" not in x else x["initial_state"][number * batch : (number + 1) * batch]
        rest |= {"initial_state": start if start is None or not first else start.mT, "output_final_state": True}
        tokens = [cut(one) for one in (q, k, x["v"])]
        if name == "chunk_delta_rule":
            turned = (one.transpose(1, 2) for one in (*tokens, cut(x["beta"])))
            o, state = module.delta_rule_recurrence(*turned, **rest)
            o = o.transpose(1, 2)
        elif name == "chunk_gated_delta_rule":
            o, state = module.naive_recurrent_gated_delta_rule(*tokens, cut(x["beta"]), cut(x["g"]), **rest)
        elif name == "chunk_kda":
            o, state = module.naive_recurrent_kda(*tokens, cut(x["g"]), cut(x["beta"]), **rest)
        else:
            o, state = getattr(module, name.replace("chunk", "naive_recurrent"))(*tokens, cut(x["g"]), **rest)
        outs.append(o)
        states.append(state.mT if first else state)
    return torch.cat(outs, dim=1), torch.cat(states)


def convolve(x: dict[str, Tensor], bounds: list[int], activation: str | None) -> tuple[Tensor, Tensor]:
    """Each document after its state of W inputs."""
    outs, states, (dim, taps), batch = [], [], x["weight"].shape, len(x["x"])
    for number, (begin, end) in enumerate(pairwise(bounds)):
        start = x["initial_state"][number * batch : (number + 1) * batch]
        seen = torch.cat([start, x["x"][:, begin:end].flatten(2).mT], dim=2)
        outs.append(conv1d(seen[..., 1:], x["weight"].unsqueeze(1), x["bias"], groups=dim).mT)
        states.append(seen[..., -taps:])
    y = torch.cat(outs, dim=1)
    y = y if activation is None else silu(y)
    return y.view_as(x["x"]) + x["residual"], torch.cat(states)


def compare(
    name: str, options: dict[str, Any], inputs: dict[str, Tensor], judge: Callable[..., tuple[Tensor, Tensor]],
    size: int, layout: str, packed: bool,
) -> None:  # fmt: skip
    """Outputs, final states and every gradient, on each rank."""
    bounds = BOUNDS if packed else [0, TOTAL]
    whole = {one: x.clone().requires_grad_() for one, x in inputs.items()}
    o, state = judge(whole, bounds)
    true = torch.autograd.grad((o.square().sum() + state.sum()), list(whole.values()))
    boundaries, cut = torch.tensor(BOUNDS) if packed else None, Case(shard_lengths(TOTAL, layout, size))

    def program(axis: weft.Axis) -> dict[str, Tensor]:
        local = {one: (x.clone() if one in WHOLE else weft.shard(x, 1, layout=layout, group=axis)).requires_grad_()
                 for one, x in inputs.items()}  # fmt: skip
        out, final = getattr(ours, name)(
            **local, **options, output_final_state=True, cu_seqlens=boundaries, layout=layout, group=axis
        )
        found = torch.autograd.grad(out.square().sum() + final.sum() / axis.size, list(local.values()))
        return {"o": out.detach(), "state": final.detach(), **dict(zip(local, found, strict=True))}

    parts = virtual_world(size).run(program).results
    for rank, part in enumerate(parts):
        for one, wanted in {"o": o, "state": state, **dict(zip(whole, true, strict=True))}.items():
            if one in WHOLE:
                got = sum(other[one] for other in parts)
            else:
                got, wanted = part[one], wanted if one == "state" else slice_of(wanted, cut, layout, rank)
            assert got.shape == wanted.shape
            assert ((got - wanted).abs().max() / wanted.abs().max().clamp(min=1)).item() < 2e-5, (one, rank)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("every_network")
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_as_the_naive_operations(variant: str, packed: bool, size: int) -> None:
    pytest.importorskip("fla")
    name, options, others = VARIANTS[variant]
    inputs = draw_inputs(name, options, others, packed)
    layout = "zigzag" if packed else "contiguous"
    compare(name, options, inputs, lambda x, bounds: naive(name, options, x, bounds), size, layout, packed)


@pytest.mark.usefixtures("every_network")
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("activation", "shape"), [(None, (6,)), ("silu", (6,)), ("swish", (2, 3))])
def test_convolutions_with_states_of_as_many_inputs_as_taps(activation, shape, packed: bool, size: int) -> None:
    make = torch.Generator().manual_seed(1)
    batch, states = (1, len(BOUNDS) - 1) if packed else (2, 2)
    shapes = {"x": (batch, TOTAL, *shape), "weight": (6, 4), "bias": (6,), "residual": (batch, TOTAL, *shape),
              "initial_state": (states, 6, 4)}  # fmt: skip
    inputs = {one: torch.randn(of, generator=make) for one, of in shapes.items()}
    options = {} if activation is None else {"activation": activation}
    compare("causal_conv1d", options, inputs, lambda x, bounds: convolve(x, bounds, activation), size, "zigzag", packed)


def test_a_convolution_without_states_is_that_of_torch() -> None:
    make = torch.Generator().manual_seed(1)
    x, weight = torch.randn(2, 9, 5, generator=make), torch.randn(5, 3, generator=make)
    y, state = ours.causal_conv1d(x, weight, output_final_state=None, backend="cuda")
    assert state is None
    torch.testing.assert_close(y, conv1d(x.mT, weight.unsqueeze(1), padding=2, groups=5)[..., :9].mT)
