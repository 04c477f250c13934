"""Models of transformers on virtual ranks: the loss and every gradient are those of SDPA in one process."""

from __future__ import annotations

import copy
import itertools
import os
from typing import Any

import pytest
import torch
from tiny import (  # fmt: skip
    BATCHES,
    LENGTH,
    MODELS,
    VOCABULARY,
    WINDOW,
    Result,
    alone,
    distance,
    loss_in_full,
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
on_networks = pytest.mark.usefixtures("every_network")  # where messages are of another shape than in the other tests

FIVE = int(transformers.__version__.split(".")[0]) >= 5
# With 4.57 PhiMoE and OPT have attention or masks of their own, and DeepSeek-V3 does not run in fp64 at all.
only_five = pytest.mark.skipif(not FIVE, reason="transformers 4.57 has this model in another form")
NAMES = [pytest.param(name, marks=[only_five] * (name in ("phimoe", "deepseek_v3"))) for name in MODELS]

# fp64 throughout, but for the norms of Gemma3 and the router of DeepSeek-V3, which compute in fp32 whatever they get:
# there an input that differs in the last bit of fp64 comes out different in the last of fp32, 6e-8.
ROUNDING = {"gemma3": 2e-6, "deepseek_v3": 2e-6}


def on_ranks(
    size: int, name: str, batch: dict[str, Tensor], layout: str = "zigzag", *, own_loss: bool = False,
    method: str = "auto", dtype: torch.dtype = torch.float64, prepare: Any = None, **changes: Any,
) -> Result:  # fmt: skip
    """The sum over the ranks of a context group, each with a model of its own."""

    def run(axis: weft.Axis) -> Result:
        cp = ContextParallel(axis, layout=layout, method=method)
        model = make_model(name, dtype, **changes)
        if prepare is not None:
            prepare(model)
        cp.enable(model)
        return shared(cp, model, batch, own_loss)

    return sum_of(virtual_world(size).run(run).results)


@on_networks
@pytest.mark.parametrize("name", NAMES)
def test_every_combination_has_the_gradients_of_one_process(name: str) -> None:
    """Half of them here, the others for the next model; all with `make soak`."""
    choices = itertools.product(enumerate(BATCHES), enumerate(LAYOUTS), enumerate((2, 4)))
    for (i, kind), (j, layout), (k, size) in every(choices):
        rare = layout == "balanced" and kind != "packed"
        if (rare or (i + j + k + list(MODELS).index(name)) % 2) and "WEFT_SOAK" not in os.environ:
            continue
        wanted = alone(make_model(name), BATCHES[kind](), own_loss=False)
        found = on_ranks(size, name, BATCHES[kind](), layout)
        assert distance(found, wanted) < ROUNDING.get(name, 1e-12), (kind, layout, size)


@pytest.mark.parametrize("name", NAMES)
def test_the_loss_of_transformers_itself(name: str) -> None:
    """It is computed in fp32, also for fp64 models."""
    for batch in (packed_batch(), padded_batch()):
        wanted = alone(make_model(name), batch)
        assert distance(on_ranks(3, name, batch, own_loss=True), wanted) < 2e-6


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_models_in_fp32(name: str) -> None:
    wanted = alone(make_model(name, torch.float32), plain_batch())
    found = on_ranks(2, name, plain_batch(), own_loss=True, dtype=torch.float32)
    assert distance(found, wanted) < 1e-4


@on_networks
@pytest.mark.parametrize("method", ["gather", "ring", "ulysses"])
def test_every_method(method: str) -> None:
    wanted = alone(make_model("qwen3"), packed_batch(), own_loss=False)
    assert distance(on_ranks(2, "qwen3", packed_batch(), method=method), wanted) < 1e-12


@on_networks
def test_heads_that_the_ranks_do_not_divide_and_any_length() -> None:
    odd = {"hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 1}
    for length in (5, 6, 23):
        batch = plain_batch(1, length)
        wanted = alone(make_model("llama", **odd), batch, own_loss=False)
        assert distance(on_ranks(5, "llama", batch, **odd), wanted) < 1e-12, length


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fewer_tokens_than_ranks(layout: str) -> None:
    """Every rank gets one token at least, of padding where there are no others."""
    for batch in (plain_batch(2, 3), packed_batch(3, (1,))):
        wanted = alone(make_model("llama"), batch, own_loss=False)
        assert distance(on_ranks(5, "llama", batch, layout), wanted) < 1e-12


def several_packed_rows(same: bool) -> dict[str, Tensor]:
    rows = [packed_batch(LENGTH, cuts, seed) for seed, cuts in enumerate([(5, 20), (5, 20) if same else (9,)])]
    return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}


@on_networks
@pytest.mark.parametrize("same", [True, False])
def test_several_rows_of_packed_documents(same: bool) -> None:
    batch = several_packed_rows(same)
    wanted = alone(make_model("mistral"), batch, own_loss=False)
    assert distance(on_ranks(3, "mistral", batch), wanted) < 1e-12


@only_five
def test_documents_are_separate_also_in_a_model_that_forgets_them() -> None:
    """OPT asks for its mask without position_ids, so that SDPA in one process lets documents see one another."""

    def make() -> Any:
        torch.manual_seed(0)
        sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "word_embed_proj_dim": 16, "ffn_dim": 24, "dropout": 0.0}
        config = transformers.OPTConfig(num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=64, **sizes)
        return transformers.OPTForCausalLM(config).double()

    whole = packed_batch(LENGTH, (5, 29))
    model, items = make(), (whole["labels"] != -100).sum()
    total = torch.zeros((), dtype=torch.float64)
    for a, b in ((0, 5), (5, 29), (29, LENGTH)):
        logits = model(whole["input_ids"][:, a:b]).logits[:, :-1]
        total = total + loss_in_full(logits, whole["labels"][:, a + 1 : b], items)
    wanted = Result.of(model, total)

    def run(axis: weft.Axis) -> Result:
        cp, mine = ContextParallel(axis), make()
        cp.enable(mine)
        return shared(cp, mine, whole, own_loss=False)

    assert distance(sum_of(virtual_world(3).run(run).results), wanted) < 1e-12


