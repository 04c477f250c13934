"""What depends on positions beyond this rank's: rotary embeddings that scale with the longest position of a batch.

Those of type "dynamic" and "longrope" choose their frequencies by the largest of the positions they are given. A hook
before them adds one token to the rank's, at the largest position of the whole batch, and one behind them cuts its
angles off again, so that every rank has the frequencies of one process, and the same after any number of batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from weft.integrations.transformers.attention import current_forward


def rope_types(config: Any) -> Iterator[str]:
    """The types of rotary embeddings that a config names; it may name one for each kind of layer."""
    for name in ("rope_parameters", "rope_scaling"):
        given = getattr(config, name, None)
        if isinstance(given, dict):
            for one in (given, *(value for value in given.values() if isinstance(value, dict))):
                yield str(one.get("rope_type", one.get("type", "default")))


def by_longest_position(kinds: Iterable[str]) -> bool:
    """Whether one of these types chooses its frequencies by the longest position."""
    return any(kind == "longrope" or "dynamic" in kind for kind in kinds)


def rotary_embeddings_of(model: Any) -> list[nn.Module]:
    """Those of its modules whose frequencies depend on the longest position they see."""
    found = []
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        kinds = kinds.values() if isinstance(kinds, dict) else [kinds] if isinstance(kinds, str) else []
        if by_longest_position(kinds):
            found.append(module)
    return found


def hooks_of_rotary_embeddings(model: Any) -> list[Any]:
    """Around every call of those."""
    handles = []
    for module in rotary_embeddings_of(model):
        handles.append(module.register_forward_pre_hook(_add_longest, with_kwargs=True))
        handles.append(module.register_forward_hook(_cut_longest, with_kwargs=True))
    return handles


def _add_longest(_: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Called as (x, position_ids ``[.., s]``): it gets ``[.., s + 1]``."""
    positions = _positions(args, keywords)
    last = positions.new_full((*positions.shape[:-1], 1), current_forward().longest)
    longer = torch.cat([positions, last], -1)
    if "position_ids" in keywords:
        return args, {**keywords, "position_ids": longer}
    return (args[0], longer, *args[2:]), keywords


def _cut_longest(module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any], angles: Any) -> Any:
    """Angles ``[.., s + 1, D]``, or a tuple of them, to ``[.., s, D]``."""
    count = _positions(args, keywords).shape[-1]
    parts = angles if isinstance(angles, tuple) else (angles,)
    if any(part.ndim < 2 or part.shape[-2] != count for part in parts):
        raise NotImplementedError(
            f"ContextParallel: {type(module).__name__} gives angles {[list(part.shape) for part in parts]} for {count} "
            f"positions (rank {current_forward().rank}); only those with a row for each position are supported"
        )
    cut = tuple(part[..., :-1, :] for part in parts)
    return cut if isinstance(angles, tuple) else cut[0]


def _positions(args: tuple[Any, ...], keywords: dict[str, Any]) -> Tensor:
    found = keywords.get("position_ids", args[1] if len(args) > 1 else None)
    if not isinstance(found, Tensor):
        raise NotImplementedError(
            f"ContextParallel: rotary embeddings of {current_forward().model} were called without position_ids (rank "
            f"{current_forward().rank}), and depend on the longest of them"
        )
    return found
