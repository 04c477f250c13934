"""Hybrid models on virtual ranks: the loss and every gradient are those of one process with each document alone."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hybrids import HYBRIDS, each_alone, make_hybrid, torch_functions
from tiny import (  # fmt: skip
    LENGTH,
    VOCABULARY,
    Result,
    alone,
    distance,
    loss_in_full,
    packed_batch,
    padded_batch,
    plain_batch,
    shared,
    sum_of,
)
from torch import Tensor
from worlds import virtual_world

import weft
from weft.integrations.transformers import ContextParallel
from weft.integrations.transformers.mixers import FAMILIES
from weft.ops.sequence.layout import ANY_LENGTHS, LAYOUTS
from weft.world.launch import ProcessWorld

transformers = pytest.importorskip("transformers", reason="the extra weft-torch[transformers] is not installed")
VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])
pytestmark = pytest.mark.skipif(VERSION < (5, 15), reason="hybrid models need transformers 5.15")

# Models in fp64 whose gates, norms and scans transformers computes in fp32; Olmo's rates up to 2 and Bailing's gates
# make the rounding grow. A state or a halo that is lost is an error of 0.1 and more.
ROUNDING = dict.fromkeys(HYBRIDS, 2e-05) | {"olmo_hybrid": 1e-4, "bailing_hybrid": 1e-4}
ROUNDING |= {"lfm2": 1e-12, "lfm3": 1e-12}  # all in fp64
SOME = ["qwen3_next", "kimi_linear", "lfm2", "nemotron_h"]  # one of each operation


def checkpoint(model: Any, reentrant: bool) -> None:
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})


def packed_rows() -> dict[str, Tensor]:
    """Rows with different documents, some of which end where a shard of 2 or 3 ranks does."""
    rows = [packed_batch(36, cuts, seed) for seed, cuts in enumerate([(12, 13, 24), (9,), (18, 30)])]
    return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}


BATCHES = {"plain": plain_batch, "packed": packed_batch, "packed rows": packed_rows, "padded": padded_batch}


def on_ranks(
    size: int, name: str, batch: dict[str, Tensor], layout: str = "zigzag", *, prepare: Any = None,
    dtype: torch.dtype = torch.float64, **changes: Any,
) -> Result:  # fmt: skip
    def run(axis: weft.Axis) -> Result:
        cp, model = ContextParallel(axis, layout=layout), make_hybrid(name, dtype, **changes)
        if prepare is not None:
            prepare(model)
        cp.enable(model)
        return shared(cp, model, batch, own_loss=False)

    return sum_of(virtual_world(size).run(run).results)


def test_every_family_has_a_model_here() -> None:
    assert HYBRIDS.keys() == FAMILIES.keys()


@pytest.mark.parametrize("name", HYBRIDS)
def test_every_family_has_the_gradients_of_one_process(name: str) -> None:
    """Three ranks: two would hide a shift."""
    for layout, kind in zip(ANY_LENGTHS, ("plain", "packed"), strict=True):
        batch = BATCHES[kind]()
        assert distance(on_ranks(3, name, batch, layout), each_alone(make_hybrid(name), batch)) < ROUNDING[name], kind


@pytest.mark.parametrize("name", HYBRIDS)
def test_the_number_of_ranks_changes_nothing(name: str) -> None:
    """Beside the rounding of fp32, which is less than what transformers' own functions differ by."""
    one = on_ranks(1, name, packed_batch())
    for layout, size in zip(LAYOUTS, (4, 3, 2), strict=True):
        assert distance(on_ranks(size, name, packed_batch(), layout), one) < 5e-6, layout


@pytest.mark.slow
@pytest.mark.parametrize("name", HYBRIDS)
def test_every_combination(name: str) -> None:
    for kind, layout, size in itertools.product(BATCHES, LAYOUTS, (1, 2, 3, 4)):
        batch = BATCHES[kind]()
        wanted = each_alone(make_hybrid(name), batch)
        assert distance(on_ranks(size, name, batch, layout), wanted) < ROUNDING[name], (kind, layout, size)


