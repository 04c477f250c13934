"""A context-parallel model: what is set on it, and what is checked around each forward."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weft.comm import Axis
from weft.comm.arguments import find_number_fault, read
from weft.errors import name_ranks
from weft.integrations.transformers.attention import Forward, running
from weft.integrations.transformers.batch import KEY, WholeBatch
from weft.integrations.transformers.mixers import ATTENDING, family_of, hooks_of, kinds_of, mixers_of, take_over
from weft.integrations.transformers.positions import hooks_of_positions
from weft.integrations.transformers.router_loss import find_router_loss, take_over_router_loss

CACHES = ("past_key_values", "cache_params")


@dataclass(frozen=True)
class _Options:
    """What the ranks must have in common in a forward, beside the batch."""

    model: str
    layout: str
    training: bool
    labels: bool
    router_loss: bool


class Enabled:
    """One model's hooks. A forward begins with one round of integers in which the ranks compare their batches."""

    def __init__(self, model: Any, axis: Axis, layout: str, method: str, name: str) -> None:
        self._model = weakref.ref(model)
        self.axis, self.layout, self.method, self.name = axis, layout, method, name
        self._layers = int(getattr(model.config, "num_hidden_layers", 1))
        if family_of(model) is not None:
            self._layers = sum(kind in ATTENDING for kind in kinds_of(model.config))
        self._mixers = tuple(mixers_of(model))
        self._has_attention = model._can_set_attn_implementation()
        self._has_router_loss = find_router_loss(model) is not None
        self._has_loss = "labels" in inspect.signature(model.forward).parameters
        self._before: tuple[str, Any] | None = None
        self._hooks: list[Any] = []
        self._forward: Forward | None = None
        self.active = False

    @property
    def model(self) -> Any:
        model = self._model()
        assert model is not None, "it is kept under its model"
        return model

    def __deepcopy__(self, _: dict[int, Any]) -> Enabled:
        """A copy of a model takes its hooks along and is context-parallel on the same ranks."""
        return self

    def resume(self) -> None:
        """Set attention, mixers, loss and hooks on the model."""
        model, self.active = self.model, True
        self._before = model.config._attn_implementation, model.__dict__.get("_loss_function")
        if self._has_attention:
            model.set_attn_implementation(self.name)
        take_over(model)
        take_over_router_loss(model)
        if self._has_loss:
            model.loss_function = _watch(model.loss_function)
        self._hooks = [
            model.register_forward_pre_hook(self._begin, with_kwargs=True),
            model.register_forward_hook(self._end, with_kwargs=True, always_call=True),
            *hooks_of(model),
            *hooks_of_positions(model),
        ]

    def pause(self) -> None:
        """Take them off."""
        model, self.active = self.model, False
        assert self._before is not None
        attention, loss = self._before
        for hook in self._hooks:
            hook.remove()
        if self._has_attention:
            model.set_attn_implementation(attention)
        if self._has_loss:
            del model._loss_function
        if loss is not None:
            model.loss_function = loss

    def _begin(self, model: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        keywords = dict(keywords)
        whole = keywords.pop(KEY, None)
        if any(keywords.get(name) is not None for name in CACHES) or keywords.get("use_cache"):
            # Raised here alone: whoever generates does so on one rank, and the others wait for nothing.
            raise NotImplementedError(
                f"ContextParallel: {type(model).__name__} was called with a cache (rank {self.axis.rank}); for "
                f"generate() pause the adapter: with cp.paused(): model.generate(...)"
            )
        keywords["use_cache"] = False  # it defaults to True, and a rank's cache would hold its own tokens only
        fault = read("ContextParallel", self.axis.rank, lambda: self._find_fault(model, args, keywords, whole))
        options = None
        numbers = (0, 0, 0, 0)
        if fault is None:
            routed = keywords.get("output_router_logits")
            routed = bool(getattr(model.config, "output_router_logits", False) if routed is None else routed)
            options = _Options(type(model).__name__, self.layout, model.training, "labels" in keywords, routed)
            items = keywords.get("num_items_in_batch")
            numbers = whole.digest, whole.rows, whole.length, 0 if items is None else int(items)
        gathered = self.axis.begin("ContextParallel.forward", options, metadata=numbers, fault=fault).metadata.wait()
        self._compare(gathered)
        self._forward = Forward(type(model).__name__, whole, whole.sequences(self.axis), self.method)
        running.forwards.append(self._forward)
        return args, keywords

    def _end(self, model: Any, args: Any, keywords: Mapping[str, Any], output: Any) -> None:
        forward, self._forward = self._forward, None
        if forward is None:
            return
        running.forwards.remove(forward)
        if output is None:  # the forward has failed
            return
        if forward.calls < self._layers:
            raise NotImplementedError(
                f"ContextParallel: only {forward.calls} of {self._layers} layers of {forward.model} attended through "
                f"transformers' interface (rank {self.axis.rank}); the others saw this rank's tokens alone"
            )
        if missed := [name for name in self._mixers if name not in forward.mixers]:
            raise NotImplementedError(
                f"ContextParallel: {', '.join(missed)} of {forward.model} did not run in this forward (rank "
                f"{self.axis.rank}); what ran in place of them saw this rank's tokens alone"
            )
        if keywords.get("labels") is not None and not forward.loss_is_right:
            raise NotImplementedError(
                f"ContextParallel: {forward.model} computes its loss without shift_labels and num_items_in_batch (rank "
                f"{self.axis.rank}); take labels out of the part and compute the loss from logits and shift_labels"
            )

    def _find_fault(self, model: Any, args: tuple[Any, ...], given: dict[str, Any], whole: Any) -> Exception | None:
        where = f"(rank {self.axis.rank})"
        if not isinstance(whole, WholeBatch):
            return ValueError(
                f"ContextParallel: {type(model).__name__} was called with a batch that is not cut {where}; call "
                f"model(**cp.shard(batch)), or pause the adapter: with cp.paused(): ..."
            )
        if fault := whole.find_fault(self.layout, self.axis):
            return fault
        if len(args) > 1:
            return ValueError(
                f"ContextParallel: {type(model).__name__} was called with {len(args)} arguments without names {where}; "
                f"pass the part as it is: model(**cp.shard(batch))"
            )
        shape = (whole.rows, whole.lengths[self.axis.rank])
        found = given.get("input_ids", args[0] if args else None)
        if found is None or tuple(found.shape[:2]) != shape:
            shown = "no input_ids" if found is None else f"input_ids {list(found.shape)}"
            return ValueError(
                f"ContextParallel: got {shown} where cp.shard gave {list(shape)} {where}; pass the part as it is: "
                f"model(**cp.shard(batch))"
            )
        if tuple(getattr(given.get("position_ids"), "shape", ())) != shape:
            return ValueError(
                f"ContextParallel: position_ids are missing or of another shape than {list(shape)} {where}; pass those "
                f"of cp.shard, which count in the whole sequence"
            )
        return self._find_option_fault(given, where)

    def _find_option_fault(self, given: dict[str, Any], where: str) -> Exception | None:
        if (given.get("labels") is None) != (given.get("shift_labels") is None):
            return ValueError(
                f"ContextParallel: of labels and shift_labels only one came to the model {where}; pass both as "
                f"cp.shard gave them, or neither. Trainer's label smoothing and compute_loss_func take labels out and "
                f"shift again: leave label_smoothing_factor at 0"
            )
        if given.get("labels") is not None and given.get("num_items_in_batch") is None:
            return ValueError(
                f"ContextParallel: labels without num_items_in_batch {where}: a mean of each rank's own tokens is not "
                f"the mean of all; pass the part as cp.shard gave it"
            )
        if (items := given.get("num_items_in_batch")) is not None and (
            fault := find_number_fault("ContextParallel", "num_items_in_batch", items, self.axis.rank, tensor=True)
        ):
            return fault
        if given.get("is_causal") is False:
            return NotImplementedError(f"ContextParallel: attention that is not causal is not supported {where}")
        names = ["attention_mask", "output_attentions", "logits_to_keep"]
        if not self._has_router_loss:
            names.append("output_router_logits")
        for name in names:
            value = given.get(name)
            if value is not None and value is not False and not (name == "logits_to_keep" and value == 0):
                return NotImplementedError(
                    f"ContextParallel: {name} cannot be given to a context-parallel model {where}; leave it out"
                )
        return None

    def _compare(self, gathered: list[tuple[int, ...]]) -> None:
        """Every rank has received the same, so every rank raises the same."""
        batches: dict[tuple[int, ...], list[int]] = {}
        for rank, (digest, rows, length, _) in enumerate(gathered):
            batches.setdefault((digest, rows, length), []).append(rank)
        if len(batches) > 1:
            shown = "; ".join(
                f"{name_ranks(ranks)} {rows} x {length} tokens (digest {digest % 16**6:06x})"
                for (digest, rows, length), ranks in batches.items()
            )
            raise ValueError(
                f"ContextParallel: the ranks of one context group hold different samples: {shown}; every rank must get "
                f"the same batch: read data by data rank, with cp.sampler(dataset, data=mesh['dp']) or cp.loader"
            )
        items = [numbers[3] for numbers in gathered]
        if len(set(items)) > 1:
            raise ValueError(
                f"ContextParallel: num_items_in_batch is {items} on the ranks of one context group; it must be the "
                f"targets of all of them: pass what cp.shard gave, and leave Trainer's average_tokens_across_devices on"
            )


def _watch(loss_function: Any) -> Any:
    """The same loss, and a note whether it was asked for as a part of a batch needs it."""

    def watched(*args: Any, **keywords: Any) -> Any:
        if running.forwards:
            needed = (keywords.get("shift_labels"), keywords.get("num_items_in_batch"))
            running.forwards[-1].loss_is_right = all(value is not None for value in needed)
        return loss_function(*args, **keywords)

    return watched
