"""Tiny random hybrid models of transformers, and what one process makes of them with each document by itself."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from tiny import HEADS, SIZES, Result, loss_in_full
from torch import Tensor, nn

MIXED = {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_hidden_layers": 3}
CONVS = {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3}
DELTA = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 6, "linear_value_head_dim": 8,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}  # fmt: skip
STATES = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_chunk_size": 16}

# By ``model_type``: (config class, what differs from SIZES).
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("Qwen3NextConfig", {**MIXED, **DELTA, **EXPERTS, **HEADS}),
    "lfm2": ("Lfm2Config", {**CONVS, "block_auto_adjust_ff_dim": False}),
    "lfm2_moe": ("Lfm2MoeConfig", {**CONVS, **EXPERTS, "num_dense_layers": 1}),
    "lfm3": ("Lfm3Config", {**CONVS, **HEADS}),
    "minimax": ("MiniMaxConfig", {**MIXED, **EXPERTS, **HEADS, "block_size": 8}),
    "kimi_linear": ("KimiLinearConfig", {**MIXED, **LATENT, **EXPERTS, "linear_num_heads": 2, "linear_head_dim": 8}),
    "olmo_hybrid": ("OlmoHybridConfig", {**MIXED, **DELTA, "linear_num_key_heads": 4, "linear_allow_neg_eigval": True}),
    "qwen3_5_text": ("Qwen3_5TextConfig", {**MIXED, **DELTA, **HEADS}),
    "qwen3_5_moe_text": ("Qwen3_5MoeTextConfig", {**MIXED, **DELTA, **EXPERTS, **HEADS}),
    "bailing_hybrid": (
        "BailingHybridConfig",
        {**MIXED, **LATENT, **EXPERTS, "n_group": 2, "topk_group": 1, "head_dim": 8},
    ),
    "bamba": ("BambaConfig", {**STATES, "num_hidden_layers": 3, "attn_layer_indices": [1]}),
    "falcon_h1": (
        "FalconH1Config",
        {**STATES, **HEADS, "mamba_d_ssm": 64, "ssm_multipliers": [1.1, 0.9, 1.2, 0.8, 1.3], "mamba_rms_norm": True},
    ),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        {**MIXED, **STATES, **EXPERTS, "shared_intermediate_size": 24},
    ),
    "mamba2": (
        "Mamba2Config",
        {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 2, "chunk_size": 16, "use_cache": True},
    ),
    "nemotron_h": (
        "NemotronHConfig",
        {
            **HEADS,
            "layers_block_type": ["linear_attention", "full_attention", "mlp", "moe", "linear_attention"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "ssm_state_size": 8,
            "n_groups": 2,
            "chunk_size": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "n_group": 1,
            "topk_group": 1,
            "moe_shared_expert_intermediate_size": 16,
            "num_hidden_layers": 5,
        },
    ),
    "zamba2": (
        "Zamba2Config",
        {
            "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
            "num_hidden_layers": 4,
            "num_key_value_heads": 4,
            "mamba_d_state": 8,
            "n_mamba_heads": 4,
            "mamba_headdim": 16,
            "mamba_ngroups": 2,
            "chunk_size": 16,
            "num_mem_blocks": 1,
            "use_mem_rope": True,
            "adapter_rank": 4,
        },
    ),
}


def make_hybrid(name: str, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """The same weights whenever it is called, with slow decays: fast ones would hide a state that was lost."""
    import transformers

    kind, differs = HYBRIDS[name]
    config = getattr(transformers, kind)(**{**SIZES, **differs, **changes})
    torch.manual_seed(0)
    attention = {} if name == "mamba2" else {"attn_implementation": "sdpa"}
    with without("fla"):
        model = transformers.AutoModelForCausalLM.from_config(config, **attention)
    model.set_experts_implementation("eager")
    with torch.no_grad():
        for path, weight in model.named_parameters():
            if path.endswith("A_log"):
                weight.copy_(torch.linspace(-4, -1, weight.numel()).view_as(weight))
            elif weight.ndim > 1:
                nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
    return model.to(dtype)


@contextmanager
def without(package: str) -> Iterator[None]:
    """As if it were not installed: transformers looks when a model is first made, and importing fla takes seconds."""
    found = sys.modules.get(package)
    sys.modules[package] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[package]
        if found is not None:
            sys.modules[package] = found


@contextmanager
def torch_functions(model: Any) -> Iterator[None]:
    """transformers' own functions in torch, whatever packages are installed: fla's do not run on a CPU."""
    modules = {sys.modules[type(module).__module__] for module in model.modules()}
    found = [
        (module, name, value) for module in modules if ".models." in module.__name__
        for name, value in vars(module).items() if inspect.isfunction(value) and hasattr(value, "__wrapped__")
    ]  # fmt: skip
    for module, name, value in found:
        setattr(module, name, inspect.unwrap(value))
    try:
        yield
    finally:
        for module, name, value in found:
            setattr(module, name, value)


def documents_of(batch: dict[str, Tensor]) -> Iterator[tuple[int, slice]]:
    """(row, tokens) of each document, without padding."""
    for row, ids in enumerate(batch["input_ids"]):
        positions = batch.get("position_ids", torch.arange(len(ids)).expand_as(batch["input_ids"]))[row]
        end = int(batch["attention_mask"][row].sum()) if "attention_mask" in batch else len(ids)
        begins = [t for t in range(1, end) if positions[t] != positions[t - 1] + 1]
        for a, b in pairwise([0, *begins, end]):
            yield row, slice(a, b)


def each_alone(model: Any, batch: dict[str, Tensor]) -> Result:
    """One process, one document after the other: what no document can leak into."""
    targets = batch["labels"][:, 1:]
    items = (targets != -100).sum()
    total = torch.zeros((), dtype=model.dtype)
    with torch_functions(model):
        for row, tokens in documents_of(batch):
            logits = model(batch["input_ids"][row : row + 1, tokens], use_cache=False).logits
            within = slice(tokens.start, min(tokens.stop, targets.shape[1]))  # the first of the next is predicted too
            total = total + loss_in_full(logits[:, : within.stop - within.start], targets[row : row + 1, within], items)
        return Result.of(model, total)
