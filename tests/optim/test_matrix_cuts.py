"""What matrices are cut into, who owns the parts, and in which steps their factors are decomposed."""

from __future__ import annotations

import copy
import math
import re
from typing import Any

import pytest
import torch
from ranks import errors_of
from sharded_run import RULES, Kind, make, part_of
from torch import Tensor
from worlds import place, virtual_world

import weft
from weft import optim
from weft.optim.matrix import exact, rule, soap, stable
from weft.optim.matrix.rekls import ROOT_EVERY

ROWS = [slice(0, 2), slice(2, 6), slice(6, 9)]
CUTS: dict[str, tuple[tuple[int, ...], dict[str, Any], list[Any]]] = {
    "split": ((9, 6), {"split": (2, 4, 3)}, ROWS),
    "heads": ((8, 5), {"split": 4}, [slice(0, 4), slice(4, 8)]),
    "block_dim": (
        (7, 6),
        {"block_dim": 4},
        [(slice(r, r + h), slice(c, c + 3)) for r, h in ((0, 3), (3, 4)) for c in (0, 3)],
    ),
    "stacked": ((3, 5, 4), {"stacked": True}, [0, 1, 2]),
    "stacked, split": (
        (2, 4, 5),
        {"stacked": True, "split": 2},
        [(e, slice(r, r + 2)) for e in (0, 1) for r in (0, 2)],
    ),
    "flattened, block_dim": ((4, 2, 3), {"flatten": True, "block_dim": 3}, []),
}


def grads_of(shape: tuple[int, ...], steps: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=draw) for _ in range(steps)]


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("rule", RULES)
def test_parts_are_stepped_as_matrices_of_their_own(rule: str, cut: str) -> None:
    """To the bit, with weight decay: what is cut is nothing but several parameters in one tensor."""
    shape, options, parts = CUTS[cut]
    start = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    whole = torch.nn.Parameter(start.clone())
    view = whole.detach()
    if cut == "flattened, block_dim":
        view, parts = view.view(4, 6), [(slice(r, r + 2), slice(c, c + 3)) for r in (0, 2) for c in (0, 3)]
    alone = [torch.nn.Parameter(view[part].clone()) for part in parts]
    together = make([{"params": [whole], **options}], rule, weight_decay=0.1)
    each = make(alone, rule, weight_decay=0.1)
    for grad in grads_of(shape, 8):
        whole.grad = grad
        for part, one in zip(parts, alone, strict=True):
            one.grad = grad.view(view.shape)[part].clone()
        together.step()
        each.step()
    for part, one in zip(parts, alone, strict=True):
        assert torch.equal(view[part], one.detach())
    assert float(together.state[whole]["step"]) == 8


