"""What a model must not have: each would give wrong numbers in silence. Read from its config and modules."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

LAYERS = ("full_attention", "sliding_attention")
DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "attn_dropout")


def find_model_fault(model: Any, rank: int) -> Exception | None:
    """The first reason why this model cannot be context-parallel, or None."""
    for find in _FINDERS:
        for words in find(model):
            name = type(model).__name__
            return NotImplementedError(f"ContextParallel.enable: {name} {words} (rank {rank})")
    return None


def _other_kinds(model: Any) -> Iterator[str]:
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


def _token_mixing(model: Any) -> Iterator[str]:
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


def _rotary_embeddings(model: Any) -> Iterator[str]:
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


def _scores(model: Any) -> Iterator[str]:
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


def _router_loss(model: Any) -> Iterator[str]:
    if getattr(model.config, "output_router_logits", False):
        yield (
            "adds an auxiliary loss of its router, a mean over tokens that a rank does not have; set "
            "config.output_router_logits = False"
        )


_FINDERS: tuple[Callable[[Any], Iterator[str]], ...] = (
    _other_kinds, _token_mixing, _rotary_embeddings, _scores, _router_loss,
)  # fmt: skip