@pytest.mark.usefixtures("every_network")
@pytest.mark.parametrize("name", SOME)
def test_rows_whose_documents_differ_and_end_on_the_edge_of_a_shard(name: str) -> None:
    batch = packed_rows()
    wanted = each_alone(make_hybrid(name), batch)
    for layout, size in zip(LAYOUTS, (3, 2, 4), strict=True):
        assert distance(on_ranks(size, name, batch, layout), wanted) < ROUNDING[name], layout


def test_several_rows_with_the_same_documents() -> None:
    one, two = packed_batch(seed=1), packed_batch(seed=2)
    batch = {name: torch.cat([one[name], two[name]]) for name in one}
    wanted = each_alone(make_hybrid("qwen3_next"), batch)
    assert distance(on_ranks(3, "qwen3_next", batch), wanted) < ROUNDING["qwen3_next"]


@pytest.mark.parametrize("name", SOME)
def test_padding_on_the_right(name: str) -> None:
    wanted = each_alone(make_hybrid(name), padded_batch())
    assert distance(on_ranks(3, name, padded_batch()), wanted) < ROUNDING[name]


@pytest.mark.parametrize("name", HYBRIDS)
def test_transformers_lets_documents_see_one_another(name: str) -> None:
    """Which is why the judge of a packed batch is each document alone; here none does."""
    batch, model = packed_batch(), make_hybrid(name)
    wanted = each_alone(model, batch)
    with torch_functions(model):
        assert distance(alone(model, batch, own_loss=False), wanted) > 1e-2


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["lfm3", "nemotron_h"])
def test_a_halo_of_several_ranks(name: str, layout: str) -> None:
    """A kernel of 7 tokens over ranks that hold one or two of them, with and without documents."""
    for batch in (plain_batch(2, 9), packed_batch(9, (4,)), packed_batch(8, (1, 2, 5)), plain_batch(1, 4)):
        wanted = each_alone(make_hybrid(name), batch)
        assert distance(on_ranks(5, name, batch, layout), wanted) < ROUNDING[name]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", SOME)
def test_the_gradients_of_every_rank_by_itself(name: str, layout: str) -> None:
    """Each token stands once in the batch, so a row of the table's gradient belongs to one token, of one rank."""
    ids = torch.randperm(VOCABULARY - 3, generator=torch.Generator().manual_seed(4))[None, :LENGTH] + 3
    batch, untied = {"input_ids": ids, "labels": ids.clone()}, {"tie_word_embeddings": False}

    def table_of(result: Result) -> Tensor:
        return next(grad for path, grad in result.grads.items() if "embed" in path and "norm" not in path)

    def run(axis: weft.Axis) -> tuple[Tensor, Tensor]:
        cp, model = ContextParallel(axis, layout=layout), make_hybrid(name, **untied)
        cp.enable(model)
        return cp.shard(batch)["input_ids"][0], table_of(shared(cp, model, batch, own_loss=False))

    wanted = table_of(each_alone(make_hybrid(name, **untied), batch))
    for mine, grad in virtual_world(4).run(run).results:
        found = torch.zeros_like(wanted)
        found[mine] = wanted[mine]
        assert (grad - found).abs().max() < ROUNDING[name] * wanted.abs().max()


@pytest.mark.parametrize(
    ("name", "reentrant"),
    [(name, False) for name in HYBRIDS]
    + [pytest.param(name, True, marks=[pytest.mark.slow] * (name not in SOME)) for name in HYBRIDS],
)
def test_layers_that_are_computed_again(name: str, reentrant: bool) -> None:
    wanted = each_alone(make_hybrid(name), packed_batch())
    found = on_ranks(3, name, packed_batch(), prepare=lambda model: checkpoint(model, reentrant))
    assert distance(found, wanted) < ROUNDING[name]


