"""A context-parallel model: what it must not have, what is set on it, and what is checked around each forward."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from torch import nn

from weft.comm import Axis
from weft.errors import name_ranks
from weft.integrations.transformers.attention import Forward, running
from weft.integrations.transformers.batch import KEY, WholeBatch

LAYERS = ("full_attention", "sliding_attention")
DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "attn_dropout")


def find_model_fault(model: Any, rank: int) -> Exception | None:
    """The first reason why this model cannot be context-parallel, or None."""
    for words in chain(_faults_of_kind(model), _faults_of_tokens(model), _faults_of_scores(model)):
        return NotImplementedError(f"ContextParallel.enable: {type(model).__name__} {words} (rank {rank})")
    return None


def _faults_of_kind(model: Any) -> Iterator[str]:
    """Which models are supported at all."""
    config = model.config
    if getattr(config, "is_encoder_decoder", False):
        yield "has an encoder and a decoder; only decoders are supported"
    if config.get_text_config() is not config:
        yield "has parts for images or sound; enable its text model alone"
    if getattr(config, "is_causal", True) is False:
        yield "is set to see later tokens (is_causal=False); only causal models are supported"
    kind = getattr(model, "loss_type", None)
    if kind is not None and "CausalLM" not in kind:
        yield f"has a loss of type {kind}, which looks at whole sequences; only causal language models are supported"
    if "position_ids" not in inspect.signature(model.forward).parameters:
        yield "takes no position_ids, so a rank cannot say which tokens it holds"
    if not model._can_set_attn_implementation():  # the only thing that says so; transformers itself but warns
        yield "has attention of its own instead of transformers' AttentionInterface"


def _faults_of_tokens(model: Any) -> Iterator[str]:
    """What looks at other tokens, or counts them, outside attention."""
    kinds = getattr(model.config, "layer_types", None) or getattr(model.config, "layers_block_type", None) or ()
    for kind in kinds:
        if kind not in LAYERS:
            yield f"has layers of type {kind}; only {' and '.join(LAYERS)} are supported"
    if getattr(model.config, "attention_chunk_size", None):
        yield f"attends in chunks of {model.config.attention_chunk_size}, which no window can express"
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv1d):
            yield f"mixes neighbouring tokens outside attention, in {name}"
        if hasattr(module, "create_position_ids_from_input_ids"):
            yield f"counts positions from its padding token, in {name}"
    for kind in _rope_types(model.config):
        if kind == "longrope" or "dynamic" in kind:
            yield (
                f"has rotary embeddings of type {kind!r}, which depend on the longest position a rank sees; 'yarn', "
                f"'llama3', 'linear' and 'default' do not"
            )


def _rope_types(config: Any) -> Iterator[str]:
    for name in ("rope_parameters", "rope_scaling"):
        given = getattr(config, name, None)
        if isinstance(given, dict):
            for one in (given, *(value for value in given.values() if isinstance(value, dict))):
                yield str(one.get("rope_type", one.get("type", "default")))


def _faults_of_scores(model: Any) -> Iterator[str]:
    """What attention here does not compute, and a loss that needs all tokens."""
    config = model.config
    if getattr(config, "attn_logit_softcapping", None):
        yield f"caps its attention scores (attn_logit_softcapping={config.attn_logit_softcapping})"
    for name, module in model.named_modules():
        if getattr(module, "sinks", None) is not None:
            yield f"has attention sinks, in {name}"
        for dropout in DROPOUTS:
            rate = getattr(module, dropout, None)
            rate = rate.p if isinstance(rate, nn.Dropout) else rate
            if isinstance(rate, float | int) and rate:
                yield f"has attention dropout {rate}, in {name}; load it with attention_dropout=0.0 (GPT2: attn_pdrop)"
    if getattr(config, "alibi", False):
        yield "adds a bias to its scores (alibi)"
    if getattr(config, "output_router_logits", False):
        yield (
            "adds an auxiliary loss of its router, a mean over tokens that a rank does not have; set "
            "config.output_router_logits = False"
        )


@dataclass(frozen=True)
class _Options:
    """What the ranks must have in common in a forward, beside the batch."""

    model: str
    layout: str
    training: bool
    labels: bool


class Enabled:
    """One model's hooks. A forward begins with one round of integers in which the ranks compare their batches."""

    def __init__(self, model: Any, axis: Axis, layout: str, method: str, name: str) -> None:
        self._model = weakref.ref(model)
        self.axis, self.layout, self.method, self.name = axis, layout, method, name
        self._layers = int(getattr(model.config, "num_hidden_layers", 1))
        self._has_loss = "labels" in inspect.signature(model.forward).parameters
        self._before: tuple[str, Any] | None = None
        self._hooks: list[Any] = []
        self._forward: Forward | None = None
        self.active = False

    @property
    def model(self) -> Any:
        model = self._model()
        assert model is not None, "it is kept under its model"
        return model

    def __deepcopy__(self, _: dict[int, Any]) -> Enabled:
        """A copy of a model takes its hooks along and is context-parallel on the same ranks."""
        return self

    def resume(self) -> None:
        """Set attention, loss and hooks on the model."""
        model, self.active = self.model, True
        self._before = model.config._attn_implementation, model.__dict__.get("_loss_function")
        model.set_attn_implementation(self.name)
        if self._has_loss:
            model.loss_function = _watch(model.loss_function)
        self._hooks = [
            model.register_forward_pre_hook(self._begin, with_kwargs=True),
            model.register_forward_hook(self._end, with_kwargs=True, always_call=True),
        ]

    def pause(self) -> None:
        """Take them off."""
        model, self.active = self.model, False
        assert self._before is not None
        attention, loss = self._before
        for hook in self._hooks:
            hook.remove()
        model.set_attn_implementation(attention)
        if self._has_loss:
            del model._loss_function
        if loss is not None:
            model.loss_function = loss

    def _begin(self, model: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        keywords = dict(keywords)
        whole = keywords.pop(KEY, None)
        if keywords.get("past_key_values") is not None or keywords.get("use_cache"):
            # Raised here alone: whoever generates does so on one rank, and the others wait for nothing.
            raise NotImplementedError(
                f"ContextParallel: {type(model).__name__} was called with a cache (rank {self.axis.rank}); for "
                f"generate() pause the adapter: with cp.paused(): model.generate(...)"
            )
        keywords["use_cache"] = False  # it defaults to True, and a rank's cache would hold its own tokens only
        fault = self._find_fault(model, args, keywords, whole)
        options = None
        numbers = (0, 0, 0, 0)
        if fault is None:
            options = _Options(type(model).__name__, self.layout, model.training, "labels" in keywords)
            items = keywords.get("num_items_in_batch")
            numbers = whole.digest, whole.rows, whole.length, 0 if items is None else int(items)
        gathered = self.axis.begin("ContextParallel.forward", options, metadata=numbers, fault=fault).metadata.wait()
        self._compare(gathered)
        self._forward = Forward(type(model).__name__, whole.sequences(self.axis), self.method)
        running.forwards.append(self._forward)
        return args, keywords

    def _end(self, model: Any, args: Any, keywords: Mapping[str, Any], output: Any) -> None:
        forward, self._forward = self._forward, None
        if forward is None:
            return
        running.forwards.remove(forward)
        if output is None:  # the forward has failed
            return
        if forward.calls < self._layers:
            raise NotImplementedError(
                f"ContextParallel: only {forward.calls} of {self._layers} layers of {forward.model} attended through "
                f"transformers' interface (rank {self.axis.rank}); the others saw this rank's tokens alone"
            )
        if keywords.get("labels") is not None and not forward.loss_is_right:
            raise NotImplementedError(
                f"ContextParallel: {forward.model} computes its loss without shift_labels and num_items_in_batch (rank "
                f"{self.axis.rank}); take labels out of the part and compute the loss from logits and shift_labels"
            )

    def _find_fault(self, model: Any, args: tuple[Any, ...], given: dict[str, Any], whole: Any) -> Exception | None:
        where = f"(rank {self.axis.rank})"
        if not isinstance(whole, WholeBatch):
            return ValueError(
                f"ContextParallel: {type(model).__name__} was called with a batch that is not cut {where}; call "
                f"model(**cp.shard(batch)), or pause the adapter: with cp.paused(): ..."
            )
        if (whole.layout, whole.size) != (self.layout, self.axis.size):
            return ValueError(
                f"ContextParallel: the batch was cut {whole.layout} for {whole.size} ranks, but the model is enabled "
                f"{self.layout} on {self.axis.size} {where}; use one ContextParallel for both"
            )
        shape = (whole.rows, whole.lengths[self.axis.rank])
        found = given.get("input_ids", args[0] if args else None)
        if found is None or tuple(found.shape[:2]) != shape:
            shown = "no input_ids" if found is None else f"input_ids {list(found.shape)}"
            return ValueError(
                f"ContextParallel: got {shown} where cp.shard gave {list(shape)} {where}; pass the part as it is: "
                f"model(**cp.shard(batch))"
            )
        if tuple(getattr(given.get("position_ids"), "shape", ())) != shape:
            return ValueError(
                f"ContextParallel: position_ids are missing or of another shape than {list(shape)} {where}; pass those "
                f"of cp.shard, which count in the whole sequence"
            )
        return self._find_option_fault(given, where)

    @staticmethod
    def _find_option_fault(given: dict[str, Any], where: str) -> Exception | None:
        if (given.get("labels") is None) != (given.get("shift_labels") is None):
            return ValueError(
                f"ContextParallel: of labels and shift_labels only one came to the model {where}; pass both as "
                f"cp.shard gave them, or neither. Trainer's label smoothing and compute_loss_func take labels out and "
                f"shift again: leave label_smoothing_factor at 0"
            )
        if given.get("labels") is not None and given.get("num_items_in_batch") is None:
            return ValueError(
                f"ContextParallel: labels without num_items_in_batch {where}: a mean of each rank's own tokens is not "
                f"the mean of all; pass the part as cp.shard gave it"
            )
        if given.get("is_causal") is False:
            return NotImplementedError(f"ContextParallel: attention that is not causal is not supported {where}")
        for name in ("attention_mask", "output_attentions", "output_router_logits", "logits_to_keep"):
            value = given.get(name)
            if value is not None and value is not False and not (name == "logits_to_keep" and value == 0):
                return NotImplementedError(
                    f"ContextParallel: {name} cannot be given to a context-parallel model {where}; leave it out"
                )
        return None

    def _compare(self, gathered: list[tuple[int, ...]]) -> None:
        """Every rank has received the same, so every rank raises the same."""
        batches: dict[tuple[int, ...], list[int]] = {}
        for rank, (digest, rows, length, _) in enumerate(gathered):
            batches.setdefault((digest, rows, length), []).append(rank)
        if len(batches) > 1:
            shown = "; ".join(
                f"{name_ranks(ranks)} {rows} x {length} tokens (digest {digest % 16**6:06x})"
                for (digest, rows, length), ranks in batches.items()
            )
            raise ValueError(
                f"ContextParallel: the ranks of one context group hold different samples: {shown}; every rank must get "
                f"the same batch: read data by data rank, with cp.sampler(dataset, data=mesh['dp']) or cp.loader"
            )
        items = [numbers[3] for numbers in gathered]
        if len(set(items)) > 1:
            raise ValueError(
                f"ContextParallel: num_items_in_batch is {items} on the ranks of one context group; it must be the "
                f"targets of all of them: pass what cp.shard gave, and leave Trainer's average_tokens_across_devices on"
            )


def _watch(loss_function: Any) -> Any:
    """The same loss, and a note whether it was asked for as a part of a batch needs it."""

    def watched(*args: Any, **keywords: Any) -> Any:
        if running.forwards:
            needed = (keywords.get("shift_labels"), keywords.get("num_items_in_batch"))
            running.forwards[-1].loss_is_right = all(value is not None for value in needed)
        return loss_function(*args, **keywords)

    return watched
