"""The auxiliary loss of a mixture's router, over all tokens of the group.

transformers' ``load_balancing_loss_func`` is experts * sum_e (how often e is chosen) * (mean probability of e) over all
tokens and layers. The second factor is a sum over tokens, so the ranks' shares of it add up; the first is a count
without a gradient, which one small gather makes the whole batch's. A rank's share is thus exact, and its backward sends
nothing.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.comm.rounds import gather_rows
from weft.integrations.transformers.attention import Forward, running

NAME = "load_balancing_loss_func"
ARGUMENTS = ("gate_logits", "num_experts", "top_k", "attention_mask")
_lock = threading.Lock()


@dataclass(frozen=True)
class _Options:
    """What the ranks must have in common."""

    model: str
    layers: int
    experts: int
    top_k: int
    device: str  # its type


def find_router_loss(model: Any) -> dict[str, Any] | None:
    """The globals in which the model's forward finds the function, None where it has none of that form."""
    for kind in type(model).__mro__:
        if "forward" in vars(kind):
            names = getattr(inspect.unwrap(vars(kind)["forward"]), "__globals__", {})
            if NAME in names and tuple(inspect.signature(names[NAME]).parameters) == ARGUMENTS:
                return names
    return None


def take_over_router_loss(model: Any) -> None:
    """Replace the function, once for the process. Outside forwards of enabled models it is what it was."""
    names = find_router_loss(model)
    if names is None:
        return
    with _lock:
        if not hasattr(names[NAME], "weft_function"):
            names[NAME] = _choosing(names[NAME])


def _choosing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(gate_logits: Any, num_experts: int | None = None, top_k: int = 2, attention_mask: Any = None) -> Any:
        if not running.forwards or not isinstance(gate_logits, tuple):
            return original(gate_logits, num_experts, top_k, attention_mask)
        assert num_experts is not None, "every model gives it"
        return share_of_router_loss(running.forwards[-1], gate_logits, num_experts, top_k)

    call.weft_function = share_of_router_loss  # type: ignore[attr-defined]
    return call


def share_of_router_loss(forward: Forward, gate_logits: tuple[Tensor, ...], experts: int, top_k: int) -> Tensor:
    """This rank's share, of the logits ``[B s, experts]`` of each layer. Padded tokens count nowhere."""
    device = gate_logits[0].device
    dtype = torch.promote_types(gate_logits[0].dtype, torch.float32)
    counts, sums = torch.zeros(2, experts, dtype=dtype, device=device)
    real = forward.real_tokens(device).flatten().to(dtype)
    for logits in gate_logits:
        probabilities = logits.to(device).flatten(0, -2).softmax(-1)
        chosen = probabilities.topk(top_k, -1).indices
        counts = counts.scatter_add(0, chosen.flatten(), real.repeat_interleave(top_k))
        sums = sums + (probabilities.to(dtype) * real[:, None]).sum(0)
    options = _Options(forward.model, len(gate_logits), experts, top_k, device.type)
    call = forward.sequences[0].axis.begin("ContextParallel.router_loss", options)
    everybodys = gather_rows(call, counts).wait().sum(0)
    rows = max(1, sum(forward.whole.ends) * len(gate_logits))
    return experts * (everybodys / rows * (sums / rows)).sum()
