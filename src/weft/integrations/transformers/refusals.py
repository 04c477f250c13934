"""Why a model cannot be context-parallel: what looks at tokens of other ranks in a way that is not known here."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from itertools import chain
from typing import Any

from torch import nn

from weft.integrations.transformers.mixers import ATTENDING, family_of, faults_of_mixers, kinds_of, mixers_of
from weft.integrations.transformers.positions import by_longest_position, rope_types, rotary_embeddings_of
from weft.integrations.transformers.router_loss import find_router_loss

LAYERS = ("full_attention", "sliding_attention", "chunked_attention")
DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "attn_dropout")


def find_model_fault(model: Any, rank: int) -> Exception | None:
    """The first reason why this model cannot be context-parallel, or None."""
    parts = (faults_of_mixers, _faults_of_biases, _faults_of_kind, _faults_of_tokens, _faults_of_scores)
    for words in chain.from_iterable(part(model) for part in parts):
        return NotImplementedError(f"ContextParallel.enable: {type(model).__name__} {words} (rank {rank})")
    return None


def _faults_of_biases(model: Any) -> Iterator[str]:
    """Scores with something added to them by distance: ALiBi, which Bloom always has, Falcon and MPT by a setting."""
    config = model.config
    settings = getattr(config, "alibi", False), getattr(getattr(config, "attn_config", None), "alibi", False)
    if config.model_type == "bloom" or any(settings):
        yield "adds a bias by distance to its attention scores (ALiBi), which weft's attention does not have"


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
    if family_of(model) is not None and not any(kind in ATTENDING for kind in kinds_of(config)):
        return  # without attention nothing in it depends on a position
    if "position_ids" not in inspect.signature(model.forward).parameters:
        yield "takes no position_ids, so a rank cannot say which tokens it holds"
    if not model._can_set_attn_implementation():  # the only thing that says so; transformers itself but warns
        yield "has attention of its own instead of transformers' AttentionInterface"


def _faults_of_tokens(model: Any) -> Iterator[str]:
    """What looks at other tokens, or counts them, outside attention."""
    family = family_of(model)
    known = LAYERS if family is None else (*LAYERS, *family.kinds, *family.others)
    for kind in kinds_of(model.config):
        if kind not in known:
            yield f"has layers of type {kind}; only {' and '.join(known)} are supported"
    mixers = tuple(f"{name}." for name in mixers_of(model))
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv1d) and not name.startswith(mixers):
            yield f"mixes neighbouring tokens outside attention, in {name}"
        if hasattr(module, "create_position_ids_from_input_ids"):
            yield f"counts positions from its padding token, in {name}"
    if by_longest_position(rope_types(model.config)) and not rotary_embeddings_of(model):
        yield "has rotary embeddings that depend on the longest position, in modules that do not say so (rope_type)"


def _faults_of_scores(model: Any) -> Iterator[str]:
    """What attention here does not compute, and a loss that needs all tokens."""
    config = model.config
    for name, module in model.named_modules():
        for dropout in DROPOUTS:
            rate = getattr(module, dropout, None)
            rate = rate.p if isinstance(rate, nn.Dropout) else rate
            if isinstance(rate, float | int) and rate:
                yield f"has attention dropout {rate}, in {name}; load it with attention_dropout=0.0 (GPT2: attn_pdrop)"
    if getattr(config, "output_router_logits", False) and find_router_loss(model) is None:
        yield (
            "adds an auxiliary loss of its router in a form that is not known; set config.output_router_logits = False"
        )
