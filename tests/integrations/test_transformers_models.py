"""Models with something of their own in attention, positions or loss, on virtual ranks beside one process."""

from __future__ import annotations

import itertools
import os
from typing import Any

import pytest
import torch
from hybrids import each_alone
from tiny import (
    EAGER,
    OTHER_MODELS,
    Result,
    alone,
    distance,
    make_model,
    packed_batch,
    padded_batch,
    plain_batch,
    shared,
    sum_of,
)
from torch import Tensor
from worlds import every, virtual_world

import weft
from weft.integrations.transformers import ContextParallel
from weft.ops.sequence.layout import LAYOUTS

transformers = pytest.importorskip("transformers", reason="the extra weft-torch[transformers] is not installed")
FIVE = int(transformers.__version__.split(".")[0]) >= 5
pytestmark = pytest.mark.skipif(not FIVE, reason="transformers 4.57 has some of these models in another form")

BATCHES = {"plain": plain_batch, "packed": packed_batch, "padded": padded_batch}
# transformers' loss, of which the router's is a part, is in fp32; so are rotary embeddings of Llama 4 and DeepSeek-V2,
# norms and softmax of Gemma 2.
ROUTED = ("mixtral", "qwen3_moe")
ROUNDING = dict.fromkeys((*ROUTED, "llama4", "gemma2", "deepseek_v2"), 2e-6)


def on_ranks(size: int, name: str, batch: dict[str, Tensor], layout: str = "zigzag", **changes: Any) -> Result:
    """The sum over the ranks of a context group, each with a model of its own."""

    def run(axis: weft.Axis) -> Result:
        cp, model = ContextParallel(axis, layout=layout), make_model(name, **changes)
        cp.enable(model)
        return shared(cp, model, batch, own_loss=name in ROUTED)

    return sum_of(virtual_world(size).run(run).results)


def wanted_of(name: str, batch: dict[str, Tensor], **changes: Any) -> Result:
    """One process. GPT-OSS asks for its mask without position_ids, so that documents see one another there, and padded
    queries of Gemma 2 that see no key are no numbers in fp64: there the judge is each document by itself."""
    if name in EAGER:
        return each_alone(make_model(name, **changes), batch)
    return alone(make_model(name, **changes), batch, own_loss=name in ROUTED)


@pytest.mark.usefixtures("every_network")
@pytest.mark.parametrize("name", OTHER_MODELS)
def test_the_loss_and_all_gradients_are_those_of_one_process(name: str) -> None:
    """Half of the combinations here, the others for the next model; all with `make soak`."""
    choices = itertools.product(enumerate(BATCHES), enumerate(LAYOUTS), enumerate((2, 3)))
    for (i, kind), (j, layout), (k, size) in every(choices):
        if (i + j + k + list(OTHER_MODELS).index(name)) % 2 and "WEFT_SOAK" not in os.environ:
            continue
        batch = BATCHES[kind]()
        found = on_ranks(size, name, batch, layout)
        assert distance(found, wanted_of(name, batch)) < ROUNDING.get(name, 1e-12), (kind, layout, size)


# What a model has of its own, and the same model without it, which must be far from it: else nothing is tested above.
WITHOUT: dict[str, dict[str, Any]] = {
    "dynamic rope": {"rope_parameters": None, "rope_scaling": None},
    "phi3": {"rope_parameters": None, "rope_scaling": None},
    "mixtral": {"output_router_logits": False},
    "llama4": {"attention_chunk_size": 64},
    "gemma2": {"attn_logit_softcapping": None},
}


@pytest.mark.parametrize("name", WITHOUT)
def test_what_is_tested_makes_a_difference(name: str) -> None:
    batch = plain_batch()
    assert distance(wanted_of(name, batch, **WITHOUT[name]), wanted_of(name, batch)) > 1e-2


