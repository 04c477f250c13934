"""`MatrixOptimizer`: what REKLS, Muon and the others have in common: groups, owners, copies, saved states."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from weft.comm import Axis
from weft.comm.arguments import at, read, show
from weft.comm.device import outside_autocast
from weft.comm.wire import SoloWire
from weft.errors import as_fault
from weft.ops.embedding import RowTable
from weft.optim.matrix.checkpoint import check_tensors, load_tensors, save_tensors
from weft.optim.matrix.engine import MatrixEngine
from weft.optim.matrix.placement import find_boxes, find_placements
from weft.optim.matrix.plan import Placement, Plan, is_matrix
from weft.optim.matrix.planner import Piece, Planner
from weft.optim.matrix.rule import Rule, Settings
from weft.optim.step.compare import gather_verdict, join_faults
from weft.optim.step.part import find_listed_twice, find_option_fault
from weft.optim.step.state import agree_to_load, find_state_fault, first_count, take_apart
from weft.parallel.dtensor import is_dtensor, local_of

# How parameters lie here, which a loaded state does not change; and what they are cut into, which it must not.
_PLACING = ("partition_dim", "flatten")
_CUTTING = ("stacked", "split", "block_dim")


class MatrixOptimizer(MatrixEngine):
    """Matrices are stepped by a rule on the ranks that own them, everything else by AdamW.

    A subclass is one optimizer: it has a ``label``, ``settings_kind`` (the numbers of its groups), `rule_of` and, for
    options of its own, `find_own_fault`; its ``__init__`` hands the defaults of its groups to this one's.
    """

    _step_supports_amp_scaling = True  # a GradScaler leaves grad_scale and found_inf here and calls step on all ranks
    settings_kind: type[Settings] = Settings

    def __init__(
        self, params: Iterable[Any], defaults: dict[str, Any], group: Any, data_group: Any, on_nonfinite: str
    ) -> None:
        data_axis = None if data_group is None else Axis.of(data_group)
        tensor_axis = Axis.of(data_axis if group is None and data_axis is not None else group)
        self._data_only = False
        if data_axis is not None and tensor_axis.counter is data_axis.counter:
            self._data_only = data_axis.size > 1
            tensor_axis = data_axis.subset([data_axis.rank])  # weights are whole on the ranks that average
        self._begin(tensor_axis, data_axis)
        listed = find_option_fault(self.label, on_nonfinite, None, self._rank) or _list_params(
            self.label, params, self._rank
        )
        if isinstance(listed, Exception):
            self._refuse(listed)
        shared = {"algorithm": self.label.lower(), "partition_dim": None, "flatten": False, "stacked": False,
                  "split": None, "block_dim": None}  # fmt: skip
        super().__init__(listed, defaults | shared, on_nonfinite)

    def rule_of(self, group: dict[str, Any]) -> Rule:
        """What steps the matrices of a group."""
        raise NotImplementedError(f"{type(self).__name__} has no rule_of")

    def _begin(self, tensor_axis: Axis, data_axis: Axis | None) -> None:
        self._tensor_axis, self._data_axis = tensor_axis, data_axis
        self._planner = Planner()
        self._plans: dict[Tensor, list[Plan]] = {}
        self._axes: list[Axis] = []
        self._buckets = self._bucket_bytes = None
        self._under_way = []

    def _refuse(self, fault: Exception) -> NoReturn:
        """Tell all ranks, who wait for this one, that it has no parameters to add."""
        axes = [axis for axis in (self._data_axis, self._tensor_axis) if axis is not None and axis.size > 1]
        gather_verdict(axes, f"{self.label}.add_param_group", None, [], lambda axis, gathered: [], fault)
        raise AssertionError("a fault is raised")

    @torch.no_grad()
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's. All ranks must call it: they gather the shapes of their shards."""
        try:
            super().add_param_group(param_group)
        except Exception as error:  # torch's words
            self._refuse(as_fault(f"{self.label}: the parameters cannot be taken", error, at(self._rank)))
        group = self.param_groups[-1]
        try:
            self._place(len(self.param_groups) - 1, group)
        except Exception:
            self.param_groups.pop()
            raise
        for parameter in group["params"]:
            self.state[parameter] = {"step": first_count()}
            for plan in self._plans[parameter]:
                self.state[parameter] |= plan.fresh(parameter.device)

    def _place(self, place: int, group: dict[str, Any]) -> None:
        """Find out how the parameters of the ``place``-th group lie on the ranks, cut them and give them owners."""
        parameters, rank, label = group["params"], self._rank, self.label
        fault = read(label, rank, lambda: join_faults([
            self._find_fault([group]), _find_cut_fault(label, group, rank) if self._data_only else None,
            find_listed_twice(label, parameters, rank),
            *(_find_parameter_fault(label, at, parameter, group, rank) for at, parameter in enumerate(parameters)),
        ]))  # fmt: skip
        placements, axes = find_placements(label, parameters, group, self._tensor_axis, self._data_axis, fault)
        names = group.get("param_names", [f"parameter {number} of group {place}" for number in range(len(parameters))])
        pieces: list[Piece] = []
        for number, (parameter, placement) in enumerate(zip(parameters, placements, strict=True)):
            pieces += _cut(label, number, names[number], parameter, placement, group)
        plans = self._planner.plan(pieces, self.rule_of(group), self.settings_kind.of(group))
        self._axes += [axis for axis in axes if axis not in self._axes]
        self._plans |= {parameter: [] for parameter in parameters}
        for piece, plan in zip(pieces, plans, strict=True):
            self._plans[piece.parameter].append(plan)
        self._buckets = None

    def __getstate__(self) -> dict[str, Any]:
        if self._axes:
            raise TypeError(
                f"{self.label}: an optimizer over several ranks cannot be pickled, process groups cannot; save its "
                f"state_dict()"
            )
        return {**super().__getstate__(), "_on_nonfinite": self._on_nonfinite}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_on_nonfinite" in state:  # unpickled, in a world of one; torch calls this when it loads a state, too
            self._begin(Axis.over(SoloWire()), None)
            self._data_only = False
            self._set_up(state["_on_nonfinite"])
            for number, group in enumerate(self.param_groups):
                self._place(number, group)

    def __deepcopy__(self, memo: dict[int, Any]) -> MatrixOptimizer:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        torch.optim.Optimizer.__setstate__(twin, copy.deepcopy(super().__getstate__(), memo))
        twin._begin(self._tensor_axis, self._data_axis)
        twin._planner = Planner(self._planner)
        twin._set_up(self._on_nonfinite)
        twin._axes, twin._data_only = list(self._axes), self._data_only
        twin._plans = {copy.deepcopy(parameter, memo): plan for parameter, plan in self._plans.items()}
        return twin

    # Saving and loading.

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """As torch's, with whole tensors as DTensors over the ranks; all ranks must ask."""
        saved = super().state_dict()
        saved["state"] = dict(enumerate(save_tensors(self.label, self._plans, self.state, self._settings())))
        return saved

    def _take_apart(self, state_dict: Mapping[str, Any]) -> tuple[dict[str, Any], list[Mapping[str, Any] | None]]:
        groups = [dict(group) for group in state_dict["param_groups"]]
        for group, now in zip(groups, self.param_groups, strict=False):
            changed = [name for name in _CUTTING if _plain(group.get(name, now[name])) != _plain(now[name])]
            if changed:
                words = ", ".join(f"{name}={group[name]}, not {now[name]}" for name in changed)
                raise ValueError(f"{self.label}: the state was saved with {words}")
            missing = set(self.defaults) & set(now) - set(group)  # of states that earlier versions saved
            group.update({name: now[name] for name in (*_PLACING, *missing)})
        return take_apart(self, state_dict, groups)

    def check_state(self, state_dict: Mapping[str, Any]) -> None:
        """Raise if a state cannot be loaded."""
        check_tensors(self.label, self._plans, self._take_apart(state_dict)[1])

    @torch.no_grad()
    @outside_autocast()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, in fp32 for bf16 parameters, and from any number of ranks. All ranks must call it."""
        agree_to_load(self.label, self._axes, find_state_fault(self, state_dict))
        saved, given = self._take_apart(state_dict)
        loaded = load_tensors(self.label, self._plans, given)
        super().load_state_dict(saved)
        self.state.update(zip(self._plans, loaded, strict=True))


def _cut(
    label: str, number: int, name: str, parameter: Tensor, placement: Placement, group: dict[str, Any]
) -> list[Piece]:
    """The matrices of a parameter, or itself if AdamW steps it."""
    local, view = local_of(parameter), placement.local
    if not is_matrix(parameter, group):
        elements = parameter.numel() if is_dtensor(parameter) else torch.Size(placement.whole).numel()
        return [Piece(name, parameter, placement, view, "", False, elements)]
    boxes = find_boxes(label, number, placement, group)
    if len(boxes) > 1 and not local.is_contiguous() and tuple(local.shape) != view:
        raise ValueError(f"{label}: parameter {number} {list(local.shape)} must be contiguous to be cut into matrices")
    alone = len(boxes) == 1 and len(placement.whole) == 2
    return [
        Piece(
            name if alone else f"{name} {list(box)}", parameter, placement if alone else placement.within(box), view,
            "" if alone else f".{at}", True, torch.Size(stop - start for start, stop in box).numel(),
        )
        for at, box in enumerate(boxes)
    ]  # fmt: skip


def _plain(sizes: Any) -> Any:
    """A group's sizes, whatever a checkpoint has made of a tuple."""
    return list(sizes) if isinstance(sizes, tuple) else sizes