def test_flattened_batches_of_transformers_collator() -> None:
    from transformers import DataCollatorWithFlattening

    samples = [{"input_ids": torch.randint(3, VOCABULARY, (n,)).tolist()} for n in (9, 1, 14)]
    flattened = dict(DataCollatorWithFlattening(return_flash_attn_kwargs=True)(samples))
    assert "cu_seq_lens_q" in flattened
    plain = {name: flattened[name] for name in ("input_ids", "labels", "position_ids")}
    wanted = alone(make_model("llama"), plain, own_loss=False)
    assert distance(on_ranks(3, "llama", flattened), wanted) < 1e-12


@on_networks
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_computes_attention_again(reentrant: bool) -> None:
    def prepare(model: Any) -> None:
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})

    wanted = alone(make_model("qwen3"), packed_batch(), own_loss=False)
    assert distance(on_ranks(3, "qwen3", packed_batch(), prepare=prepare), wanted) < 1e-12


def test_two_forwards_before_two_checkpointed_backwards() -> None:
    """What is computed again belongs to its own batch, not to the last one."""
    first, second = packed_batch(), packed_batch(29, (11,), seed=2)

    def run(axis: weft.Axis) -> Result:
        cp = ContextParallel(axis)
        model = make_model("llama")
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        cp.enable(model)
        losses = []
        for batch in (first, second):
            part = cp.shard(batch)
            losses.append(loss_in_full(model(**{**part, "labels": None, "shift_labels": None}).logits,
                                       part["shift_labels"], part["num_items_in_batch"]))  # fmt: skip
        return Result.of(model, losses[0] + losses[1])

    one, two = (alone(make_model("llama"), batch, own_loss=False) for batch in (first, second))
    assert distance(sum_of(virtual_world(3).run(run).results), sum_of([one, two])) < 1e-12


def test_autocast_where_rotated_keys_are_wider_than_values() -> None:
    """As far from fp32 as SDPA in one process is, and the same within bf16's rounding."""
    batch = packed_batch()

    def prepare(model: Any) -> None:
        model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)

    exact = alone(make_model("llama", torch.float32), batch)
    single = make_model("llama", torch.float32)
    prepare(single)
    wanted = alone(single, batch)
    found = on_ranks(2, "llama", batch, own_loss=True, dtype=torch.float32, prepare=prepare)
    assert distance(found, exact) < 2 * distance(wanted, exact) < 0.2


