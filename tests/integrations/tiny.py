"""Tiny random models of transformers, batches for them, and what one process makes of both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY = 61
LENGTH = 37
WINDOW = 7
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
HEADS = {"head_dim": 8}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW, "use_sliding_window": True}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}

# By name: (config class, what differs from SIZES).
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "mistral": ("MistralConfig", {**HEADS, "sliding_window": WINDOW}),
    "qwen3": ("Qwen3Config", {**HEADS, **MIXED, "max_window_layers": 1}),
    "gemma3": ("Gemma3TextConfig", {**HEADS, **MIXED, "query_pre_attn_scalar": 20}),
    "gpt2": (
        "GPT2Config",
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "vocab_size": VOCABULARY, "bos_token_id": 1,
         "eos_token_id": 2, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    ),
    "phimoe": (
        "PhimoeConfig",
        {**EXPERTS, "sliding_window": WINDOW, "router_jitter_noise": 0.0, "input_jitter_noise": 0.0},
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
         "v_head_dim": 12, "moe_intermediate_size": 24, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1,
         "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    ),
}  # fmt: skip

DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 20,
            "short_factor": [1.0, 1.0, 1.5, 1.0], "long_factor": [2.0, 3.0, 4.0, 5.0]}  # fmt: skip
ROUTED = {"output_router_logits": True, "router_aux_loss_coef": 1.0}

EAGER = ("gpt_oss", "gemma2")  # SDPA has no sinks and no caps

# Models with something of their own in attention, positions or loss: `test_transformers_models.py` takes them up.
OTHER_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dynamic rope": (
        "LlamaConfig", {"rope_parameters": DYNAMIC, "rope_scaling": DYNAMIC, "max_position_embeddings": 16},
    ),
    "phi3": ("Phi3Config", {"rope_parameters": LONGROPE, "rope_scaling": LONGROPE, "sliding_window": None}),
    "phimoe longrope": (
        "PhimoeConfig",
        {**MODELS["phimoe"][1],
         "rope_parameters": {**LONGROPE, "short_mscale": 1.25, "long_mscale": 1.5},
         "rope_scaling": {**LONGROPE, "short_mscale": 1.25, "long_mscale": 1.5}},
    ),
    "llama4": (
        "Llama4TextConfig",
        {**HEADS, **EXPERTS, "intermediate_size_mlp": 48, "no_rope_layers": [1, 0], "attention_chunk_size": 8,
         "floor_scale": 5, "attn_scale": 0.5, "moe_layers": [1]},
    ),
    "gpt_oss": (
        "GptOssConfig",
        {**HEADS, **EXPERTS, "layer_types": MIXED["layer_types"], "sliding_window": WINDOW,
         "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ),
    "gemma2": ("Gemma2Config", {**HEADS, **MIXED, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8}),
    "deepseek_v2": (
        "DeepseekV2Config",
        {**MODELS["deepseek_v3"][1], "topk_method": "greedy", "norm_topk_prob": True, "routed_scaling_factor": 1.0},
    ),
    "mixtral": ("MixtralConfig", {**EXPERTS, **ROUTED}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {**HEADS, **ROUTED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
}  # fmt: skip


def make_model(name: str, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """The same weights whenever it is called. It attends by SDPA, or eagerly where that has not what it needs."""
    import transformers

    kind, differs = {**MODELS, **OTHER_MODELS}[name]
    sizes = {} if name == "gpt2" else SIZES
    config = getattr(transformers, kind)(**{**sizes, **differs, **changes})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager" if name in EAGER else "sdpa"
    )
    if hasattr(model, "set_experts_implementation"):  # of 5.x; the default one has no fp64
        model.set_experts_implementation("eager")
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:  # larger than the default, so that attention is far from even
                nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
        for weight_name, weight in model.named_parameters():
            if weight_name.endswith("sinks"):
                nn.init.normal_(weight)
    return model.to(dtype)


def plain_batch(rows: int = 2, length: int = LENGTH, seed: int = 1) -> dict[str, Tensor]:
    make = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (rows, length), generator=make)
    return {"input_ids": ids, "labels": ids.clone()}


def packed_batch(length: int = LENGTH, cuts: tuple[int, ...] = (5, 6, 29), seed: int = 1) -> dict[str, Tensor]:
    """One row of documents, as DataCollatorWithFlattening makes it."""
    batch = plain_batch(1, length, seed)
    bounds = (0, *cuts, length)
    batch["position_ids"] = torch.cat([torch.arange(b - a) for a, b in pairwise(bounds)])[None]
    batch["labels"][0, list(bounds[:-1])] = -100
    return batch


def padded_batch() -> dict[str, Tensor]:
    batch = plain_batch(3)
    batch["attention_mask"] = (torch.arange(LENGTH) < torch.tensor([[LENGTH], [20], [3]])).long()
    batch["input_ids"] = batch["input_ids"] * batch["attention_mask"]
    batch["labels"][batch["attention_mask"] == 0] = -100
    return batch


BATCHES: dict[str, Callable[[], dict[str, Tensor]]] = {
    "plain": plain_batch, "packed": packed_batch, "padded": padded_batch,
}  # fmt: skip


@dataclass
class Result:
    """A loss and every gradient: of one process, or of one rank."""

    loss: float
    grads: dict[str, Tensor]

    @staticmethod
    def of(model: Any, loss: Tensor) -> Result:
        loss.backward()
        grads = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
        model.zero_grad()
        return Result(loss.item(), grads)


def sum_of(results: list[Result]) -> Result:
    """What the ranks have together."""
    names = {name for one in results for name in one.grads}
    grads = {name: sum(one.grads[name] for one in results if name in one.grads) for name in sorted(names)}
    return Result(sum(one.loss for one in results), grads)  # type: ignore[arg-type]


def distance(found: Result, wanted: Result) -> float:
    """The largest difference of the loss or a gradient, relative to the largest value of that weight's gradient."""
    assert found.grads.keys() == wanted.grads.keys()
    worst = abs(found.loss - wanted.loss) / abs(wanted.loss)
    largest = max(grad.abs().max().item() for grad in wanted.grads.values())
    for name, grad in wanted.grads.items():
        scale = max(grad.abs().max().item(), 1e-3 * largest)  # some are nearly nothing
        worst = max(worst, (found.grads[name] - grad).abs().max().item() / scale)
    return worst


def loss_in_full(logits: Tensor, targets: Tensor, items: Any) -> Tensor:
    """The causal loss in the dtype of the logits; transformers' own is in fp32."""
    flat = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
    return flat / items


def alone(model: Any, batch: dict[str, Tensor], own_loss: bool = True) -> Result:
    """One process with SDPA."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    if own_loss:
        return Result.of(model, model(**batch, use_cache=False).loss)
    targets = nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    return Result.of(model, loss_in_full(model(**inputs, use_cache=False).logits, targets, (targets != -100).sum()))


def shared(cp: Any, model: Any, batch: dict[str, Tensor], own_loss: bool = True) -> Result:
    """One rank of a context group, with an enabled model."""
    part = cp.shard(batch)
    if own_loss:
        return Result.of(model, model(**part).loss)
    targets, items = part.pop("shift_labels"), part.pop("num_items_in_batch")
    del part["labels"]
    return Result.of(model, loss_in_full(model(**part).logits, targets, items))
