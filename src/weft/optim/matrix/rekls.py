"""`REKLS`: an optimizer for tensor-parallel, data-parallel and FSDP2 models; each matrix is one rank's work."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from weft.comm import Axis
from weft.comm.arguments import at, read
from weft.comm.modes import outside_autocast
from weft.comm.wire import SoloWire
from weft.errors import as_fault
from weft.optim.matrix.checkpoint import check_tensors, load_tensors, save_tensors
from weft.optim.matrix.placement import find_cut_fault, find_parameter_fault, find_placements
from weft.optim.matrix.plan import VARIANTS, Plan, Planner, counts_here, in_waves
from weft.optim.matrix.settings import Settings, find_group_fault
from weft.optim.matrix.step import Task, Wave, find_late_change
from weft.optim.step.group_faults import find_option_fault, first_group_fault, list_params
from weft.optim.step.part import Examined, StepPart, find_listed_twice
from weft.optim.step.saved_state import agree_to_load, find_state_fault, first_count, take_apart
from weft.optim.step.verdict import gather_verdict, join_faults
from weft.parallel.dtensor import local_gradient

_PLACING = ("partition_dim", "flatten")  # what a loaded state does not change: how parameters lie here


class REKLS(StepPart):
    """SOAP in the eigenbases of KL-Shampoo's factors, for matrices; AdamW for the rest.

    Each matrix has an owner among the ranks. Gradients go to owners, owners work, updates come back: one
    eigendecomposition for each factor and step in the whole world.

    | parameter                              | placement                     | what crosses ranks                 |
    |----------------------------------------|-------------------------------|------------------------------------|
    | plain tensor, ``partition_dim`` 0 or 1 | a shard over ``group``        | gradient to the owner, update back |
    | plain tensor, ``partition_dim`` None   | the same on all of ``group``  | the update                         |
    | DTensor (tensor parallel, FSDP2, HSDP) | read from it                  | as above, over its mesh            |
    | any, with ``data_group``               | the same on all of that group | and gradients, to be averaged      |

    ``group``: the ranks that plain parameters are sharded or replicated over (None: WORLD; with ``data_group``: none).
    ``data_group``: the ranks whose gradients are still to be averaged, in rank order and at least in fp32; alone it is
    all that plain data-parallel training needs. Without it gradients must be averaged already. Shards may be uneven or
    empty. Ranks must start with the same weights: the first step compares them.

    ``variant``: "exact" is the published update, "stable" a well-conditioned one (docs/rekls.md): data- and context-
    parallel runs can follow a single process only with "stable". ``weight_decay_method``: "decoupled", "independent",
    "l2" or "palm". A side over ``max_factor_dim`` is not factored. Parameters of one dimension, and those of a group
    with ``"algorithm": "adamw"``, are stepped by AdamW. Further keys of a group: ``partition_dim``, and ``flatten`` for
    parameters of more than two dimensions (the first by all others).

    A gradient that is not finite or a failed decomposition (after a second try in fp64) leaves weights and state as
    they were, on all ranks: the step raises, or with ``on_nonfinite="skip"`` is passed over and logged.

    `start`, `work` and `finish` are the three parts of a `step`, for those who want to do other things in between.

    >>> model = torch.nn.Linear(4, 3)
    >>> optimizer = REKLS(model.parameters(), lr=0.01, variant="stable")
    >>> model(torch.ones(2, 4)).sum().backward()
    >>> optimizer.step()
    """

    _step_supports_amp_scaling = True  # a GradScaler leaves grad_scale and found_inf here and calls step on all ranks

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor,
        betas: tuple[float, float] = (0.9, 0.95),
        shampoo_beta: float = 0.95,
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        weight_decay_method: str = "decoupled",
        variant: str = "exact",
        group: Any = None,
        data_group: Any = None,
        max_factor_dim: int = 8192,
        on_nonfinite: str = "raise",
    ) -> None:
        data_axis = None if data_group is None else Axis.of(data_group)
        tensor_axis = Axis.of(data_axis if group is None and data_axis is not None else group)
        self._data_only = data_axis is not None and data_axis.size > 1 and tensor_axis.counter is data_axis.counter
        if data_axis is not None and tensor_axis.counter is data_axis.counter:
            tensor_axis = data_axis.subset([data_axis.rank])  # weights are whole on the ranks that average
        self._begin(tensor_axis, data_axis)
        listed = find_option_fault("REKLS", on_nonfinite, None, self._rank) or list_params("REKLS", params, self._rank)
        if isinstance(listed, Exception):
            self._refuse(listed)
        defaults = {
            "lr": lr, "betas": betas, "shampoo_beta": shampoo_beta, "eps": eps, "weight_decay": weight_decay,
            "weight_decay_method": weight_decay_method, "variant": variant, "max_factor_dim": max_factor_dim,
            "algorithm": "rekls", "partition_dim": None, "flatten": False,
        }  # fmt: skip
        super().__init__(listed, defaults, on_nonfinite)

    @property
    def _rank(self) -> int:
        """What this rank is called in errors."""
        return (self._data_axis or self._tensor_axis).rank

    def _refuse(self, fault: Exception) -> NoReturn:
        """Tell all ranks, who wait for this one, that it has no parameters to add."""
        axes = [axis for axis in (self._data_axis, self._tensor_axis) if axis is not None and axis.size > 1]
        gather_verdict(axes, "REKLS.add_param_group", None, [], lambda axis, told: [], fault)
        raise AssertionError("a fault is raised")

    def _begin(self, tensor_axis: Axis, data_axis: Axis | None) -> None:
        self._tensor_axis, self._data_axis = tensor_axis, data_axis
        self._planner = Planner()
        self._plans: dict[Tensor, Plan] = {}
        self._axes: list[Axis] = []
        self._in_waves: list[list[Tensor]] | None = None
        self._wave_bytes: int | None = None
        self._under_way: list[Wave] = []

    @torch.no_grad()
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's. All ranks must call it: they tell each other the shapes of their shards."""
        try:
            super().add_param_group(param_group)
        except Exception as error:  # torch's words
            self._refuse(as_fault("REKLS: the parameters cannot be taken", error, at(self._rank)))
        group = self.param_groups[-1]
        try:
            self._place(len(self.param_groups) - 1, group)
        except Exception:
            self.param_groups.pop()
            raise
        for parameter in group["params"]:
            self.state[parameter] = {"step": first_count(), **self._plans[parameter].fresh(parameter.device)}

    def _place(self, place: int, group: dict[str, Any]) -> None:
        """Find out how the parameters of the ``place``-th group lie on the ranks, and give them owners."""
        parameters, rank = group["params"], self._rank
        fault = read("REKLS", rank, lambda: join_faults([
            self._find_fault([group]), find_cut_fault(group, rank) if self._data_only else None,
            find_listed_twice("REKLS", parameters, rank),
            *(find_parameter_fault(number, parameter, group, rank) for number, parameter in enumerate(parameters)),
        ]))  # fmt: skip
        placements, axes = find_placements(parameters, group, self._tensor_axis, self._data_axis, fault)
        self._axes += [axis for axis in axes if axis not in self._axes]
        numbers = [f"parameter {number} of group {place}" for number in range(len(parameters))]
        plans = self._planner.plan(parameters, group.get("param_names", numbers), placements, group)
        self._plans.update(zip(parameters, plans, strict=True))
        self._in_waves = None

    def _find_fault(self, groups: list[dict[str, Any]]) -> Exception | None:
        return first_group_fault("REKLS", groups, lambda group: find_group_fault(group, tuple(VARIANTS)), self._rank)

    # The verbs of a part.

    def step_axes(self) -> list[Axis]:
        """All axes that a parameter lies on."""
        return list(self._axes)

    def cut(self, bucket_bytes: int) -> None:
        """Waves in which an owner gets about so many bytes of gradients."""
        self._wave_bytes, self._in_waves = bucket_bytes, None

    def buckets(self) -> list[list[Tensor]]:
        """Waves: what does not travel, then matrices whose pieces travel together."""
        if self._in_waves is None:
            parameters = [parameter for group in self.param_groups for parameter in group["params"]]
            waves = in_waves([self._plans[parameter] for parameter in parameters], self._wave_bytes)
            self._in_waves = [[parameters[index] for index in wave] for wave in waves]
        return self._in_waves

    def replicated_over(self, parameter: Tensor) -> list[Axis]:
        """Where it is the same, or averaged."""
        return self._plans[parameter].placement.whole_over

    def examine(self) -> Examined:
        """Which gradients are here; those of replicated parameters must be the same over ``group``."""
        found = super().examine()
        found.names = [self._plans[parameter].name for parameter in found.parameters]
        found.fault = self._find_fault(self.param_groups) or found.fault
        if found.fault is None:
            found.settings = tuple(Settings.of(group) for group in self.param_groups)
            found.fault = find_late_change(self._under_way, self.param_groups)
        found.alike = [self._tensor_axis if self._plans[p].replicated else None for p in found.parameters]
        return found

    def begin(self, present: Collection[Tensor]) -> None:
        """Take what has gradients, in waves."""
        super().begin(present)
        settings = {p: Settings.of(group) for group in self.param_groups for p in group["params"]}
        self._under_way = [
            Wave([Task(p, self._plans[p], settings[p]) for p in wave if p in present]) for wave in self.buckets()
        ]

    def gradient_of(self, parameter: Tensor) -> Tensor:
        """Also of a DTensor whose ranks' gradients are still to be added up."""
        return super().gradient_of(parameter) if parameter.grad is None else local_gradient(parameter)

    def send(self, bucket: int) -> None:
        """Start the gradients of a wave to their owners."""
        wave = self._under_way[bucket]
        if wave.tasks:
            wave.send([self.gradient_of(task.parameter) for task in wave.tasks])

    def travels(self, bucket: int) -> bool:
        """Not where every rank steps its own elements."""
        return self._under_way[bucket].travels

    def advance(self, bucket: int) -> None:
        """Over data x tensor ranks gradients and updates travel in two hops."""
        self._under_way[bucket].advance()

    def squared_norm(self, bucket: int) -> Tensor:
        """Of the whole gradients this rank owns; of what every rank steps alone, each element once."""
        wave, squares = self._under_way[bucket], torch.zeros((), dtype=torch.float64)
        for task, grad in zip(wave.tasks, wave.arrive() if wave.tasks else [], strict=True):
            if grad is not None and counts_here(task.plan, task.parameter, self._axes):
                squares += torch.linalg.vector_norm(grad, dtype=torch.float64).square().cpu()
        return squares

    def work_on(self, bucket: int, scale: float) -> None:
        """Decompositions, projections and Adam for the matrices of a wave that this rank owns."""
        wave = self._under_way[bucket]
        if wave.tasks:
            groups = {p: group for group in self.param_groups for p in group["params"]}
            for task in wave.tasks:  # gradients may have left before a scheduler changed the rate
                now = Settings.of(groups[task.parameter])
                if now.decays_gradient == task.settings.decays_gradient:  # else `examine` tells
                    task.settings = now
            numbers = {id(plan): number for number, plan in enumerate(self._plans.values())}
            wave.work(self.state, scale, lambda plan, *how: self.attempt(numbers[id(plan)], *how))
            if wave.failed is not None and not self.failed:
                self.failed = 1 + numbers[id(wave.failed)]

    def commit(self, accepted: bool) -> None:
        """Apply the updates that come back, and keep the owned states."""
        under_way, self._under_way = self._under_way, []
        for wave in under_way:
            wave.commit(self.state, accepted)

    # Saving, loading, copying.

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """As torch's, with whole tensors as DTensors over the ranks; all ranks must ask."""
        saved = super().state_dict()
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        saved["state"] = dict(enumerate(save_tensors(parameters, self._plans, self.state)))
        return saved

    def _take_apart(self, state_dict: Mapping[str, Any]) -> tuple[dict[str, Any], list[Mapping[str, Any] | None]]:
        groups = [dict(group) for group in state_dict["param_groups"]]
        for group, now in zip(groups, self.param_groups, strict=False):
            group.update({name: now[name] for name in _PLACING})
        return take_apart(self, state_dict, groups)

    def check_state(self, state_dict: Mapping[str, Any]) -> None:
        """Raise if a state cannot be loaded."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for parameter, values in zip(parameters, self._take_apart(state_dict)[1], strict=True):
            check_tensors(parameter, self._plans[parameter], values)

    @torch.no_grad()
    @outside_autocast()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, in fp32 for bf16 parameters, and from any number of ranks. All ranks must call it."""
        agree_to_load("REKLS", self._axes, find_state_fault(self, state_dict))
        saved, given = self._take_apart(state_dict)
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        loaded = load_tensors(parameters, self._plans, given)
        super().load_state_dict(saved)
        for parameter, state in zip(parameters, loaded, strict=True):
            self.state[parameter] = state

    def __getstate__(self) -> dict[str, Any]:
        if self._axes:
            raise TypeError(
                "REKLS: an optimizer over several ranks cannot be pickled, process groups cannot; save its state_dict()"
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

    def __deepcopy__(self, memo: dict[int, Any]) -> REKLS:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        torch.optim.Optimizer.__setstate__(twin, copy.deepcopy(super().__getstate__(), memo))
        twin._begin(self._tensor_axis, self._data_axis)
        twin._set_up(self._on_nonfinite)
        twin._axes, twin._data_only = list(self._axes), self._data_only
        twin._plans = {copy.deepcopy(parameter, memo): plan for parameter, plan in self._plans.items()}
        return twin