def _list_params(label: str, params: Any, rank: int) -> list[Any] | Exception:
    """``params`` as a list, or what torch's optimizers say of what is none."""
    if isinstance(params, Tensor):
        return TypeError(f"{label}: params must be an iterable of tensors or groups, got one tensor{at(rank)}")
    listed = read(label, rank, lambda: list(params))
    if isinstance(listed, Exception):
        return TypeError(f"{label}: params must be an iterable of tensors or groups, got {show(params)}{at(rank)}")
    return listed or ValueError(f"{label}: params are empty{at(rank)}")


def _find_cut_fault(label: str, group: dict[str, Any], rank: int) -> Exception | None:
    """Where weights are whole on all ranks there are: whether a shard has none to be cut over."""
    if group["partition_dim"] is None:
        return None
    return ValueError(
        f"{label}: partition_dim={group['partition_dim']} says that parameters are shards over group, but the only "
        f"ranks given are those of data_group, over which they are whole; pass both: group= the ranks that hold "
        f"the shards, data_group= those whose gradients are averaged (rank {rank})"
    )


def _find_parameter_fault(
    label: str, number: int, parameter: Tensor, group: dict[str, Any], rank: int
) -> Exception | None:
    """What is wrong with a parameter, if anything."""
    shape, where = list(parameter.shape), f"(rank {rank})"
    dim = group["partition_dim"]
    if parameter.layout != torch.strided:
        return TypeError(f"{label}: parameter {number} is {parameter.layout}, not dense {where}")
    if not parameter.is_floating_point():
        return TypeError(f"{label}: parameter {number} is {parameter.dtype}; parameters must be floating point {where}")
    if isinstance(getattr(parameter, "row_table", None), RowTable):
        return TypeError(
            f"{label}: parameter {number} is the table of a weft.ShardedEmbedding; step it with "
            f"weft.optim.RowAdam {where}"
        )
    if group["algorithm"] != "adamw" and parameter.ndim > 2 and not _is_taken(parameter, group):
        return ValueError(
            f"{label}: parameter {number} has {parameter.ndim} dimensions {shape}; put it into a group with "
            f"flatten=True (a matrix of the first by all others), stacked=True (of three dimensions, a matrix for each "
            f"index of the first) or algorithm='adamw' {where}"
        )
    if dim is not None and is_dtensor(parameter):
        return ValueError(
            f"{label}: parameter {number} is a DTensor, whose placement is read from it; leave out partition_dim={dim} "
            f"{where}"
        )
    if dim is not None and dim >= parameter.ndim:
        return ValueError(f"{label}: partition_dim={dim} is not a dimension of parameter {number} {shape} {where}")
    return None


def _is_taken(parameter: Tensor, group: dict[str, Any]) -> bool:
    """Whether a group says what a parameter of more than two dimensions is."""
    return group["flatten"] or (group["stacked"] and parameter.ndim == 3)