@pytest.mark.parametrize("name", ["dynamic rope", "phi3", "phimoe longrope"])
def test_frequencies_follow_the_longest_position_of_each_batch(name: str) -> None:
    """Short, long and short again: what a dynamic embedding keeps from batch to batch is that of one process, too.

    The long batch is of two documents, and only the ranks that hold the longer one see its last position.
    """
    batches = [plain_batch(1, 15), packed_batch(45, (5,), seed=2), packed_batch(30, (14,)), plain_batch(1, 9)]

    def run(axis: weft.Axis | None) -> list[Result]:
        cp, model = ContextParallel(axis, layout="contiguous"), make_model(name)
        cp.enable(model)
        return [shared(cp, model, batch, own_loss=False) for batch in batches]

    model = make_model(name)
    wanted = [alone(model, batch, own_loss=False) for batch in batches]
    for found, one in zip(zip(*virtual_world(3).run(run).results, strict=True), wanted, strict=True):
        assert distance(sum_of(list(found)), one) < 1e-12


def test_a_rotary_embedding_outside_a_forward_is_what_it_was() -> None:
    cp, model = ContextParallel(), make_model("phi3")
    positions = torch.arange(30)[None]
    wanted = model.model.rotary_emb(torch.zeros(1), positions)
    cp.enable(model)
    with pytest.raises(ValueError, match="call the model that was enabled"):
        model.model.rotary_emb(torch.zeros(1), positions)
    with cp.paused():
        found = model.model.rotary_emb(torch.zeros(1), positions)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def several_packed_rows(*cuts: tuple[int, ...]) -> dict[str, Tensor]:
    rows = [packed_batch(37, one, seed) for seed, one in enumerate(cuts)]
    return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}


def test_rows_of_different_documents_in_chunks_and_layers_that_are_computed_again() -> None:
    """The queries that Llama 4 scales by their place are scaled alike when a layer is computed again."""
    batch = several_packed_rows((5, 20), (9,))

    def run(axis: weft.Axis) -> Result:
        cp, model = ContextParallel(axis), make_model("llama4").train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        cp.enable(model)
        return shared(cp, model, batch, own_loss=False)

    found = sum_of(virtual_world(3).run(run).results)
    assert distance(found, wanted_of("llama4", batch)) < 2e-6
    even = wanted_of("llama4", batch, attn_temperature_tuning=False)
    assert distance(even, wanted_of("llama4", batch)) > 1e-2


def test_chunks_of_documents_that_begin_later_are_refused() -> None:
    """transformers counts chunks from position 0, wherever a packed document begins."""
    batch = packed_batch()
    batch["position_ids"] = batch["position_ids"] + 3
    with pytest.raises(NotImplementedError, match="packed documents begin at other positions than 0"):
        on_ranks(1, "llama4", batch)
    assert distance(on_ranks(2, "phi3", batch), wanted_of("phi3", batch)) < 1e-12


def test_a_layer_that_scales_its_queries_in_another_way_is_found_out() -> None:
    cp, model = ContextParallel(), make_model("llama4")
    cp.enable(model)
    attention = model.model.layers[1].self_attn
    inner = attention.forward
    attention.forward = lambda *args, past_key_values, **keywords: inner(*args, **keywords)
    with pytest.raises(NotImplementedError, match="scales its queries by their place"):
        model(**cp.shard(plain_batch()))


@pytest.mark.parametrize("second", [(5, 20), (9,)])
def test_sinks_of_several_rows_of_packed_documents(second: tuple[int, ...]) -> None:
    """Rows with the same documents are attended side by side, as heads, which share the sinks."""
    batch = several_packed_rows((5, 20), second)
    assert distance(on_ranks(3, "gpt_oss", batch), wanted_of("gpt_oss", batch)) < 1e-12


def test_sinks_take_part_in_one_process_too() -> None:
    """Their gradient is not nothing, and a model whose sinks are far below all scores is another."""
    wanted = wanted_of("gpt_oss", plain_batch())
    sinks = [grad for name, grad in wanted.grads.items() if name.endswith("sinks")]
    assert len(sinks) == 2 and all(grad.abs().max() > 1e-4 for grad in sinks)