@pytest.mark.parametrize(
    ("shape", "options", "words"),
    [
        ((9, 6), {"split": (2, 4)}, r"split=\(2, 4\) does not divide the 9 rows of parameter 0 \[9, 6\]"),
        ((9, 6), {"split": 4}, "split=4 does not divide the 9 rows"),
        ((9, 6), {"split": (3, 0, 6)}, "split must be at least 1, got 0"),
        ((9, 6), {"block_dim": 0}, "block_dim must be at least 1, got 0"),
        ((2, 9, 6), {}, "flatten=True .* stacked=True .* algorithm='adamw'"),
        ((2, 2, 9, 6), {"stacked": True}, "has 4 dimensions"),
        ((0, 9, 6), {"stacked": True}, r"parameter 0 \[0, 9, 6\] has nothing to be cut into matrices"),
        ((0, 6), {"split": 2}, "has nothing to be cut into matrices"),
        ((2, 9, 6), {"stacked": True, "flatten": True}, "flatten and stacked say different things"),
    ],
)
def test_cuts_that_do_not_fit_are_refused_on_every_rank(shape: tuple[int, ...], options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        optim.Muon([{"params": [torch.nn.Parameter(torch.ones(shape))], **options}])

    def program(axis: weft.Axis) -> None:
        optim.Muon([{"params": [torch.nn.Parameter(torch.ones(shape))], **options}], group=axis)

    said = errors_of(program)
    assert len(said) == 3 and all(re.search(words, one) for one in said)


def test_a_state_of_other_cuts_is_refused() -> None:
    parameter = torch.nn.Parameter(torch.ones(8, 6))
    saved = make([{"params": [parameter], "split": 4}]).state_dict()
    for other in ({}, {"split": 2}):
        with pytest.raises(ValueError, match="the state was saved with split=4, not"):
            make([{"params": [parameter], **other}]).load_state_dict(saved)


@pytest.mark.usefixtures("every_network")
@pytest.mark.parametrize("early", [False, True])
def test_parts_in_several_buckets_of_an_overlapped_step(early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients that leave within the backward leave when they are there, for every bucket."""
    monkeypatch.setattr("weft.optim.matrix.engine.SMALLEST_BYTES", 16)

    def program(axis: weft.Axis) -> list[Tensor]:
        torch.manual_seed(0)
        model = place(torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.Tanh(), torch.nn.Linear(12, 4)))
        groups = [{"params": [p for p in model.parameters() if p.ndim == 2], "block_dim": 3},
                  {"params": [p for p in model.parameters() if p.ndim == 1]}]  # fmt: skip
        part = optim.Muon(groups, lr=0.1, ns_dtype=torch.float32, data_group=axis)
        step = optim.OverlappedStep([part], clip=1.0, overlap_backward=early)
        if axis.size > 1:
            seen = [parameter for bucket in part.buckets() for parameter in bucket]
            assert len(seen) > len(set(seen))
        for number in range(4):
            x = place(torch.randn(4, 8, generator=torch.Generator().manual_seed(number)))
            step.zero_grad()
            model(x.tensor_split(axis.size)[axis.rank]).square().mean().backward()
            step.step()
        return [p.detach() for p in model.parameters()]

    wanted = virtual_world(1).run(program).results[0]
    for found in virtual_world(2).run(program).results:
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("every_network")
def test_experts_stay_where_they_lie() -> None:
    """A stack that is cut over the ranks sends neither gradients nor updates."""

    def program(axis: weft.Axis) -> int:
        kind = Kind((6, 4, 5), 0, {"stacked": True})
        parameter = place(torch.nn.Parameter(part_of(torch.ones(kind.shape), kind, axis.rank, axis.size, False)))
        optimizer = optim.Muon([{"params": [parameter], "partition_dim": 0, "stacked": True}], group=axis)
        parameter.grad = place(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(axis.rank)))
        with weft.record() as ledger:
            optimizer.step()
        assert not torch.equal(parameter, torch.ones_like(parameter))
        return sum(event.bytes_sent for event in ledger.events if not event.operation.endswith(".metadata"))

    assert virtual_world(3).run(program).results == [0, 0, 0]


# Decompositions.


def count_decompositions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the factors that are decomposed from now on, in any process of this world."""
    calls: list[int] = []

    def counted(factor: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(len(factor))
        return rule.decompose(factor)

    for module in (exact, stable, soap):
        monkeypatch.setattr(module, "decompose", counted)
    return calls


@pytest.mark.parametrize("variant", ["exact", "stable"])
def test_every_step_decomposes_an_equal_share(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All factors at first; then each once in five steps, as many in one step as in another."""
    calls = count_decompositions(monkeypatch)
    parameters = [torch.nn.Parameter(torch.ones(6, 6)) for _ in range(10)]
    optimizer = optim.REKLS(parameters, lr=0.01, variant=variant, root_every=5, dense_steps=3)
    counts = []
    for step in range(13):
        for parameter, grad in zip(parameters, grads_of((10, 6, 6), step + 1)[-1], strict=True):
            parameter.grad = grad.clone()
        calls.clear()
        optimizer.step()
        counts.append(len(calls))
    assert counts == [20] * 3 + [4] * 10


@pytest.mark.usefixtures("every_network")
def test_every_owner_has_an_equal_share_of_every_step() -> None:
    def program(axis: weft.Axis) -> list[int]:
        parameters = [place(torch.nn.Parameter(torch.ones(6, 6))) for _ in range(20)]
        optimizer = optim.REKLS(parameters, lr=0.01, root_every=5, group=axis)
        plans = [plan for plans in optimizer._plans.values() for plan in plans if plan.is_mine]
        return [sum(turn == at for plan in plans for turn in plan.turns.values()) for at in range(5)]

    assert virtual_world(4).run(program).results == [[2] * 5] * 4


@pytest.mark.usefixtures("every_network")
def test_which_factors_are_due_does_not_depend_on_ranks() -> None:
    def turns(axis: weft.Axis) -> list[dict[str, int]]:
        parameters = [place(torch.nn.Parameter(torch.ones(size, 6))) for size in (3, 9, 5, 5, 12)]
        optimizer = optim.REKLS(parameters, lr=0.01, root_every=4, group=axis)
        return [dict(plan.turns) for plans in optimizer._plans.values() for plan in plans]

    wanted = virtual_world(1).run(turns).results[0]
    assert all(found == wanted for size in (2, 5) for found in virtual_world(size).run(turns).results)


def test_a_copy_goes_on_with_the_turns() -> None:
    """A group that is added to both is decomposed in the same steps of both."""
    one = optim.REKLS([torch.nn.Parameter(torch.ones(6, 6)) for _ in range(2)], lr=0.01, root_every=5)
    found = []
    for optimizer in (one, copy.deepcopy(one)):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(6, 6))]})
        found.append([dict(plan.turns) for plans in optimizer._plans.values() for plan in plans])
    assert found[0] == found[1] and found[0][-1] == {"L": 4, "R": 0}


@pytest.mark.parametrize("variant", ["exact", "stable"])
def test_roots_between_their_turns_are_saved(variant: str) -> None:
    """They are older than the factors. A state without them, as earlier versions saved it, makes them of these."""
    parameter = torch.nn.Parameter(torch.ones(5, 4))
    kept = {"exact": {"Q_L", "Q_R", "eigenvalues_L", "eigenvalues_R"}, "stable": {"root_L", "root_R"}}[variant]
    rare = optim.REKLS([parameter], lr=0.01, variant=variant, root_every=4, dense_steps=1)
    for grad in grads_of((5, 4), 3):
        parameter.grad = grad
        rare.step()
    saved = rare.state_dict()
    assert kept <= set(saved["state"][0])
    dense = optim.REKLS([parameter], lr=0.01, variant=variant, root_every=1)
    assert not kept & set(dense.state_dict()["state"][0])
    earlier = copy.deepcopy(saved)
    for name in kept:
        del earlier["state"][0][name]
    for group in earlier["param_groups"]:
        for name in ("root_every", "dense_steps", "cautious", "stacked", "split", "block_dim"):
            del group[name]  # which they had not
    fresh = optim.REKLS([parameter], lr=0.01, variant=variant)
    fresh.load_state_dict(earlier)
    state = fresh.state[parameter]
    STATE = {"exact": exact.EXACT, "stable": stable.STABLE}[variant]
    wanted = {side: state[side] for side in "LR"}
    STATE.derive(wanted, "LR")
    assert all(torch.equal(state[name], wanted[name]) for name in kept)
    assert not torch.equal(state[min(kept)], rare.state[parameter][min(kept)])
    fresh.load_state_dict(saved)
    assert all(torch.equal(fresh.state[parameter][name], rare.state[parameter][name]) for name in kept)


def test_the_default_is_stable_with_rare_roots() -> None:
    optimizer = optim.REKLS([torch.nn.Parameter(torch.ones(2, 2))], lr=0.1)
    group = optimizer.param_groups[0]
    settings = optimizer.settings_kind.of(group)
    assert (group["variant"], settings.root_every, settings.dense_steps) == ("stable", 5, 20)
    assert optimizer.settings_kind.of({**group, "variant": "exact"}).root_every == ROOT_EVERY["exact"] == 1


# Weight decay and rates.


@pytest.mark.parametrize("rule", RULES)
def test_cautious_decay_is_where_the_update_goes_to_zero_too(rule: str) -> None:
    start = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    ends = {}
    for name, options in {"none": {"weight_decay": 0.0}, "all": {}, "cautious": {"cautious": True}}.items():
        weight = torch.nn.Parameter(start.clone())
        optimizer = make(
            [weight], rule, lr=0.1, **{"weight_decay": 0.5, "weight_decay_method": "independent", **options}
        )
        for grad in grads_of((6, 4), 1 + (rule == "SOAP")):  # whose first step only makes its bases
            weight.data.copy_(start)
            weight.grad = grad
            optimizer.step()
        ends[name] = weight.detach()
    toward = (start - ends["none"]) * start >= 0  # the update, times the weight
    assert 0 < toward.sum() < toward.numel()
    assert torch.equal(ends["cautious"], torch.where(toward, ends["all"], ends["none"]))
    with pytest.raises(ValueError, match="cautious says which weights decay; with l2 none do"):
        make([weight], rule, cautious=True, weight_decay_method="l2")


@pytest.mark.parametrize("shape", [(6, 9), (12, 5), (16, 16)])
@pytest.mark.parametrize("scale", ["original", "rms"])
def test_alone_muon_has_the_bits_of_torch(scale: str, shape: tuple[int, int]) -> None:
    start = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    mine = optim.Muon([ours], lr=0.02, scale=scale)
    other = torch.optim.Muon([theirs], lr=0.02, adjust_lr_fn={"original": None, "rms": "match_rms_adamw"}[scale])
    for grad in grads_of(shape, 6):
        ours.grad, theirs.grad = grad.clone(), grad.clone()
        mine.step()
        other.step()
        assert torch.equal(ours, theirs)
    assert torch.equal(mine.state[ours]["momentum_buffer"], other.state[theirs]["momentum_buffer"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"momentum": 1.0}, r"momentum must be in \[0, 1\), got 1.0"),
        ({"ns_steps": 0}, "ns_steps must be at least 1, got 0"),
        ({"scale": "big"}, "scale 'big' is not one of original, spectral, rms"),
        ({"ns_dtype": torch.float16}, "ns_dtype must be torch.bfloat16 or torch.float32, got torch.float16"),
        ({"ns_coefficients": (1.0, 2.0)}, r"ns_coefficients must be \(a, b, c\) or a sequence of such"),
        ({"ns_coefficients": [(1.0, 2.0, 3.0), (1.0, math.nan, 2.0)]}, r"ns_coefficients must be \(a, b, c\)"),
    ],
)
@pytest.mark.parametrize("kind", [optim.Muon, optim.NorMuon])
def test_options_of_muon_that_are_refused(kind: Any, options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        kind([torch.nn.Parameter(torch.ones(2, 2))], **options)
