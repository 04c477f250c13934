"""Blocks `d`: a gated delta net as a plain loop says it, on any number of ranks, and who steps its weights."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from small_run import SMALL, virtual_mesh
from torch import Tensor
from torch.nn import functional as F
from worlds import virtual_world

import weft
from weft.ops.sequence import LAYOUTS
from weft.parallel.mesh import ParallelMesh, make_mesh
from weft.train.delta_block import TAPS, DeltaMixer
from weft.train.metrics import family_of
from weft.train.model import Cache, LanguageModel, Place, make_step

CONFIG = replace(SMALL, width=12, heads=2)
HEADS, DIM = 2, 6
TOKENS = 23
# Documents of one token and of fewer than the taps, that end at a rank's edge, and that go through all ranks.
DOCUMENTS = [(0, TOKENS), (0, 1, 3, 12, TOKENS), (0, 8, 16, TOKENS)]


def make_mixer(dtype: torch.dtype = torch.float64, mesh: ParallelMesh | None = None) -> DeltaMixer:
    mixer = DeltaMixer(CONFIG, mesh or make_mesh((1, 1, 1)), dtype)
    source = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in mixer.parameters():
            drawn = torch.randn(weight.shape, generator=source, dtype=dtype) / 3
            weight.copy_(drawn if weight.ndim > 1 else weight + drawn)
    return mixer


def draw() -> Tensor:
    return torch.randn(1, TOKENS, 12, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def place_of(length: int, bounds: tuple[int, ...] | None, **how: Any) -> Place:
    return Place(weft.sequence(length, cu_seqlens=bounds, **how), torch.zeros(1, length))


def plain_loop(mixer: DeltaMixer, x: Tensor) -> Tensor:
    """One document ``[T, width]``, token by token and head by head."""
    parts = [part(x).unflatten(-1, (HEADS, DIM)) for part in (mixer.q, mixer.k, mixer.v)]
    gate, a, b = mixer.gate(x).unflatten(-1, (HEADS, DIM)), mixer.a(x), mixer.b(x)
    rows = []
    states = [x.new_zeros(DIM, DIM) for _ in range(HEADS)]
    for t in range(len(x)):
        row = []
        for h in range(HEADS):
            q, k, v = (
                F.silu(sum(taps[:, TAPS - 1 - back] * part[t - back, h] for back in range(min(t + 1, TAPS))))
                for part, taps in zip(parts, mixer.conv[h].split(DIM), strict=True)
            )
            q, k = q / q.norm(), k / k.norm()
            decay = torch.exp(-torch.exp(mixer.a_log[h]) * F.softplus(a[t, h] + mixer.dt_bias[h]))
            held = decay * states[h]
            states[h] = held + torch.sigmoid(b[t, h]) * torch.outer(k, v - k @ held)
            o = q @ states[h] * DIM**-0.5
            o = o / (o.square().mean() + torch.finfo(o.dtype).eps).sqrt() * mixer.norm
            row.append(o * F.silu(gate[t, h]))
        rows.append(torch.cat(row))
    return mixer.out(torch.stack(rows))


def with_gradients(mixer: DeltaMixer, x: Tensor, run: Any, grad: Tensor) -> list[Tensor]:
    """The result, and the gradients of x and of every weight."""
    x = x.clone().requires_grad_()
    out = run(x)
    return [out.detach(), *torch.autograd.grad(out, [x, *mixer.parameters()], grad)]


@pytest.mark.parametrize("bounds", DOCUMENTS, ids=str)
def test_the_block_is_the_plain_loop(bounds: tuple[int, ...]) -> None:
    mixer, x = make_mixer(), draw()
    grad = torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view_as(x)

    def by_hand(x: Tensor) -> Tensor:
        return torch.cat([plain_loop(mixer, x[0, begin:end]) for begin, end in pairwise(bounds)])[None]

    wanted = with_gradients(mixer, x, by_hand, grad)
    found = with_gradients(mixer, x, lambda x: mixer(x, place_of(TOKENS, bounds), None), grad)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


@pytest.mark.usefixtures("every_network")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("bounds", DOCUMENTS, ids=str)
def test_gradients_on_ranks_are_those_of_one_process(bounds: tuple[int, ...], size: int, layout: str) -> None:
    """Result and gradient of x are each rank's part; parts of weights' gradients add up to the whole."""
    x = draw()
    grad = torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view_as(x)
    mixer = make_mixer()
    wanted = with_gradients(mixer, x, lambda x: mixer(x, place_of(TOKENS, bounds), None), grad)

    def program(axis: weft.Axis) -> list[Tensor]:
        mine = make_mixer(mesh=virtual_mesh(axis, 1, size))
        part, of_out, out, of_x = (
            weft.shard(whole, 1, layout=layout, cu_seqlens=bounds, group=axis)
            for whole in (x, grad, wanted[0], wanted[1])
        )
        place = place_of(part.shape[1], bounds, layout=layout, group=axis)
        found = with_gradients(mine, part, lambda part: mine(part, place, None), of_out)
        for one, other in zip(found[:2], (out, of_x), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)
        return found[2:]

    for parts, whole in zip(zip(*virtual_world(size).run(program).results, strict=True), wanted[2:], strict=True):
        torch.testing.assert_close(torch.stack(parts).sum(0), whole, rtol=1e-9, atol=1e-11)


def test_token_by_token_is_the_whole() -> None:
    mixer, x, cache = make_mixer(), draw(), Cache()
    wanted = mixer(x, place_of(TOKENS, None), None)
    found = [mixer(token, place_of(1, None), cache) for token in x.split(1, 1)]
    torch.testing.assert_close(torch.cat(found, 1), wanted, rtol=1e-9, atol=1e-11)


def test_gates_are_never_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under autocast products are; what decays over thousands of tokens is not."""
    given: list[Tensor] = []
    operation = weft.delta_rule
    monkeypatch.setattr(weft, "delta_rule", lambda *args, **how: given.extend(args) or operation(*args, **how))
    mixer = make_mixer(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        mixer(draw().float(), place_of(TOKENS, None), None).sum().backward()
    assert [part.dtype for part in given] == [torch.bfloat16] * 3 + [torch.float32] * 2
    assert all(weight.grad is not None and weight.grad.dtype == torch.float32 for weight in mixer.parameters())


@pytest.mark.parametrize("wrap", ["weft", "ddp"])
def test_who_steps_which_weight(wrap: Any) -> None:
    """Matrices: REKLS. Vectors and the taps of the convolution: AdamW, without weight decay."""
    config = replace(SMALL, pattern="d", layers=1, weight_decay=0.25, wrap=wrap)
    mesh = make_mesh((1, 1, 1))
    step = make_step(config, LanguageModel(config, 256, mesh), mesh)
    found = {
        name.removeprefix("blocks.0.mixer."): (of_adamw, group["weight_decay"])
        for part_name, part in step.parts.items()
        for group in part.param_groups
        for name in group["param_names"]
        if ".mixer." in name
        for of_adamw in [part_name == "ShardedAdamW" or group.get("algorithm") == "adamw"]
    }
    matrices, vectors = ("q", "k", "v", "gate", "out", "a", "b"), ("a_log", "dt_bias", "conv", "norm")
    assert found == {
        **{f"{name}.weight": (False, 0.25) for name in matrices}, **dict.fromkeys(vectors, (True, 0.0)),
    }  # fmt: skip


def test_heads_begin_with_memories_of_different_lengths() -> None:
    """As those of linear attention."""
    mixer = DeltaMixer(CONFIG, make_mesh((1, 1, 1)), torch.float64)
    decays = torch.exp(-mixer.a_log.exp() * F.softplus(mixer.dt_bias))
    torch.testing.assert_close(decays, torch.tensor([1.0, 6.0], dtype=torch.float64).sigmoid())


def test_what_its_ranks_send_counts_as_linear_attention() -> None:
    names = ("delta_rule", "delta_rule.backward", "short_conv", "short_conv.metadata")
    assert {family_of(name) for name in names} == {"linear attention"}
