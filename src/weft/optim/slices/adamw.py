"""`ShardedAdamW`: AdamW whose state is cut into flat slices, one for each rank (ZeRO-1)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from weft.comm import Axis
from weft.comm.arguments import at, find_integer_fault, read
from weft.comm.device import outside_autocast
from weft.errors import as_fault
from weft.optim.owners import Held, OwnedPart, Owners
from weft.optim.slices.layout import (
    Piece,
    PieceBucket,
    Range,
    cut_bucket,
    cut_pieces,
    fill_buckets,
    find_wrapper_fault,
    read_parameters,
)
from weft.optim.slices.state import check_slices, load_slices, save_slices
from weft.optim.step.compare import Examined, names_of, parameters_of
from weft.optim.step.part import find_adam_fault, find_option_fault, first_group_fault
from weft.optim.step.state import (
    OF_TORCH,
    agree_to_load,
    find_state_fault,
    first_count,
    keep_own_options,
    take_apart,
)

_ADD = "ShardedAdamW.add_param_group"


class ShardedAdamW(OwnedPart):
    """AdamW for parameters that every rank of ``group`` has, with gradients that are each rank's own.

    Parameters stand in buckets of about ``bucket_bytes``, the last ones first; each rank owns a flat slice of each
    bucket, of equal size whatever the shapes. Moments are fp32 (fp64 for fp64), and there are only those of owned
    slices; low-precision parameters have fp32 master weights there.

    | crosses ranks | from, to                            | when     |
    |---------------|-------------------------------------|----------|
    | integers      | who has which gradients, all finite | `start`  |
    | gradients     | to the owners of their slices       | `start`  |
    | one scalar    | the norm, with ``clip``             | `work`   |
    | new weights   | from the owners to all              | `work`   |

    Gradients are averaged at their owners, in fp32 and rank order, so no wrapper must have averaged them:
    DistributedDataParallel and FSDP are refused. The result is that of ``torch.optim.AdamW`` on averaged gradients, to
    the bit for fp32 and fp64. ``clip``: the largest global norm of the averaged gradients; ``norm`` is the last one
    before clipping.

    A gradient that is not finite on some rank leaves weights and state as they were on all of them: the step raises, or
    with ``on_nonfinite="skip"`` is passed over and logged. `start`, `work` and `finish` are the parts of a `step`, for
    those who want to do other things in between.

    >>> model = torch.nn.Linear(4, 3)
    >>> optimizer = ShardedAdamW(model.parameters(), lr=0.01)
    >>> model(torch.ones(2, 4)).sum().backward()
    >>> optimizer.step()
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        group: Any = None,
        bucket_bytes: int = 32 << 20,
        clip: float | None = None,
        on_nonfinite: str = "raise",
    ) -> None:
        self._axis, self._bucket_bytes = Axis.of(group), bucket_bytes
        fault = find_integer_fault("ShardedAdamW", "bucket_bytes", bucket_bytes, self._axis.rank, least=1)
        if fault := fault or find_option_fault("ShardedAdamW", on_nonfinite, clip, self._axis.rank):
            self._axis.refuse(_ADD, fault, metadata=0)
        self._owners = Owners([self._axis] if self._axis.size > 1 else [])
        self._buckets: list[list[Piece]] = []
        self._ranges: dict[Tensor, list[Range]] = {}
        self._names: dict[Tensor, str] = {}
        self._under_way: list[PieceBucket] = []
        self._looked_for_wrappers = False
        self._waiting: list[Tensor] | None = []  # parameters of the constructor's groups, which share buckets
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        try:
            super().__init__(params, defaults, on_nonfinite, clip)
        except Exception as error:  # torch's words; all other ranks wait for this one
            self._refuse(error)
        waiting, self._waiting = self._waiting, None
        self._place(waiting)

    @torch.no_grad()
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's. All ranks must call it; the new parameters get buckets of their own."""
        if self._waiting is not None:
            super().add_param_group(param_group)
            self._waiting += self.param_groups[-1]["params"]
            return
        try:
            super().add_param_group(param_group)
        except Exception as error:
            self._refuse(error)
        parameters = self.param_groups[-1]["params"]
        try:
            self._place(parameters)
        except Exception:
            self.param_groups.pop()
            raise

    def _refuse(self, error: Exception) -> NoReturn:
        rank = self._axis.rank
        self._axis.refuse(_ADD, as_fault("ShardedAdamW: the parameters cannot be taken", error, at(rank)), metadata=0)

    def _place(self, parameters: list[Tensor]) -> None:
        """Cut parameters into buckets and slices, and make the state of what this rank owns."""
        rank, size = self._axis.rank, self._bucket_bytes
        options = read("ShardedAdamW", rank, lambda: read_parameters(self.param_groups, parameters, size, rank))
        if isinstance(options, Exception):
            self._axis.refuse(_ADD, options, metadata=0)
        self._axis.begin(_ADD, options, metadata=[]).metadata.wait()
        self._names = dict(zip(parameters_of(self), names_of(self), strict=True))
        self._ranges = {parameter: self._ranges.get(parameter, []) for parameter in self._names}  # as checkpoints are
        ordered = parameters[::-1]  # a backward gives the last ones first
        for bucket in fill_buckets([p.numel() * p.element_size() for p in ordered], self._bucket_bytes):
            some = [ordered[index] for index in bucket]
            self._buckets.append([])
            for parameter, ranges in zip(some, cut_bucket([p.numel() for p in some], self._axis.size), strict=True):
                self._ranges[parameter] = ranges
                self._buckets[-1] += cut_pieces(parameter, ranges, self._owners.axes)
                self.state[parameter] = self._fresh(parameter)

    def _fresh(self, parameter: Tensor) -> dict[str, Any]:
        start, stop = self._ranges[parameter][self._axis.rank]
        wide = torch.promote_types(parameter.dtype, torch.float32)
        state: dict[str, Any] = {"step": first_count()}
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = torch.zeros(stop - start, dtype=wide, device=parameter.device)
        if wide != parameter.dtype:
            state["master"] = parameter.detach().reshape(-1)[start:stop].to(wide)
        return state

    # The verbs of a part.

    def step_axes(self) -> list[Axis]:
        """The axis of ``group``."""
        return list(self._owners.axes)

    def cut(self, bucket_bytes: int) -> None:
        """Other buckets, and so other slices: only before the first step."""
        if any(float(state["step"]) for state in self.state.values()):
            raise ValueError("ShardedAdamW: bucket_bytes cannot change after the first step: slices have state")
        self._bucket_bytes, self._buckets = bucket_bytes, []
        self._place(list(self._names))

    def buckets(self) -> list[list[Tensor]]:
        """By ``bucket_bytes``, the last parameters first."""
        return [list(dict.fromkeys(piece.parameter for piece in bucket)) for bucket in self._buckets]

    def replicated_over(self, parameter: Tensor) -> list[Axis]:
        """The axis of ``group``: weights are whole on every rank."""
        return self.step_axes()

    def examine(self) -> Examined:
        """Which gradients are here, and whether somebody else averages them."""
        found = super().examine()
        find = partial(find_adam_fault, "ShardedAdamW")
        fault = first_group_fault("ShardedAdamW", self.param_groups, find, self._axis.rank)
        found.fault = fault or found.fault
        if not self._looked_for_wrappers and self._axis.size > 1:
            self._looked_for_wrappers = True
            found.fault = found.fault or find_wrapper_fault(self._names, self._axis.rank)
        return found

    def begin(self, present: Collection[Tensor]) -> None:
        """Take the pieces of what has gradients."""
        super().begin(present)
        self._under_way = [
            PieceBucket(pieces=[one for one in some if one.parameter in present]) for some in self._buckets
        ]

    def send(self, bucket: int) -> None:
        """Start gradients to the owners of their slices."""
        one = self._under_way[bucket]
        grads = [piece.of(self.gradient_of(piece.parameter)) for piece in one.pieces]
        one.gradients = self._owners.gather("ShardedAdamW", one.routes, grads)

    def work_on(self, bucket: int, scale: float | Tensor) -> None:
        """AdamW on the slices this rank owns; new weights start on their way to all."""
        one = self._under_way[bucket]
        mine: Held = [None] * len(one.pieces)
        numbers = {p: number for number, p in enumerate(self._names)}
        for group in self.param_groups:
            of_group = set(group["params"])
            owned = [(at, piece, grad) for at, (piece, grad) in enumerate(zip(one.pieces, one.arrive(), strict=True))
                     if grad is not None and piece.parameter in of_group]  # fmt: skip
            if owned:
                places, pieces, grads = (list(column) for column in zip(*owned, strict=True))
                step = partial(self._step, one, pieces, grads, scale, group)
                found = self.attempt(numbers[pieces[0].parameter], step, partial(_own_parts, pieces))
                for at, weight in zip(places, found, strict=True):
                    mine[at] = weight
        one.arrived = []
        one.results = self._owners.scatter("ShardedAdamW", one.routes, mine)

    def _step(
        self, one: PieceBucket, pieces: list[Piece], grads: list[Tensor], scale: float | Tensor, group: dict[str, Any]
    ) -> list[Tensor]:
        """The pieces after the step, in their parameters' dtypes. It may yet be dropped, so it is made on copies."""
        news = [self._copy(piece) for piece in pieces]
        wide = [new.pop("weight") for new in news]
        grads = [grad.to(weight.dtype) for grad, weight in zip(grads, wide, strict=True)]
        adamw(
            wide, grads if isinstance(scale, float) and scale == 1 else [grad * scale for grad in grads],
            [new["exp_avg"] for new in news], [new["exp_avg_sq"] for new in news], [],
            [self.state[piece.parameter]["step"].clone() for piece in pieces], foreach=True, fused=False, amsgrad=False,
            beta1=group["betas"][0], beta2=group["betas"][1], lr=float(group["lr"]),
            weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
        )  # fmt: skip
        one.states += zip(pieces, news, strict=True)
        return [weight.to(piece.parameter.dtype) for piece, weight in zip(pieces, wide, strict=True)]

    def _copy(self, piece: Piece) -> dict[str, Tensor]:
        """What a step changes: moments, and the ``weight``, which is the master if there is one.

        A master follows a weight that was changed since the last step (loaded, clamped, made anew): where the weight is
        not the rounded master, it is taken instead.
        """
        state, own = self.state[piece.parameter], piece.of(piece.parameter)
        new = {name: state[name].clone() for name in ("exp_avg", "exp_avg_sq")}
        if "master" in state:
            new["master"] = torch.where(state["master"].to(own.dtype) == own, state["master"], own)
        return {**new, "weight": new["master"] if "master" in new else own.clone()}

    def _accept(self, one: PieceBucket, results: Held) -> None:
        """Write the new weights, and count the step."""
        for piece, weight in zip(one.pieces, results, strict=True):
            assert weight is not None
            piece.write(weight)
        for piece, new in one.states:
            self.state[piece.parameter].update(new)
        for parameter in {piece.parameter for piece in one.pieces}:
            self.state[parameter]["step"] += 1

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("ShardedAdamW: an optimizer with sharded state is not pickled or copied; save its state_dict()")

    # Saving and loading: whole tensors, as torch.optim.AdamW has them.

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """As torch's AdamW's, with moments (and fp32 masters) as DTensors over the ranks; all ranks must ask."""
        saved = super().state_dict()
        for group in saved["param_groups"]:
            group.update(OF_TORCH)
        saved["state"] = dict(enumerate(save_slices(self._axis, self._ranges, self.state)))
        return saved

    def check_state(self, state_dict: Mapping[str, Any]) -> None:
        """Raise if a state cannot be loaded."""
        check_slices(self._names, self.state, self._take_apart(state_dict)[1])

    def _take_apart(self, state_dict: Mapping[str, Any]) -> tuple[dict[str, Any], list[Mapping[str, Any] | None]]:
        return take_apart(self, state_dict, keep_own_options(self, state_dict["param_groups"]))

    @torch.no_grad()
    @outside_autocast()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's; from any number of ranks, and from ``torch.optim.AdamW``. All ranks must call it."""
        agree_to_load("ShardedAdamW", [self._axis], find_state_fault(self, state_dict))
        saved, given = self._take_apart(state_dict)
        fresh = [self._fresh(parameter) for parameter in self._names]
        states = load_slices(self._axis, self._ranges, fresh, given)
        super().load_state_dict(saved)
        self.state.update(zip(self._names, states, strict=True))


def _own_parts(pieces: list[Piece]) -> list[Tensor]:
    """Of parameters as they are."""
    return [piece.of(piece.parameter) for piece in pieces]
