"""The two functions that transformers calls under a registered name: the mask, and attention with it.

A model asks for a mask once for each kind of layer and hands it to the layers. Ours is no tensor: it says where the
tokens of the batch lie and what window the layers have, so that it reaches attention also where a layer is computed
again in the backward (gradient checkpointing), whatever batch came in between.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from weft.integrations.transformers.batch import KEY, WholeBatch
from weft.ops.attention import attention
from weft.ops.sequence import Mask, Sequence

CAUSAL, WINDOW, CHUNKS = "causal_mask_function", "sliding_window_overlay", "chunked_overlay"
# What a mask may be made of, and what in it is told as ``local_size``. An overlay that is not here (images, blocks)
# would be lost.
PLAIN_MASKS = {CAUSAL: None, "packed_sequence_mask_function": None, WINDOW: "sliding_window", CHUNKS: "chunk_size"}
# Masks made of others: their conjunction, or one by positions within its document (transformers 5.2x). For windows that
# is the same as by positions in the batch; chunks begin with their document.
COMPOSED = ("and_masks", "remap_positions_for_packed_sequence")
# Keywords that reach attention and change nothing in it, or were dealt with before.
HARMLESS = frozenset({
    "cache_position", "cu_seq_lens_k", "cu_seq_lens_q", "cu_seqlens", "is_causal", "labels", "logits_to_keep",
    "max_length_k", "max_length_q", "num_items_in_batch", "output_hidden_states", "output_router_logits",
    "position_embeddings", "position_ids", "seq_idx", "shift_labels", "sliding_window", "use_cache", KEY,
})  # fmt: skip
REASONS = {
    "position_bias": "a bias on the scores",
    "indices": "sparse attention by indices",
    "block_indices": "sparse attention by blocks",
    "output_attentions": "attention weights as an output",
    "past_key_values": "a cache",
    "initial_state": "a state from before",
    "initial_states": "a state from before",
    "output_final_state": "a state for later",
    "return_final_states": "a state for later",
    "cache": "a cache",
}


@dataclass(eq=False)
class Forward:
    """One forward of a model under way. sequences: one for all rows, or one for each. mixers: those that have run."""

    model: str
    whole: WholeBatch
    sequences: list[Sequence]
    method: str
    calls: int = 0
    mixers: set[str] = field(default_factory=set)
    loss_is_right: bool = False

    @property
    def rank(self) -> int:
        return self.sequences[0].axis.rank

    def places(self, device: torch.device) -> Tensor:
        """Where in the whole sequence this rank's tokens lie ``[s]``."""
        mine = [run for run in self.sequences[0].runs if run.rank == self.rank]
        return torch.cat([torch.arange(run.offset, run.offset + run.length, device=device) for run in mine])

    def real_tokens(self, device: torch.device) -> Tensor:
        """Which of this rank's tokens are no padding ``[B, s]``."""
        return self.places(device) < torch.tensor(self.whole.ends, device=device)[:, None]


@dataclass(frozen=True, eq=False)
class Visible:
    """What the queries of some layers see: earlier tokens of their document, ``window`` of them (with itself).

    masks: for each of the forward's sequences, where it is not only that.
    """

    forward: Forward
    window: int | None
    masks: tuple[Mask, ...] | None = None

    def __getattr__(self, name: str) -> Any:
        """Code that takes it for a tensor would change what is seen."""
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(self._words(name))

    def __getitem__(self, index: Any) -> Any:
        raise NotImplementedError(self._words("indexing"))

    def _words(self, name: str) -> str:
        return (
            f"ContextParallel: {self.forward.model} changes its mask ({name}) before attention (rank "
            f"{self.forward.rank}); only causal masks with windows and documents can be context-parallel"
        )


@dataclass
class _Running(threading.local):
    forwards: list[Forward] = field(default_factory=list)


running = _Running()  # of this thread, the innermost last


def current_forward() -> Forward:
    """The one under way in this thread."""
    if not running.forwards:
        raise ValueError(
            "ContextParallel: a part of an enabled model was called, or another model that shares its config, not the "
            "model; call the model that was enabled, and give every model a config of its own"
        )
    return running.forwards[-1]


def make_mask(
    *, mask_function: Callable[..., Any], local_size: int | None = None, attention_mask: Tensor | None = None, **_: Any
) -> Visible:
    """The mask, in transformers' words. ``local_size`` is the window of sliding layers, or the length of chunks."""
    forward = current_forward()
    parts = list(_parts_of(mask_function))
    if (fault := _find_mask_fault(parts, local_size, attention_mask)) is not None:
        raise NotImplementedError(f"ContextParallel: {forward.model} asks for a mask {fault} (rank {forward.rank})")
    if not any(name == CHUNKS for name, _ in parts):
        return Visible(forward, local_size)
    assert local_size is not None, "the length of a chunk"
    if not forward.whole.from_zero:
        raise NotImplementedError(
            f"ContextParallel: {forward.model} attends in chunks, and packed documents begin at other positions than "
            f"0, where chunks would begin earlier (rank {forward.rank}); let position_ids of each begin at 0"
        )
    return Visible(forward, None, tuple(Mask.chunks(local_size, one.bounds or one.total) for one in forward.sequences))


