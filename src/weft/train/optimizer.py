"""The optimizer of a run: REKLS on matrices, AdamW on the rest, exact Adam on rows, as one overlapped step."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn

import weft
from weft.parallel.mesh import ParallelMesh
from weft.train.config import TrainConfig
from weft.train.model import LanguageModel

ADAMW: dict[str, Any] = {"betas": (0.9, 0.999), "eps": 1e-8}


def sort_parameters(model: LanguageModel) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """By name: matrices of blocks (REKLS), what has weight decay else (AdamW), norms (AdamW). Not the table."""
    matrices: dict[str, Tensor] = {}
    decayed: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for name, weight in model.named_parameters():
        if weight is model.bigrams.weight:
            continue
        kind = plain if weight.ndim < 2 else matrices if name.startswith("blocks.") else decayed
        kind[name] = weight
    return matrices, decayed, plain


def make_step(config: TrainConfig, model: LanguageModel, mesh: ParallelMesh) -> weft.optim.OverlappedStep:
    """One step for all parameters of a model, wrapped or not."""
    matrices, decayed, plain = sort_parameters(model)
    rows = weft.optim.RowAdam([("bigrams.weight", model.bigrams.weight)], lr=config.lr_rows)
    decay = config.weight_decay
    options: dict[str, Any] = {"lr": config.lr, "variant": config.variant}
    if config.wrap == "weft":
        parts: list[Any] = [
            weft.optim.REKLS(
                list(matrices.items()), weight_decay=decay, group=mesh.tensor, data_group=mesh.tokens, **options
            ),
            weft.optim.ShardedAdamW(
                [{"params": list(decayed.items()), "weight_decay": decay},
                 {"params": list(plain.items()), "weight_decay": 0.0}],
                lr=config.lr_adamw, group=mesh.tokens, **ADAMW,
            ),
            rows,
        ]  # fmt: skip
        return weft.optim.OverlappedStep(parts, clip=config.clip, overlap_backward=True)
    by_adamw = {"algorithm": "adamw", "lr": config.lr_adamw, **ADAMW}
    groups: list[dict[str, Any]] = [
        {"params": list(matrices.items()), "weight_decay": decay},
        {"params": list(decayed.items()), "weight_decay": decay, **by_adamw},
        {"params": list(plain.items()), "weight_decay": 0.0, **by_adamw},
    ]
    return weft.optim.OverlappedStep([weft.optim.REKLS(groups, group=mesh.tokens, **options), rows], clip=config.clip)


def rate_at(config: TrainConfig, step: int) -> float:
    """What the rates are multiplied with at a step (from 0): a rise, then a cosine.

    >>> rate_at(TrainConfig(warmup=10, steps=100), 4)
    0.5
    """
    if step < config.warmup:
        return (step + 1) / config.warmup
    done = (step - config.warmup) / max(1, config.steps - config.warmup)
    return config.lr_end + (1 - config.lr_end) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def set_rates(config: TrainConfig, step: weft.optim.OverlappedStep, factor: float) -> None:
    """The rates of all parts."""
    for name, part in step.parts.items():
        for group in part.param_groups:
            of_adamw = name == "ShardedAdamW" or group.get("algorithm") == "adamw"
            base = config.lr_rows if name == "RowAdam" else config.lr_adamw if of_adamw else config.lr
            group["lr"] = base * factor


def names_of(model: nn.Module, step: weft.optim.OverlappedStep) -> list[str]:
    """The name of each parameter, in the order in which the step numbers them."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [names[parameter] for group in step.param_groups for parameter in group["params"]]
