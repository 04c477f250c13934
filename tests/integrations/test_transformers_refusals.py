"""What goes wrong in silence elsewhere is refused here: by name, with the way out, on every rank alike."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import SIZES, VOCABULARY, alone, distance, make_model, packed_batch, plain_batch, shared, sum_of
from torch import nn
from worlds import virtual_world

import weft
from weft.integrations.transformers import ContextParallel
from weft.integrations.transformers.attention import make_mask
from weft.integrations.transformers.batch import shard_batch

transformers = pytest.importorskip("transformers", reason="the extra weft-torch[transformers] is not installed")
masking_utils = pytest.importorskip("transformers.masking_utils")
RANKS = 3
FIVE = int(transformers.__version__.split(".")[0]) >= 5


def raised(program: Callable[[ContextParallel], object], size: int = RANKS) -> list[tuple[str, str]]:
    """What each rank raised, as (type, text without the number of a rank)."""

    def run(axis: weft.Axis) -> tuple[str, str]:
        try:
            program(ContextParallel(axis))
        except Exception as error:
            return type(error).__name__, str(error)
        return "nothing", ""

    return virtual_world(size).run(run).results


def assert_refused(program: Callable[[ContextParallel], object], words: str, kind: str = "NotImplementedError") -> None:
    for name, text in raised(program):
        assert name == kind and words in text, (name, text)


def small(kind: str, **changes: Any) -> Any:
    config = getattr(transformers, kind)(**{**SIZES, **changes})
    return transformers.AutoModelForCausalLM.from_config(config)


DOGE = {"is_moe": True, "num_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}

# What the model is, and what the error must say.
WRONG_MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "another router loss": (lambda: small("DogeConfig", **DOGE), "auxiliary loss of its router in a form"),
    "bloom": (lambda: small("BloomConfig", n_layer=1, n_head=4), "(ALiBi)"),
    "mpt": (lambda: small("MptConfig", d_model=16, n_heads=2, n_layers=1), "(ALiBi)"),
    "falcon": (lambda: small("FalconConfig", alibi=True), "(ALiBi)"),
    "dropout": (lambda: small("LlamaConfig", attention_dropout=0.1), "attention dropout 0.1"),
    "gpt2 dropout": (lambda: make_model("gpt2", attn_pdrop=0.1), "attention dropout 0.1"),
    "state space": (lambda: small("MambaConfig"), "selective scans of Mamba-1"),
    "a classifier": (
        lambda: transformers.AutoModelForSequenceClassification.from_config(transformers.LlamaConfig(**SIZES)),
        "ForSequenceClassification",
    ),
    "an encoder": (
        lambda: transformers.T5Model(transformers.T5Config(d_model=8, num_layers=1, d_kv=4, d_ff=8)), "an encoder and",
    ),
    "sight both ways": (lambda: make_model("llama", is_causal=False), "only causal models"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG_MODELS)
def test_a_model_that_would_be_wrong_is_refused_by_name(case: str) -> None:
    make, words = WRONG_MODELS[case]
    model = make()
    before = model.config._attn_implementation
    assert_refused(lambda cp: cp.enable(model), words)
    assert type(model).__name__ in raised(lambda cp: cp.enable(model))[0][1]
    assert model.config._attn_implementation == before and not model._forward_pre_hooks


def test_a_wrong_model_on_one_rank_is_refused_on_all_with_the_same_words() -> None:
    def enable(cp: ContextParallel) -> None:
        cp.enable(small("LlamaConfig", attention_dropout=0.1 if cp.axis.rank == 1 else 0.0))

    found = raised(enable)
    assert len(set(found)) == 1 and "attention dropout 0.1" in found[0][1] and "(rank 1)" in found[0][1]


def test_ranks_that_loaded_different_models_are_refused() -> None:
    def enable(cp: ContextParallel) -> None:
        cp.enable(make_model("llama"))  # a first call is compared in any case
        cp.enable(make_model("llama", num_hidden_layers=1 + cp.axis.rank % 2))

    found = raised(enable)
    assert len(set(found)) == 1 and found[0][0] == "DisagreementError" and "num_hidden_layers=2" in found[0][1]
    assert "the ranks disagree at call 2" in found[0][1]


def test_only_models_of_transformers_and_only_once() -> None:
    assert_refused(lambda cp: cp.enable(nn.Linear(2, 2)), "must be a transformers PreTrainedModel", "TypeError")

    def twice(cp: ContextParallel) -> None:
        model = make_model("llama")
        cp.enable(model)
        cp.enable(model)

    assert_refused(twice, "is enabled already, as 'weft'", "ValueError")
    assert_refused(lambda cp: cp.disable(make_model("llama")), "is not enabled here", "ValueError")


@pytest.mark.parametrize("name", ["my_flash", "sdpa2", "flex", "", "eager"])
def test_names_that_mean_something_to_transformers(name: str) -> None:
    with pytest.raises(ValueError, match="would mean another attention"):
        ContextParallel(name=name)


def test_a_name_that_is_taken_and_wrong_options() -> None:
    transformers.AttentionInterface.register("taken", lambda: None)
    with pytest.raises(ValueError, match="knows another attention as 'taken'"):
        ContextParallel(name="taken").enable(make_model("llama"))
    with pytest.raises(ValueError, match="layout 'stripes' is not one of"):
        ContextParallel(layout="stripes")
    for method in ("best", ("ulysses", "gather"), ["ring"]):
        with pytest.raises(ValueError, match=f"method {re.escape(repr(method))} is not one of"):
            ContextParallel(method=method)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="name must be a string, got int"):
        ContextParallel(name=3)  # type: ignore[arg-type]


def called(change: Callable[[dict[str, Any]], dict[str, Any]], name: str = "llama", **changes: Any) -> Any:
    """A program that enables a model and calls it with a part of a batch that was changed."""

    def program(cp: ContextParallel) -> None:
        model = make_model(name, **changes)
        cp.enable(model)
        model(**change(cp.shard(plain_batch())))

    return program


def without(*names: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda part: {name: value for name, value in part.items() if name not in names}


WRONG_PARTS: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str, str]] = {
    "not cut": (lambda part: plain_batch(), "a batch that is not cut", "ValueError"),
    "ids of the whole": (lambda part: {**part, **plain_batch()}, "where cp.shard gave", "ValueError"),
    "no positions": (without("position_ids"), "position_ids are missing", "ValueError"),
    "a mean of each rank": (without("num_items_in_batch"), "not the mean of all", "ValueError"),
    "labels to be shifted again": (without("shift_labels"), "only one came to the model", "ValueError"),
    "label smoothing": (without("labels"), "label_smoothing_factor at 0", "ValueError"),
    "a mask": (lambda part: {**part, "attention_mask": torch.ones(1, 1)}, "attention_mask", "NotImplementedError"),
    "a cache": (lambda part: {**part, "use_cache": True}, "with cp.paused()", "NotImplementedError"),
    "weights": (lambda part: {**part, "output_attentions": True}, "output_attentions", "NotImplementedError"),
    "router": (lambda part: {**part, "output_router_logits": True}, "output_router_logits", "NotImplementedError"),
    "softcap": (lambda part: {**part, "softcap": 30.0}, "given softcap and has no attn_logit", "NotImplementedError"),
    "sinks": (lambda part: {**part, "s_aux": torch.ones(4)}, "was given s_aux and has no sinks", "NotImplementedError"),
    "a bias": (lambda part: {**part, "position_bias": torch.ones(1)}, "bias on the scores", "NotImplementedError"),
    "not known": (lambda part: {**part, "temperature": 0.5}, "not known here (temperature)", "NotImplementedError"),
    "not causal": (lambda part: {**part, "is_causal": False}, "not causal", "NotImplementedError"),
    "some logits": (lambda part: {**part, "logits_to_keep": 1}, "logits_to_keep", "NotImplementedError"),
    "no count": (lambda part: {**part, "num_items_in_batch": "many"}, "must be a number, got 'many'", "TypeError"),
    "ids of another kind": (lambda part: {**part, "input_ids": [[1, 2]]}, "the arguments cannot be read", "TypeError"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG_PARTS)
def test_a_forward_that_would_be_wrong_is_refused(case: str) -> None:
    change, words, kind = WRONG_PARTS[case]
    assert_refused(called(change), words, kind)


def test_a_fault_of_one_rank_is_raised_on_all() -> None:
    def program(cp: ContextParallel) -> None:
        model = make_model("llama")
        cp.enable(model)
        part = cp.shard(plain_batch())
        model(**part)
        model(**(without("position_ids")(part) if cp.axis.rank == 2 else part))

    found = raised(program)
    assert len(set(found)) == 1 and "position_ids are missing" in found[0][1] and "(rank 2)" in found[0][1]


def test_generate_while_enabled_says_pause_on_the_rank_that_generates() -> None:
    def program(cp: ContextParallel) -> None:
        model = make_model("llama")
        cp.enable(model)
        if cp.axis.rank == 1:
            model.generate(plain_batch(1, 5)["input_ids"], max_new_tokens=3)

    found = raised(program)
    assert [kind for kind, _ in found] == ["nothing", "NotImplementedError", "nothing"]
    assert "with cp.paused(): model.generate(...)" in found[1][1]


@pytest.mark.parametrize("how", ["ids", "labels", "length", "positions"])
def test_ranks_of_one_group_with_different_samples_are_named(how: str) -> None:
    """As a sampler that goes by rank deals them out."""

    def program(cp: ContextParallel) -> None:
        model = make_model("llama")
        cp.enable(model)
        batch = packed_batch()
        if cp.axis.rank == 1:
            flipped = {"labels" if how == "labels" else "input_ids": batch["input_ids"].flip(1)}
            moved = {**batch, "position_ids": packed_batch(cuts=(5, 7, 29))["position_ids"]}
            batch = {"length": packed_batch(36, (7,)), "positions": moved}.get(how, {**batch, **flipped})
        model(**cp.shard(batch))

    found = raised(program)
    assert len(set(found)) == 1 and found[0][0] == "ValueError"
    words = found[0][1]
    assert "hold different samples: ranks 0, 2 1 x 37 tokens" in words and "rank 1 1 x" in words
    assert "cp.sampler(dataset, data=mesh['dp'])" in words


def test_counts_of_targets_that_differ_are_refused() -> None:
    """As from Trainer with average_tokens_across_devices=False."""

    def program(cp: ContextParallel) -> None:
        model = make_model("llama")
        cp.enable(model)
        batch = plain_batch()
        batch["labels"][:, :5] = -100
        part = cp.shard(batch)
        model(**{**part, "num_items_in_batch": (part["labels"] != -100).sum()})

    assert_refused(program, "num_items_in_batch is [", "ValueError")
    assert_refused(program, "average_tokens_across_devices", "ValueError")


def test_a_rank_whose_labels_are_all_ignored_has_no_part_in_the_loss() -> None:
    batch = plain_batch()
    batch["labels"][:, :-5] = -100

    def run(axis: weft.Axis) -> Any:
        cp = ContextParallel(axis, layout="contiguous")
        model = make_model("llama")
        cp.enable(model)
        return shared(cp, model, batch)

    found = virtual_world(4).run(run).results
    assert found[0].loss == 0.0
    assert distance(sum_of(found), alone(make_model("llama"), batch)) < 2e-6


def test_a_batch_without_any_target_has_no_loss() -> None:
    batch = plain_batch()
    batch["labels"][:] = -100
    cp, model = ContextParallel(), make_model("llama")
    cp.enable(model)
    assert model(**cp.shard(batch)).loss.item() == 0.0


class OwnLoss(transformers.LlamaForCausalLM):
    """As the models that shift labels themselves."""

    def forward(self, input_ids: Any, position_ids: Any = None, labels: Any = None, **others: Any) -> Any:
        out = super().forward(
            input_ids, position_ids=position_ids, **without("shift_labels", "num_items_in_batch")(others)
        )
        if labels is not None:
            flat = out.logits[:, :-1].flatten(0, 1)
            out.loss = nn.functional.cross_entropy(flat, labels[:, 1:].flatten())
        return out


class OwnMask(transformers.LlamaForCausalLM):
    """As the models that do not ask transformers for their mask."""

    def forward(self, input_ids: Any = None, position_ids: Any = None, labels: Any = None, **inputs: Any) -> Any:
        inputs["attention_mask"] = torch.zeros(1, 1, input_ids.shape[1], input_ids.shape[1])
        return super().forward(input_ids, position_ids=position_ids, labels=labels, **inputs)


class OtherMask(transformers.LlamaForCausalLM):
    """As the models that lay something over the causal mask."""

    def forward(self, input_ids: Any = None, position_ids: Any = None, labels: Any = None, **inputs: Any) -> Any:
        from transformers.masking_utils import create_causal_mask

        embeds = self.model.embed_tokens(input_ids)
        words = {"inputs_embeds": embeds} if FIVE else {"input_embeds": embeds, "cache_position": position_ids[0]}
        create_causal_mask(
            self.config, attention_mask=None, past_key_values=None, or_mask_function=lambda b, h, q, k: q >= 0, **words
        )


def asks_for(**asked: Any) -> type[Any]:
    """As the models that ask for a mask in words of their own."""

    class Asks(transformers.LlamaForCausalLM):
        def forward(self, input_ids: Any = None, position_ids: Any = None, labels: Any = None, **inputs: Any) -> Any:
            make_mask(**asked)

    return Asks


PADDED = {"mask_function": masking_utils.causal_mask_function, "attention_mask": torch.tensor([[True, False]])}
WINDOW_OF_5 = masking_utils.sliding_window_causal_mask_function(5)
WINDOWS_OF_5_AND_4 = masking_utils.and_masks(masking_utils.sliding_window_overlay(4), WINDOW_OF_5)


class SkipsLayers(transformers.LlamaForCausalLM):
    """As the models some of whose layers look at their tokens in another way."""

    def forward(self, input_ids: Any = None, position_ids: Any = None, labels: Any = None, **inputs: Any) -> Any:
        layers, self.model.layers = self.model.layers, self.model.layers[:1]
        self.model.config.num_hidden_layers = 1
        try:
            return super().forward(input_ids, position_ids=position_ids, labels=labels, **inputs)
        finally:
            self.model.layers = layers


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (OwnLoss, "computes its loss without shift_labels"),
        (OwnMask, "was given a mask of its own"),
        (OtherMask, "asks for a mask with or_masks"),
        (SkipsLayers, "only 1 of 2 layers"),
        (asks_for(**PADDED), "hides some tokens as padding"),
        (asks_for(mask_function=WINDOW_OF_5), "with windows or chunks of [5] tokens and says None"),
        (asks_for(mask_function=WINDOW_OF_5, local_size=4), "with windows or chunks of [5] tokens and says 4"),
        (asks_for(mask_function=WINDOWS_OF_5_AND_4, local_size=5), "chunks of [4, 5] tokens and says 5"),
        (asks_for(mask_function=masking_utils.sliding_window_overlay(5), local_size=5), "shows later tokens"),
    ],
)
def test_models_that_go_their_own_way_are_found_out(kind: Any, words: str) -> None:
    def program(cp: ContextParallel) -> None:
        torch.manual_seed(0)
        model = kind(transformers.LlamaConfig(**SIZES))
        cp.enable(model)
        model(**cp.shard(plain_batch()))

    assert_refused(program, words)


def test_a_part_of_an_enabled_model_cannot_be_called_alone() -> None:
    def program(cp: ContextParallel) -> None:
        model = make_model("llama")
        cp.enable(model)
        model(**cp.shard(plain_batch()))
        model.model(plain_batch()["input_ids"])

    assert_refused(program, "call the model that was enabled", "ValueError")


def test_an_error_inside_a_forward_leaves_the_model_usable() -> None:
    def run(axis: weft.Axis) -> Any:
        cp, model = ContextParallel(axis), make_model("llama")
        cp.enable(model)
        with pytest.raises(NotImplementedError, match="a bias on the scores"):
            model(**cp.shard(plain_batch()), position_bias=torch.ones(1))
        return shared(cp, model, plain_batch(), own_loss=False)

    wanted = alone(make_model("llama"), plain_batch(), own_loss=False)
    assert distance(sum_of(virtual_world(2).run(run).results), wanted) < 1e-12


def test_use_cache_is_off_where_the_config_has_it_on() -> None:
    """With it transformers skips the mask of packed documents, and a rank would keep its own keys only."""

    def run(axis: weft.Axis) -> bool:
        cp, model = ContextParallel(axis), make_model("llama")
        assert model.config.use_cache
        cp.enable(model)
        return model(**cp.shard(packed_batch())).past_key_values is None

    assert virtual_world(2).run(run).results == [True, True]


def test_a_part_for_other_ranks_or_another_layout() -> None:
    def program(cp: ContextParallel) -> None:
        model = make_model("llama")
        cp.enable(model)
        model(**ContextParallel(cp.axis, layout="contiguous").shard(plain_batch()))

    assert_refused(program, "the batch was cut contiguous for 3 ranks, but the model is enabled zigzag", "ValueError")


def test_a_part_of_another_rank() -> None:
    """As from a loader that reads on one rank and hands out its parts: all ranks would compute the same tokens."""

    def call(cp: ContextParallel) -> None:
        model = make_model("llama")
        cp.enable(model)
        model(**shard_batch(plain_batch(length=36), cp.layout, 1, cp.size))

    assert_refused(call, "this is the part of rank 1 (rank ", "ValueError")
    assert_refused(
        lambda cp: cp.sequence(shard_batch(plain_batch(length=36), cp.layout, (cp.axis.rank + 1) % cp.size, cp.size)),
        "this is the part of rank",
        "ValueError",
    )


def test_arguments_without_names_are_refused() -> None:
    """A mask among them would not be looked at, and lost."""

    def call(cp: ContextParallel) -> None:
        model = make_model("llama")
        cp.enable(model)
        part = cp.shard(plain_batch())
        ids = part.pop("input_ids")
        model(ids, **part)
        model(ids, ids > 9, **part)

    assert_refused(call, "was called with 2 arguments without names", "ValueError")


def left_padded() -> dict[str, Any]:
    return {**plain_batch(1, 6), "attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1]])}


IDS = plain_batch(1, 6)["input_ids"]
WRONG_BATCHES: dict[str, tuple[Callable[[], dict[str, Any]], str, str]] = {
    "left padding": (left_padded, "pad on the right", "NotImplementedError"),
    "a hole": (lambda: {**left_padded(), "attention_mask": torch.tensor([[1, 1, 0, 1, 1, 1]])}, "pad on the right",
               "NotImplementedError"),
    "segments": (lambda: {**left_padded(), "attention_mask": torch.tensor([[1, 1, 2, 2, 3, 3]])},
                 "other than 0 and 1", "NotImplementedError"),
    "4-D": (lambda: {**left_padded(), "attention_mask": torch.ones(1, 1, 6, 6)}, "other masks are not supported",
            "NotImplementedError"),
    "labels on padding": (lambda: {**plain_batch(1, 6), "attention_mask": torch.tensor([[1, 1, 1, 1, 0, 0]])},
                          "labels where attention_mask is 0", "ValueError"),
    "packed with a mask": (lambda: {**packed_batch(6, (2,)), "attention_mask": torch.ones(1, 6).long()},
                           "leave attention_mask out", "ValueError"),
    "bounds that differ": (lambda: {**packed_batch(6, (2,)), "cu_seq_lens_q": torch.tensor([0, 3, 6])},
                           "both must tell the same documents", "ValueError"),
    "bounds of rows": (lambda: {**plain_batch(2, 6), "cu_seq_lens_q": torch.tensor([0, 6])}, "come with one row",
                       "ValueError"),
    "images": (lambda: {"input_ids": IDS, "pixel_values": torch.ones(1, 3, 8, 8)}, "has pixel_values",
               "NotImplementedError"),
    "no ids": (lambda: {"labels": IDS}, "no input_ids", "ValueError"),
    "wrong ids": (lambda: {"input_ids": IDS.float()}, "must be integers [B, S], got torch.float32", "TypeError"),
    "labels cut before": (lambda: {"input_ids": IDS, "labels": IDS[:, 1:]}, "before anything is cut", "ValueError"),
    "positions of three axes": (lambda: {"input_ids": IDS, "position_ids": torch.ones(3, 1, 6)},
                                "position_ids must be integers [B, S]", "ValueError"),
    "positions between tokens": (lambda: {"input_ids": IDS, "position_ids": torch.ones(1, 6)}, "got torch.float32",
                                 "ValueError"),
    "cut twice": (lambda: ContextParallel().shard(plain_batch()), "sharded already", "ValueError"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG_BATCHES)
def test_a_batch_that_would_be_read_wrongly_is_refused_whole(case: str) -> None:
    make, words, kind = WRONG_BATCHES[case]
    assert_refused(lambda cp: cp.shard(make()), words, kind)


def test_the_digest_depends_on_every_token_and_its_place() -> None:
    cp = ContextParallel()
    seen = {cp.shard({"input_ids": IDS})["weft"].digest}
    for place in range(6):
        for token in (0, 1, VOCABULARY):
            changed = IDS.clone()
            changed[0, place] = token
            seen.add(cp.shard({"input_ids": changed})["weft"].digest)
    seen.add(cp.shard({"input_ids": IDS.flip(1)})["weft"].digest)
    seen.add(cp.shard({"input_ids": IDS, "attention_mask": torch.arange(6)[None] < 4})["weft"].digest)
    assert len(seen) == 21


def test_one_rank_without_transformers_is_told_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(rank: int) -> Exception | None:
        return ImportError("nothing here (rank 1)") if rank == 1 else None

    monkeypatch.setattr("weft.integrations.transformers.context_parallel._find_version_fault", find)
    assert [text for _, text in raised(lambda cp: cp.enable(make_model("llama")))] == ["nothing here (rank 1)"] * RANKS


def test_a_model_with_the_config_of_an_enabled_one_is_told_why() -> None:
    config = transformers.LlamaConfig(**SIZES)
    cp, model, other = ContextParallel(), *(transformers.LlamaForCausalLM(config) for _ in range(2))
    cp.enable(model)
    with pytest.raises(ValueError, match="give every model a config of its own"):
        other(**plain_batch())


def test_without_transformers_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"pip install 'weft-torch\[transformers\]'"):
        ContextParallel().enable(nn.Linear(2, 2))
    monkeypatch.undo()
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "4.56.2")
    with pytest.raises(ImportError, match=r"transformers 4\.56\.2 is not one of 4\.57 to 5"):
        ContextParallel().enable(nn.Linear(2, 2))
