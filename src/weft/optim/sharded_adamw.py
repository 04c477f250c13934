"""`ShardedAdamW`: AdamW whose state is cut into flat slices, one for each rank (ZeRO-1)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from weft.comm import Axis
from weft.optim.adamw_faults import find_group_fault, find_parameter_fault, find_wrapper_fault
from weft.optim.gradients import compare_gradients
from weft.optim.owner_optimizer import OwnerOptimizer
from weft.optim.owners import Averaged, Owners, Route, Travel
from weft.optim.saved_state import OF_TORCH, keep_own_options, take_apart
from weft.optim.sharded_state import load_slices, save_slices
from weft.optim.slices import Range, cut_bucket, fill_buckets


@dataclass(frozen=True)
class _Options:
    """What the ranks must have in common when parameters are added."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    bucket_bytes: int


@dataclass(frozen=True)
class _Piece:
    """A range of a flattened parameter and the rank that owns it."""

    parameter: Tensor
    where: Range
    route: Route


@dataclass
class _Bucket:
    """Pieces that travel together, in the step under way."""

    pieces: list[_Piece]
    gradients: Travel
    weights: Travel | None = None


class ShardedAdamW(OwnerOptimizer):
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
    with ``on_nonfinite="skip"`` is passed over and logged. `start`, `work` and `finish` are the parts of a `step`.

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
        if bucket_bytes < 1 or (clip is not None and not clip > 0):
            raise ValueError(f"ShardedAdamW: bucket_bytes and clip must be > 0, got {bucket_bytes} and {clip}")
        self._axis, self._bucket_bytes, self._clip, self._on_nonfinite = (
            Axis.of(group),
            bucket_bytes,
            clip,
            on_nonfinite,
        )
        self._owners = Owners([self._axis] if self._axis.size > 1 else [])
        self._buckets: list[list[_Piece]] = []
        self._ranges: dict[Tensor, list[Range]] = {}
        self._names: dict[Tensor, str] = {}
        self._under_way: list[_Bucket] = []
        self._reason: str | None = None  # why the step under way will change nothing
        self._looked_for_wrappers = False
        self._waiting: list[Tensor] | None = []  # parameters of the constructor's groups, which share buckets
        self.norm: float | None = None
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults, on_nonfinite, self._axis.rank)
        waiting, self._waiting = self._waiting, None
        self._place(waiting)

    @torch.no_grad()
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's. All ranks must call it; the new parameters get buckets of their own."""
        super().add_param_group(param_group)
        parameters = self.param_groups[-1]["params"]
        if self._waiting is not None:
            self._waiting += parameters
            return
        try:
            self._place(parameters)
        except Exception:
            self.param_groups.pop()
            raise

    def _place(self, parameters: list[Tensor]) -> None:
        """Cut parameters into buckets and slices, and make the state of what this rank owns."""
        fault = next((fault for fault in map(find_group_fault, self.param_groups) if fault), None)
        for number, parameter in enumerate(parameters):
            fault = fault or find_parameter_fault(number, parameter, self._axis.rank)
        shapes = tuple(tuple(parameter.shape) for parameter in parameters)
        dtypes = tuple(parameter.dtype for parameter in parameters)
        options = _Options(shapes, dtypes, self._bucket_bytes)
        self._axis.begin("ShardedAdamW.add_param_group", options, tell=[], fault=fault).told.wait()
        for group_number, group in enumerate(self.param_groups):
            for number, parameter in enumerate(group["params"]):
                named = group["param_names"][number] if "param_names" in group else None
                self._names[parameter] = named or f"parameter {number} of group {group_number}"
        ordered = parameters[::-1]  # a backward gives the last ones first
        for bucket in fill_buckets([p.numel() * p.element_size() for p in ordered], self._bucket_bytes):
            some = [ordered[index] for index in bucket]
            self._buckets.append([])
            for parameter, ranges in zip(some, cut_bucket([p.numel() for p in some], self._axis.size), strict=True):
                self._ranges[parameter] = ranges
                self._buckets[-1] += [
                    _Piece(parameter, (start, stop), self._route(parameter, stop - start, rank))
                    for rank, (start, stop) in enumerate(ranges) if stop > start
                ]  # fmt: skip
                self.state[parameter] = self._fresh(parameter)

    def _route(self, parameter: Tensor, length: int, owner: int) -> Route:
        over = self._owners.axes
        return Route((length,), (Averaged(),) * len(over), (owner,) * len(over), parameter.dtype, parameter.device)

    def _fresh(self, parameter: Tensor) -> dict[str, Any]:
        start, stop = self._ranges[parameter][self._axis.rank]
        wide = torch.promote_types(parameter.dtype, torch.float32)
        state: dict[str, Any] = {"step": torch.tensor(0.0)}
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = torch.zeros(stop - start, dtype=wide, device=parameter.device)
        if wide != parameter.dtype:
            state["master"] = parameter.detach().reshape(-1)[start:stop].to(wide)
        return state

    def _start(self) -> None:
        parameters = list(self._names)
        fault = next((fault for fault in map(find_group_fault, self.param_groups) if fault), None)
        if not self._looked_for_wrappers and self._axis.size > 1:
            self._looked_for_wrappers, fault = True, fault or find_wrapper_fault(self._names, self._axis.rank)
        settings = tuple(str({k: v for k, v in group.items() if k in self.defaults}) for group in self.param_groups)
        findings = compare_gradients(
            "ShardedAdamW", parameters, list(self._names.values()), self._owners.axes, settings, found_inf=False,
            fault=fault,
        )  # fmt: skip
        there = {parameter for parameter, has in zip(parameters, findings.present, strict=True) if has}
        self._reason, self._under_way = findings.nonfinite, []
        for bucket in self._buckets if self._reason is None else []:
            pieces = [piece for piece in bucket if piece.parameter in there]
            grads = [_flat(piece.parameter.grad)[slice(*piece.where)] for piece in pieces]
            travel = self._owners.gather("ShardedAdamW", [piece.route for piece in pieces], grads)
            self._under_way.append(_Bucket(pieces, travel))

    def _work(self) -> None:
        scale = self._clip_scale() if self._clip is not None and self._reason is None else 1.0
        of_parameter = {p: group for group in self.param_groups for p in group["params"]}
        for bucket in self._under_way:
            grads = bucket.gradients.wait()
            mine: list[Tensor | None] = []
            for piece, grad in zip(bucket.pieces, grads, strict=True):
                mine.append(None if grad is None else self._step(piece, grad, scale, of_parameter[piece.parameter]))
            bucket.weights = self._owners.scatter("ShardedAdamW", [piece.route for piece in bucket.pieces], mine)

    def _step(self, piece: _Piece, grad: Tensor, scale: float, group: dict[str, Any]) -> Tensor:
        """The piece after the step, in its parameter's dtype."""
        state, own = self.state[piece.parameter], _flat(piece.parameter)[slice(*piece.where)]
        wide = state.get("master", own)
        grad = grad.to(wide.dtype)
        adamw(
            [wide], [grad if scale == 1 else grad * scale], [state["exp_avg"]], [state["exp_avg_sq"]], [],
            [state["step"].clone()], foreach=True, fused=False, amsgrad=False, beta1=group["betas"][0],
            beta2=group["betas"][1], lr=float(group["lr"]), weight_decay=group["weight_decay"], eps=group["eps"],
            maximize=False,
        )  # fmt: skip
        return wide.to(own.dtype)

    def _clip_scale(self) -> float:
        """What gradients are multiplied by so that their global norm is at most ``clip``."""
        assert self._clip is not None
        found = [grad for bucket in self._under_way for grad in bucket.gradients.wait() if grad is not None]
        norms = [torch.linalg.vector_norm(grad, dtype=torch.float64).cpu() for grad in found]
        mine = torch.stack([torch.zeros((), dtype=torch.float64), *norms]).norm().view(1)
        call = self._axis.begin("ShardedAdamW.clip")
        where = next(iter(self._names)).device
        self.norm = float(torch.cat(call.all_gather(mine.to(where)).wait()).norm())
        return min(1.0, self._clip / (self.norm + 1e-6))

    def _finish(self) -> str | None:
        under_way, self._under_way = self._under_way, []
        for bucket in under_way:
            assert bucket.weights is not None
            for piece, weight in zip(bucket.pieces, bucket.weights.wait(), strict=True):
                assert weight is not None
                _write(piece.parameter, piece.where, weight)
        for parameter in {piece.parameter for bucket in under_way for piece in bucket.pieces}:
            self.state[parameter]["step"] += 1
        return self._reason

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("ShardedAdamW: an optimizer with sharded state is not pickled or copied; save its state_dict()")

    # Saving and loading: whole tensors, as torch.optim.AdamW has them.

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """As torch's AdamW's, with moments (and fp32 masters) as DTensors over the ranks; all ranks must ask."""
        saved = super().state_dict()
        for group in saved["param_groups"]:
            group.update(OF_TORCH)
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        saved["state"] = dict(enumerate(save_slices(self._axis, parameters, self._ranges, self.state)))
        return saved

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's; from any number of ranks, and from ``torch.optim.AdamW``. All ranks must call it."""
        saved, given = take_apart(self, state_dict, keep_own_options(self, state_dict["param_groups"]))
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        fresh = [self._fresh(parameter) for parameter in parameters]
        states = load_slices(self._axis, parameters, self._ranges, fresh, given, self._names)
        super().load_state_dict(saved)
        self.state.update(zip(parameters, states, strict=True))


def _flat(tensor: Tensor | None) -> Tensor:
    """All elements in a row: in the same memory if that is contiguous."""
    assert tensor is not None
    return tensor.detach().reshape(-1)


def _write(parameter: Tensor, where: Range, values: Tensor) -> None:
    """Put values into a range of a flattened parameter, however it lies in memory."""
    flat = _flat(parameter)
    flat[slice(*where)] = values
    if not parameter.is_contiguous():
        parameter.copy_(flat.view(parameter.shape))
