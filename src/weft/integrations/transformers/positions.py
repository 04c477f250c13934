"""What depends on positions beyond this rank's: some rotary embeddings, and queries that are scaled by their place.

Rotary embeddings of type "dynamic" and "longrope" choose their frequencies by the largest position they are given. A
hook before them adds one token to the rank's, at the largest position of the whole batch, and one behind them cuts its
angles off again, so that every rank has the frequencies of one process, and the same after any number of batches.

Llama 4 scales the queries of layers without rotary embeddings by their place in the row, which it counts from 0, or
from the length of a cache. There a hook gives it `PlacesOfTokens` for a cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from weft.integrations.transformers.attention import Visible, current_forward


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


def hooks_of_positions(model: Any) -> list[Any]:
    """Around every call of what depends on positions of other ranks."""
    handles: list[Any] = []
    for module in rotary_embeddings_of(model):
        handles.append(module.register_forward_pre_hook(_add_longest, with_kwargs=True))
        handles.append(module.register_forward_hook(_cut_longest, with_kwargs=True))
    for module in model.modules():
        if _scales_by_place(module):
            handles.append(module.register_forward_pre_hook(_give_places, with_kwargs=True))
            handles.append(module.register_forward_hook(_check_places, with_kwargs=True))
    return handles


def _add_longest(_: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Called as (x, position_ids ``[.., s]``): it gets ``[.., s + 1]``."""
    positions = _positions(args, keywords)
    last = positions.new_full((*positions.shape[:-1], 1), current_forward().whole.longest)
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


class PlacesOfTokens:
    """In a cache's place: it holds nothing, and says how much further on in its row each token is than on this rank."""

    def __init__(self, further: Tensor) -> None:
        self._further, self.asked = further, 0

    def get_seq_length(self, *_: Any) -> Tensor:
        """How many tokens come before: of each token ``[s]``, to be added to 0, 1, ..."""
        self.asked += 1
        return self._further

    def update(self, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        """Nothing is kept."""
        return key, value


def _scales_by_place(module: nn.Module) -> bool:
    return bool(getattr(module, "attn_temperature_tuning", False)) and not getattr(module, "use_rope", False)


def _give_places(_: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The layer's mask knows the batch, also where the layer is computed again in the backward."""
    visible = keywords.get("attention_mask")
    if not isinstance(visible, Visible):  # attention will say so
        return args, keywords
    hidden = keywords.get("hidden_states", args[0] if args else None)
    assert isinstance(hidden, Tensor), "what a layer is about"
    places = visible.forward.places(hidden.device)
    further = places - torch.arange(len(places), device=hidden.device)
    return args, {**keywords, "past_key_values": PlacesOfTokens(further)}


def _check_places(module: nn.Module, _: tuple[Any, ...], keywords: dict[str, Any], __: Any) -> None:
    given = keywords.get("past_key_values")
    if not isinstance(given, PlacesOfTokens) or given.asked != 1:
        raise NotImplementedError(
            f"ContextParallel: {type(module).__name__} scales its queries by their place, and finds that in another "
            f"way than is known here; set config.attn_temperature_tuning = False, or use transformers 5"
        )