def test_removing_it_leaves_the_model_as_it_was() -> None:
    model, batch = make_model("mistral"), plain_batch()
    before = alone(model, batch)
    kept = {name: value for name, value in vars(model).items() if name != "_buffers"}
    hooks = len(model._forward_pre_hooks), len(model._forward_hooks)
    cp = ContextParallel()
    cp.enable(model)
    assert model.config._attn_implementation == "weft" and '"weft"' not in model.config.to_json_string()
    cp.disable(model)
    assert model.config._attn_implementation == "sdpa"
    assert vars(model).keys() - {"_buffers"} == kept.keys()
    assert hooks == (len(model._forward_pre_hooks), len(model._forward_hooks))
    after = alone(model, batch)
    assert after.loss == before.loss and all(torch.equal(after.grads[n], before.grads[n]) for n in before.grads)
    cp.enable(model)  # and it can be enabled again
    assert distance(shared(cp, model, batch), before) < 2e-6


def test_a_loss_function_of_the_user_is_kept() -> None:
    model = make_model("llama")
    asked: list[Tensor] = []

    def mine(logits: Tensor, labels: Tensor, vocab_size: int, shift_labels: Tensor, **_: Any) -> Tensor:
        asked.append(shift_labels)
        return logits.sum()

    model.loss_function = mine
    cp = ContextParallel()
    cp.enable(model)
    part = cp.shard(plain_batch())
    model(**part)
    assert asked[0] is part["shift_labels"]
    cp.disable(model)
    assert model.loss_function is mine