def _find_mask_fault(
    parts: list[tuple[str, Mapping[str, Any]]], local_size: int | None, padding: Tensor | None
) -> str | None:
    """What in a mask would be lost, in words."""
    known = "only causal ones with windows, chunks and documents are supported"
    names = [name for name, _ in parts]
    for name in names:
        if name not in PLAIN_MASKS:
            return f"with {name}, and {known}"
    if CAUSAL not in names:
        return f"that shows later tokens ({', '.join(names)}), and {known}"
    sizes = [held.get(word) for name, held in parts if (word := PLAIN_MASKS[name]) is not None]
    if sizes != ([] if local_size is None else [local_size]):
        return f"with windows or chunks of {sizes} tokens and says {local_size}; only one of them is supported"
    if padding is not None and not bool(padding.all()):
        return "that hides some tokens as padding, which it found by itself; that cannot be context-parallel"
    return None


def _parts_of(mask_function: Callable[..., Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The functions a mask is made of: their names, and the values that each holds by name."""
    name = getattr(mask_function, "__qualname__", repr(mask_function)).partition(".")[0]
    held = inspect.getclosurevars(mask_function).nonlocals if inspect.isfunction(mask_function) else {}
    if name not in COMPOSED:
        yield name, held
        return
    for value in held.values():
        for part in value if isinstance(value, tuple | list) else (value,):
            if callable(part):
                yield from _parts_of(part)


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: float | None = None,
    dropout: float = 0.0, softcap: float | None = None, s_aux: Tensor | None = None, **keywords: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attention in transformers' words, on this rank's tokens: (out, None).

    | tensor | shape                                   |
    |--------|-----------------------------------------|
    | query  | ``[B, H, S, D]``                        |
    | key    | ``[B, Hk, S, D]``                       |
    | value  | ``[B, Hk, S, E]``                       |
    | s_aux  | ``[H]``, sinks: a score for each head   |
    | out    | ``[B, S, H, E]``                        |

    ``softcap``: scores are softcap * tanh(score / softcap). Causality and window are the mask's, as they are with SDPA
    where there is one: some models set only the mask, and ``is_causal`` may be False because of it.
    """
    if not isinstance(attention_mask, Visible):
        raise NotImplementedError(
            f"ContextParallel: {type(module).__name__} was given a mask of its own, {type(attention_mask).__name__}, "
            f"in place of the one that knows about the other ranks; this model cannot be context-parallel"
        )
    forward = attention_mask.forward
    refuse_unknown(forward, dropout, keywords)
    _check_handed_over(forward, module, softcap, s_aux)
    forward.calls += 1
    query, key, value = _in_one_dtype(query, key, value)
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    window = None if attention_mask.window is None else (attention_mask.window - 1, 0)
    options: dict[str, Any] = {"scale": scale, "window": window, "method": forward.method, "sinks": s_aux}
    if softcap:
        options["softcap"] = float(softcap)
    with torch.autocast(query.device.type, enabled=False):
        out = _attend_rows(attention_mask, q, k, v, **options)
    return out.contiguous(), None


def _check_handed_over(forward: Forward, module: Any, softcap: float | None, s_aux: Tensor | None) -> None:
    """A cap or sinks that a model has and does not hand over, but leaves to functions of its own, would be lost; and
    those that come from elsewhere one process would not use."""
    holders = module, getattr(module, "config", None)
    for name, keyword, given in (("attn_logit_softcapping", "softcap", softcap), ("sinks", "s_aux", s_aux)):
        held = any(getattr(one, name, None) is not None for one in holders)
        if held == (given is not None):
            continue
        words = f"has {name} and does not hand it on as {keyword}" if held else f"was given {keyword} and has no {name}"
        raise NotImplementedError(
            f"ContextParallel: {type(module).__name__} of {forward.model} {words} (rank {forward.rank}); only caps and "
            f"sinks that a model hands to transformers' AttentionInterface are supported"
        )


def _attend_rows(visible: Visible, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """All rows at once where their documents are the same, else each by itself."""
    sequences = visible.forward.sequences
    how: list[dict[str, Any]] = [{"sequence": one, "causal": True, **options} for one in sequences]
    if visible.masks is not None:
        pairs = zip(sequences, visible.masks, strict=True)
        how = [{"sequence": one, "mask": mask, **options} for one, mask in pairs]
    if len(sequences) > 1:
        rows = [attention(q[row : row + 1], k[row : row + 1], v[row : row + 1], **how[row]) for row in range(len(q))]
        return torch.cat(rows)
    if sequences[0].bounds is None or len(q) == 1:
        return attention(q, k, v, **how[0])
    # Packed rows stand side by side as heads: query head h of row b uses KV head b Hk + h // (H / Hk), as it should.
    side_by_side = [x.transpose(0, 1).flatten(1, 2).unsqueeze(0) for x in (q, k, v)]
    if options["sinks"] is not None:
        how[0]["sinks"] = options["sinks"].repeat(len(q))
    out = attention(*side_by_side, **how[0])
    return out[0].unflatten(1, (len(q), -1)).transpose(0, 1)


def _in_one_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """As SDPA takes them under autocast, where rotary embeddings leave q and k in fp32 beside a bf16 v."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)


def refuse_unknown(forward: Forward, dropout: float, keywords: dict[str, Any]) -> None:
    """Every keyword is known to change nothing, or it is refused: ignoring one gives wrong numbers in silence."""
    where = f"in {forward.model} (rank {forward.rank})"
    if dropout:
        raise NotImplementedError(
            f"ContextParallel: attention dropout of {dropout} {where} is not supported; load the model with "
            f"attention_dropout=0.0 (attn_pdrop=0.0 for GPT2)"
        )
    for name, value in keywords.items():
        if name not in HARMLESS and value is not None and value is not False:
            reason = REASONS.get(name, "a keyword that is not known here")
            raise NotImplementedError(f"ContextParallel: {reason} ({name}) {where} cannot be context-parallel")
