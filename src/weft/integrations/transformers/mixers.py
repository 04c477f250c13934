"""Hybrid models: the table of families, and what is set on their mixers.

A mixer is what a layer has in place of attention: a gated delta net, a state space, a short convolution. A family is a
row of `FAMILIES`. Around each call of a mixer two hooks tell the functions of `linear_layers` which forward they work
for, and count that they were called: a kernel that takes a mixer's place would see this rank's tokens alone.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from weft.integrations.transformers.attention import Forward, running
from weft.integrations.transformers.batch import KEY
from weft.integrations.transformers.linear_layers import (
    MixerCall,
    apply_delta_rule,
    attend_linearly,
    convolve,
    inside,
    scan_states,
    skip_fused,
)

VERSION = (5, 15)  # of transformers: since then the functions of mixers are globals of their modules
ATTENDING = ("full_attention", "sliding_attention", "hybrid")  # kinds of layers that have attention

# By name in the module of the mixer (or in its class: "Class.forward"), what takes the function's place.
Functions = Mapping[str, Callable[..., Any]]
CONV: Functions = {"causal_conv1d_fn": convolve}
GATED_DELTA: Functions = {**CONV, "torch_chunk_gated_delta_rule": apply_delta_rule}
KDA: Functions = {**CONV, "chunk_kimi_delta_attention": apply_delta_rule}
MAMBA2: Functions = {
    **CONV,
    "mamba2_chunk_scan": scan_states,
    "mamba2_split_conv1d_scan_combined": skip_fused,
}


@dataclass(frozen=True)
class Family:
    """mixer: the class of its mixers. kinds: the layers that have one. others: layers that look at no other token."""

    mixer: str
    functions: Functions
    kinds: tuple[str, ...] = ("linear_attention",)
    others: tuple[str, ...] = ()

    @property
    def counted(self) -> list[str]:
        """What every call of a mixer calls once."""
        return [name for name, function in self.functions.items() if function is not skip_fused]


# By ``config.model_type``.
FAMILIES: dict[str, Family] = {
    "bailing_hybrid": Family("BailingHybridDeltaAttention", KDA),
    "bamba": Family("BambaMixer", MAMBA2),
    "falcon_h1": Family("FalconH1Mixer", MAMBA2, ("hybrid",)),
    "granitemoehybrid": Family("GraniteMoeHybridMambaLayer", MAMBA2),
    "kimi_linear": Family("KimiLinearDeltaAttention", KDA),
    "lfm2": Family("Lfm2ShortConv", CONV, ("conv",)),
    "lfm2_moe": Family("Lfm2MoeShortConv", CONV, ("conv",)),
    "lfm3": Family("Lfm3ShortConv", CONV, ("conv",)),
    "mamba2": Family("Mamba2Mixer", MAMBA2),
    "minimax": Family("MiniMaxLightningAttention", {"MiniMaxLightningAttention.forward": attend_linearly}),
    "nemotron_h": Family("NemotronHMamba2Mixer", MAMBA2, others=("mlp", "moe")),
    "olmo_hybrid": Family("OlmoHybridGatedDeltaNet", GATED_DELTA),
    "qwen3_5_moe_text": Family("Qwen3_5MoeGatedDeltaNet", GATED_DELTA),
    "qwen3_5_text": Family("Qwen3_5GatedDeltaNet", GATED_DELTA),
    "qwen3_next": Family("Qwen3NextGatedDeltaNet", GATED_DELTA),
    "zamba2": Family("Zamba2MambaMixer", MAMBA2, ("linear_attention", "hybrid")),
}

SELECTIVE = "selective scans of Mamba-1, one state per channel"
CONVOLVED = "short convolutions within its layers, and biases by distance"
# Models that look at neighbouring tokens in ways that are not computed over ranks here.
REFUSED = {
    "falcon_mamba": SELECTIVE,
    "glm5_next_text": "attention to tokens that an indexer chose",
    "inkling2_text": CONVOLVED,
    "inkling_text": CONVOLVED,
    "jamba": SELECTIVE,
    "mamba": SELECTIVE,
    "qwen4_exp_text": "attention to tokens that an indexer chose",
    "recurrent_gemma": "gated linear recurrences (RG-LRU)",
    "rwkv": "time mixing of RWKV",
    "xlstm": "cells of xLSTM",
    "zamba": SELECTIVE,
    "zaya": "convolutions within its attention",
}


def family_of(model: Any) -> Family | None:
    """Its row of the table, None where it has no mixers that are known."""
    return FAMILIES.get(model.config.model_type)


def kinds_of(config: Any) -> tuple[str, ...]:
    """What each layer is; () where the config does not say."""
    return tuple(getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ())


def mixers_of(model: Any) -> dict[str, nn.Module]:
    """By name. A class is known by its name, also where it is a subclass."""
    family = family_of(model)
    if family is None:
        return {}
    return {
        name: module
        for name, module in model.named_modules()
        if any(base.__name__ == family.mixer for base in type(module).__mro__)
    }


def faults_of_mixers(model: Any) -> Iterator[str]:
    """Why the mixers of a family cannot be taken hold of."""
    import transformers

    if (reason := REFUSED.get(model.config.model_type)) is not None:
        yield f"has {reason}; of hybrid models only {', '.join(FAMILIES)} are supported"
    family = family_of(model)
    if family is None:
        return
    if tuple(int(part) for part in transformers.__version__.split(".")[:2]) < VERSION:
        wanted = ".".join(map(str, VERSION))
        yield f"is a hybrid model, for which transformers {wanted} is needed; this is {transformers.__version__}"
    mixers = mixers_of(model)
    expected = sum(kind in family.kinds for kind in kinds_of(model.config))
    if len(mixers) != expected:
        kinds = " or ".join(family.kinds)
        yield f"has {expected} layers of type {kinds}, but {len(mixers)} modules {family.mixer}"
    for mixer in mixers.values():
        for name in family.functions:
            owner, attribute = _place(mixer, family, name)
            if owner is None or getattr(owner, attribute, None) is None:
                yield f"has mixers {family.mixer} without {name}, which is what weft replaces"


def _place(mixer: nn.Module, family: Family, name: str) -> tuple[Any, str]:
    """Where the function ``name`` of a mixer is found: (module, name) or (class, name)."""
    written = next(base for base in type(mixer).__mro__ if base.__name__ == family.mixer)
    module = sys.modules.get(written.__module__)
    *_, attribute = name.rpartition(".")
    return (written if "." in name else module), attribute


_lock = threading.Lock()


def take_over(model: Any) -> None:
    """Replace the functions of its mixers, once for the process. Outside mixers of enabled models nothing changes."""
    family = family_of(model)
    for mixer in mixers_of(model).values():
        assert family is not None
        for name, ours in family.functions.items():
            owner, attribute = _place(mixer, family, name)
            with _lock:
                found = getattr(owner, attribute)
                if not hasattr(found, "weft_function"):
                    setattr(owner, attribute, _choosing(found, name, ours))


def _choosing(original: Callable[..., Any], name: str, ours: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **keywords: Any) -> Any:
        mixer = inside.mixer
        if mixer is None:
            return original(*args, **keywords)
        mixer.calls[name] += 1
        return ours(mixer, *args, **keywords)

    call.weft_function = ours  # type: ignore[attr-defined]
    return call


@dataclass(frozen=True)
class MixerHooks:
    """Around each call of one mixer. ``counted``: the functions it must call, once each."""

    name: str
    counted: tuple[str, ...]

    def register(self, mixer: nn.Module) -> list[Any]:
        return [
            mixer.register_forward_pre_hook(self._enter, with_kwargs=True),
            mixer.register_forward_hook(self._leave, with_kwargs=True, always_call=True),
        ]

    def _enter(self, mixer: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        forward = keywords.get(KEY)
        if not isinstance(forward, Forward):
            raise NotImplementedError(
                f"ContextParallel: {self.name} ({type(mixer).__name__}) was called without the keyword {KEY!r} that "
                f"says where the tokens lie; call the model that was enabled, whose layers must hand keywords on"
            )
        inside.mixer = MixerCall(self.name, forward)
        return args, {name: value for name, value in keywords.items() if name != KEY}

    def _leave(self, mixer: nn.Module, args: Any, keywords: Any, output: Any) -> None:
        call, inside.mixer = inside.mixer, None
        if call is None or output is None:  # it has failed, or all that had to be computed again is there
            return
        for name in self.counted:
            if call.calls[name] != 1:
                raise NotImplementedError(
                    f"ContextParallel: {self.name} ({type(mixer).__name__}) called {name} {call.calls[name]} times in "
                    f"place of once (rank {call.forward.rank}): another kernel took its place and saw this rank's "
                    f"tokens alone; load the model without it (use_kernels=False)"
                )
        call.forward.mixers.add(self.name)


def hooks_of(model: Any) -> list[Any]:
    """Hooks on every mixer, and one on the base model that hands the forward on to its layers."""
    family = family_of(model)
    if family is None:
        return []
    handles = [handle for name, mixer in mixers_of(model).items()
               for handle in MixerHooks(name, tuple(family.counted)).register(mixer)]  # fmt: skip
    return [*handles, model.base_model.register_forward_pre_hook(_hand_on, with_kwargs=True)]


def _hand_on(model: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """With the keyword it reaches layers also where they are computed again, whatever forward came in between."""
    return args, {**keywords, KEY: running.forwards[-1]} if running.forwards else keywords