@on_networks
def test_two_groups_under_two_names() -> None:
    """Ranks 0..3 as 2 x 2: one model over the rows, another over the columns, taken in turns."""
    batch = packed_batch()
    wanted = alone(make_model("llama"), batch, own_loss=False), alone(make_model("gpt2"), batch, own_loss=False)

    def run(axis: weft.Axis) -> tuple[Result, Result]:
        row = axis.subset([axis.rank // 2 * 2, axis.rank // 2 * 2 + 1])
        column = axis.subset([axis.rank % 2, axis.rank % 2 + 2])
        over_rows = ContextParallel(row, layout="contiguous", name="weft_rows")
        over_columns = ContextParallel(column, layout="zigzag", name="weft_columns")
        llama, gpt2 = make_model("llama"), make_model("gpt2")
        over_rows.enable(llama)
        over_columns.enable(gpt2)
        assert (llama.config._attn_implementation, gpt2.config._attn_implementation) == ("weft_rows", "weft_columns")
        return shared(over_rows, llama, batch, False), shared(over_columns, gpt2, batch, False)

    found = virtual_world(4).run(run).results
    for pair in ((0, 1), (2, 3)):
        assert distance(sum_of([found[rank][0] for rank in pair]), wanted[0]) < 1e-12
    for pair in ((0, 2), (1, 3)):
        assert distance(sum_of([found[rank][1] for rank in pair]), wanted[1]) < 1e-12


def test_generate_while_paused_on_one_rank_alone() -> None:
    prompt = plain_batch(1, 9)["input_ids"]
    wanted = make_model("mistral").generate(prompt, max_new_tokens=12, do_sample=False)

    def run(axis: weft.Axis) -> tuple[Tensor | None, Result]:
        cp = ContextParallel(axis)
        model = make_model("mistral")
        cp.enable(model)
        shared(cp, model, plain_batch())
        text = None
        if axis.rank == 1:
            with cp.paused():
                text = model.generate(prompt, max_new_tokens=12, do_sample=False)
        return text, shared(cp, model, plain_batch(), own_loss=False)

    found = virtual_world(3).run(run).results
    assert torch.equal(found[1][0], wanted)
    assert distance(sum_of([one for _, one in found]), alone(make_model("mistral"), plain_batch(), False)) < 1e-12


def test_pauses_within_pauses_and_disabling_within_one() -> None:
    cp, model, other = ContextParallel(), make_model("llama"), make_model("gpt2")
    cp.enable(model)
    cp.enable(other)
    with cp.paused():
        with cp.paused():
            assert model.config._attn_implementation == "sdpa"
        assert model.config._attn_implementation == "sdpa" and not model._forward_pre_hooks
        cp.disable(other)
    assert model.config._attn_implementation == "weft" and other.config._attn_implementation == "sdpa"
    assert len(model._forward_pre_hooks) == 1 and not other._forward_pre_hooks
    with pytest.raises(KeyError), cp.paused():
        raise KeyError
    assert model.config._attn_implementation == "weft"


def test_a_copy_of_an_enabled_model_is_enabled() -> None:
    def run(axis: weft.Axis) -> Result:
        cp = ContextParallel(axis)
        model = make_model("llama")
        cp.enable(model)
        return shared(cp, copy.deepcopy(model), plain_batch(), own_loss=False)

    wanted = alone(make_model("llama"), plain_batch(), own_loss=False)
    assert distance(sum_of(virtual_world(2).run(run).results), wanted) < 1e-12


def test_a_model_without_a_head_and_other_rope_types() -> None:
    scaled = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e4}
    llama3 = {**scaled, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    for rope in (scaled, llama3):
        wanted = alone(make_model("llama", rope_parameters=rope, rope_scaling=rope), plain_batch(), own_loss=False)
        found = on_ranks(3, "llama", plain_batch(), rope_parameters=rope, rope_scaling=rope)
        assert distance(found, wanted) < 1e-12

    def run(axis: weft.Axis) -> Tensor:
        cp = ContextParallel(axis)
        model = make_model("llama").model
        cp.enable(model)
        part = cp.shard({"input_ids": plain_batch()["input_ids"]})
        hidden = model(**part).last_hidden_state
        return weft.unshard(hidden, 1, sequence=cp.sequence(part))

    whole = make_model("llama").model(plain_batch()["input_ids"]).last_hidden_state
    for hidden in virtual_world(3).run(run).results:
        assert (hidden - whole).abs().max() < 1e-12


class LinearModel(torch.nn.Module):
    """A model of weft's own operations, in the same loop."""

    def __init__(self) -> None:
        super().__init__()
        make = torch.Generator().manual_seed(0)
        draw = {"generator": make, "dtype": torch.float64}
        self.table = torch.nn.Parameter(torch.randn(VOCABULARY, 12, **draw))
        self.mix = torch.nn.Parameter(torch.randn(12, 36, **draw) / 4)
        self.head = torch.nn.Parameter(torch.randn(12, VOCABULARY, **draw) / 4)

    def forward(self, ids: Tensor, sequence: weft.sequence) -> Tensor:
        q, k, v = (self.table[ids] @ self.mix).unflatten(-1, (3, 2, 6)).unbind(2)
        out, _ = weft.linear_attention(q, k, v, torch.full(q.shape[:3], -0.1, dtype=q.dtype), sequence=sequence)
        return out.flatten(2) @ self.head


@on_networks
@pytest.mark.parametrize("kind", ["plain", "packed"])
def test_linear_attention_in_the_same_loop(kind: str) -> None:
    def run(axis: weft.Axis | None) -> Result:
        cp, model = ContextParallel(axis), LinearModel()
        part = cp.shard(BATCHES[kind]())
        logits = model(part["input_ids"], cp.sequence(part))
        return Result.of(model, loss_in_full(logits, part["shift_labels"], part["num_items_in_batch"]))

    wanted = virtual_world(1).run(run).results[0]
    assert distance(sum_of(virtual_world(3).run(run).results), wanted) < 1e-12


def test_what_a_part_holds() -> None:
    batch = packed_batch(9, (4,))
    part = ContextParallel(layout="contiguous").shard(batch)
    assert torch.equal(part["shift_labels"], torch.cat([batch["labels"][:, 1:], torch.tensor([[-100]])], 1))
    assert torch.equal(part["position_ids"], batch["position_ids"]) and part["num_items_in_batch"].item() == 7
    assert set(part) == {"input_ids", "position_ids", "labels", "shift_labels", "num_items_in_batch", "weft"}
    moved = {name: value.to("cpu") for name, value in part.items()}  # as loops do
    assert moved["weft"] is part["weft"]
    assert "labels" not in ContextParallel().shard({"input_ids": batch["input_ids"]})
    counted = ContextParallel().shard({**batch, "num_items_in_batch": 50})
    assert counted["num_items_in_batch"].item() == 50


def test_sharding_sends_nothing_and_a_forward_compares_once() -> None:
    """One round of integers for each forward, whatever the layers; nothing when a batch is cut."""

    def run(axis: weft.Axis) -> tuple[int, int]:
        cp = ContextParallel(axis)
        model = make_model("llama")
        cp.enable(model)
        with weft.record() as cutting:
            part = cp.shard(plain_batch())
        with weft.record() as ledger, torch.no_grad():
            model(**part)
        return len(cutting.events), sum("metadata" in event.operation for event in ledger.events)

    assert virtual_world(2).run(run).results == [(0, 1)] * 2


@only_five
def test_the_window_is_the_masks() -> None:
    """PhiMoE gives its window to the mask only; without it the loss is far off."""
    wide = alone(make_model("phimoe", sliding_window=None), plain_batch(), own_loss=False)
    narrow = alone(make_model("phimoe"), plain_batch(), own_loss=False)
    assert distance(wide, narrow) > 1e-2 and WINDOW < LENGTH
    assert distance(on_ranks(2, "phimoe", plain_batch()), narrow) < 1e-12