@pytest.mark.parametrize("name", [*SOME, "mamba2"])
def test_two_forwards_before_two_checkpointed_backwards(name: str) -> None:
    """What is computed again belongs to its own batch: recomputation runs outside the model's forward."""
    first, second = packed_batch(), packed_batch(29, (11,), seed=2)

    def run(axis: weft.Axis) -> Result:
        cp, model = ContextParallel(axis), make_hybrid(name)
        checkpoint(model, reentrant=False)
        cp.enable(model)
        losses = []
        for batch in (first, second):
            part = cp.shard(batch)
            targets, items = part.pop("shift_labels"), part.pop("num_items_in_batch")
            del part["labels"]
            losses.append(loss_in_full(model(**part).logits, targets, items))
        return Result.of(model, losses[0] + losses[1])

    wanted = sum_of([each_alone(make_hybrid(name), batch) for batch in (first, second)])
    assert distance(sum_of(virtual_world(3).run(run).results), wanted) < ROUNDING[name]


def spread(found: Result, wanted: Result) -> float:
    """The norm of all that differs in the gradients, relative to theirs."""
    both = [torch.cat([one.grads[name].flatten().double() for name in wanted.grads]) for one in (found, wanted)]
    return float((both[0] - both[1]).norm() / both[1].norm())


@pytest.mark.parametrize("name", ["qwen3_next", "kimi_linear", "lfm2", "minimax", "nemotron_h"])
def test_autocast_and_models_in_bf16(name: str) -> None:
    """As far from fp32 as one process is: gates stay in fp32 beside q, k and v in bf16.

    With all experts for every token: which ones are chosen would hang on the last bit.
    """
    batch, every = packed_batch(), {"num_experts_per_tok": 4}

    def casting(model: Any) -> None:
        model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)

    exact = each_alone(make_hybrid(name, torch.float32, **every), batch)
    for dtype, prepare in ((torch.float32, casting), (torch.bfloat16, None)):
        single = make_hybrid(name, dtype, **every)
        if prepare is not None:
            prepare(single)
        wanted = each_alone(single, batch)
        found = on_ranks(3, name, batch, dtype=dtype, prepare=prepare, **every)
        assert spread(found, exact) < 2 * spread(wanted, exact), dtype


def test_keys_that_are_all_the_same() -> None:
    """One token over and over, with rates up to 2: where a series for the inverse of a chunk would blow up."""
    batch = plain_batch(1)
    batch["input_ids"] = torch.full_like(batch["input_ids"], 7)
    for name in ("olmo_hybrid", "kimi_linear"):
        wanted = each_alone(make_hybrid(name), batch)
        assert distance(on_ranks(3, name, batch), wanted) < 1e-4, name


@pytest.mark.parametrize("name", ["qwen3_next", "kimi_linear", "nemotron_h"])
def test_heads_that_forget_at_once_beside_heads_that_do_not(name: str) -> None:
    """Gates of -320 and less."""

    def forget(model: Any) -> None:
        for path, weight in model.named_parameters():
            if path.endswith("A_log"):
                weight.data.flatten()[0] = 6.0
            if path.endswith("dt_bias"):
                weight.data += 1.0

    model = make_hybrid(name)
    forget(model)
    wanted = each_alone(model, packed_batch())
    assert distance(on_ranks(3, name, packed_batch(), prepare=forget), wanted) < 5 * ROUNDING[name]


def test_the_loss_of_transformers_itself() -> None:
    """In fp32, from shift_labels; Mamba2 hands only some of its keywords on."""
    for name in ("qwen3_next", "mamba2"):

        def run(axis: weft.Axis, name: str = name) -> Result:
            cp, model = ContextParallel(axis), make_hybrid(name)
            cp.enable(model)
            return shared(cp, model, packed_batch())

        wanted = each_alone(make_hybrid(name), packed_batch())
        assert distance(sum_of(virtual_world(3).run(run).results), wanted) < ROUNDING[name]


def on_gloo(axis: weft.Axis, name: str) -> Result:
    cp, model = ContextParallel(axis), make_hybrid(name)
    cp.enable(model)
    return shared(cp, model, packed_batch(), own_loss=False)


def test_on_gloo(pool: ProcessWorld) -> None:
    """Nemotron-H: attention, convolutions and scans."""
    wanted = each_alone(make_hybrid("nemotron_h"), packed_batch())
    assert distance(sum_of(pool.run(on_gloo, "nemotron_h")), wanted) < ROUNDING["nemotron_h"]