def test_sinks_under_autocast() -> None:
    """Queries are bf16 there, and sinks, as parameters, fp32."""

    def make() -> Any:
        model = make_model("gpt_oss", torch.float32)
        model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
        return model

    def run(axis: weft.Axis) -> Result:
        cp, model = ContextParallel(axis), make()
        cp.enable(model)
        return shared(cp, model, plain_batch())

    exact = alone(make_model("gpt_oss", torch.float32), plain_batch())
    rounded = alone(make(), plain_batch())
    assert distance(sum_of(virtual_world(2).run(run).results), exact) < 2 * distance(rounded, exact) < 0.5


def test_sinks_and_caps_that_a_model_keeps_to_itself_are_found_out() -> None:
    """Functions of a model's own would read them from the module; through the interface they would be lost."""
    for name, words in (("llama", "LlamaAttention of LlamaForCausalLM has sinks"),
                        ("gemma3", "has attn_logit_softcapping")):  # fmt: skip
        cp, model = ContextParallel(), make_model(name)
        if name == "llama":
            model.model.layers[0].self_attn.sinks = torch.nn.Parameter(torch.zeros(4))
        else:
            model.config.attn_logit_softcapping = 5.0
        cp.enable(model)
        with pytest.raises(NotImplementedError, match=words):
            model(**cp.shard(plain_batch()))


def test_values_are_sent_in_their_own_size() -> None:
    """DeepSeek's keys have 16 numbers, its values 12: no padding crosses ranks."""

    def run(axis: weft.Axis) -> int:
        cp, model = ContextParallel(axis, layout="contiguous", method="gather"), make_model("deepseek_v3")
        cp.enable(model)
        with weft.record() as ledger, torch.no_grad():
            model(**cp.shard(plain_batch(1, 20)))
        sent = [event.sends for event in ledger.events if event.operation.startswith("attention")]
        return sum(size for sends in sent for _, size in sends)

    first, second = virtual_world(2).run(run).results
    heads, layers = 4, 2
    assert (first, second) == (10 * heads * (16 + 12) * 8 * layers, 0)


def test_the_router_loss_of_a_batch_with_fewer_tokens_than_ranks() -> None:
    """The tokens that are added so that every rank has one are nobody's choice."""
    batch = plain_batch(2, 3)
    assert distance(on_ranks(5, "mixtral", batch), wanted_of("mixtral", batch)) < 2e-6


def test_the_router_loss_by_itself_and_for_other_models_of_the_process() -> None:
    """``aux_loss`` is a share, in fp64 where the model is; a model that is not enabled has what it had."""
    batch = padded_batch()
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    before = make_model("mixtral")(**inputs).aux_loss

    def run(axis: weft.Axis) -> tuple[Tensor, float]:
        cp, model, other = ContextParallel(axis), make_model("mixtral"), make_model("mixtral")
        cp.enable(model)
        part = cp.shard(inputs)
        with weft.record() as ledger:
            share = model(**part, output_router_logits=True).aux_loss
        assert torch.equal(other(**inputs).aux_loss, before)
        with cp.paused():
            assert torch.equal(model(**inputs).aux_loss, before)
        return share, sum(event.operation == "ContextParallel.router_loss" for event in ledger.events)

    found = virtual_world(3).run(run).results
    assert sum(share for share, _ in found).item() == pytest.approx(before.item(), rel=1e-6)
    assert [count for _, count in found] == [1] * 3


def test_ranks_that_differ_in_wanting_a_router_loss_are_told() -> None:
    def run(axis: weft.Axis) -> str:
        cp, model = ContextParallel(axis), make_model("mixtral")
        cp.enable(model)
        shared(cp, model, plain_batch())
        model.config.output_router_logits = axis.rank != 1
        try:
            shared(cp, model, plain_batch())
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    found = virtual_world(2).run(run).results
    assert len(set(found)) == 1 and "DisagreementError" in found[0] and "router_loss" in found[0]
