"""`REKLS`: an optimizer for tensor-parallel, data-parallel and FSDP2 models; each matrix is one rank's work."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor

from weft.comm import Axis
from weft.comm.arguments import at, find_choice_fault, find_flag_fault, find_integer_fault, read, show
from weft.comm.wire import SoloWire
from weft.errors import as_fault
from weft.ops.embedding import RowTable
from weft.optim.matrix.engine import MatrixOptimizer
from weft.optim.matrix.plan import RULES, find_placements
from weft.optim.matrix.rule import DECAY_METHODS
from weft.optim.step.compare import gather_verdict, join_faults
from weft.optim.step.part import find_kind_fault, find_listed_twice, find_option_fault, first_group_fault
from weft.optim.step.state import first_count
from weft.parallel.dtensor import is_dtensor


class REKLS(MatrixOptimizer):
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
        self._data_only = False
        if data_axis is not None and tensor_axis.counter is data_axis.counter:
            self._data_only = data_axis.size > 1
            tensor_axis = data_axis.subset([data_axis.rank])  # weights are whole on the ranks that average
        self._begin(tensor_axis, data_axis)
        listed = find_option_fault("REKLS", on_nonfinite, None, self._rank) or _list_params(params, self._rank)
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
        gather_verdict(axes, "REKLS.add_param_group", None, [], lambda axis, gathered: [], fault)
        raise AssertionError("a fault is raised")

    @torch.no_grad()
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's. All ranks must call it: they gather the shapes of their shards."""
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
            self._find_fault([group]), _find_cut_fault(group, rank) if self._data_only else None,
            find_listed_twice("REKLS", parameters, rank),
            *(_find_parameter_fault(number, parameter, group, rank) for number, parameter in enumerate(parameters)),
        ]))  # fmt: skip
        placements, axes = find_placements(parameters, group, self._tensor_axis, self._data_axis, fault)
        self._axes += [axis for axis in axes if axis not in self._axes]
        numbers = [f"parameter {number} of group {place}" for number in range(len(parameters))]
        plans = self._planner.plan(parameters, group.get("param_names", numbers), placements, group)
        self._plans.update(zip(parameters, plans, strict=True))
        self._buckets = None

    def _find_fault(self, groups: list[dict[str, Any]]) -> Exception | None:
        return first_group_fault("REKLS", groups, _find_group_fault, self._rank)

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


def _list_params(params: Any, rank: int) -> list[Any] | Exception:
    """``params`` as a list, or what torch's optimizers say of what is none."""
    if isinstance(params, Tensor):
        return TypeError(f"REKLS: params must be an iterable of tensors or groups, got one tensor{at(rank)}")
    listed = read("REKLS", rank, lambda: list(params))
    if isinstance(listed, Exception):
        return TypeError(f"REKLS: params must be an iterable of tensors or groups, got {show(params)}{at(rank)}")
    return listed or ValueError(f"REKLS: params are empty{at(rank)}")


def _find_group_fault(group: dict[str, Any]) -> Exception | None:
    """All that is wrong with a parameter group's numbers and options, if anything."""
    if fault := find_kind_fault("REKLS", group, "eps", "weight_decay", "shampoo_beta"):
        return fault
    lr, eps, decay, shampoo_beta = float(group["lr"]), group["eps"], group["weight_decay"], group["shampoo_beta"]
    (b1, b2), dim = group["betas"], group["partition_dim"]
    faults: list[Exception | None] = []
    if not all(0 <= value < float("inf") for value in (lr, eps, decay)):
        words = f"lr, eps and weight_decay must be finite and not negative, got {lr}, {eps} and {decay}"
        faults.append(ValueError(f"REKLS: {words}"))
    if not all(0 <= beta < 1 for beta in (b1, b2, shampoo_beta)):
        words = f"betas and shampoo_beta must be in [0, 1), got ({b1}, {b2}) and {shampoo_beta}"
        faults.append(ValueError(f"REKLS: {words}"))
    known = {"weight_decay_method": DECAY_METHODS, "variant": tuple(RULES), "algorithm": ("rekls", "adamw")}
    faults += [find_choice_fault("REKLS", name, group[name], None, choices) for name, choices in known.items()]
    faults.append(find_integer_fault("REKLS", "max_factor_dim", group["max_factor_dim"], None, least=0))
    if dim is not None and (find_integer_fault("REKLS", "partition_dim", dim, None) or dim not in (0, 1)):
        faults.append(ValueError(f"REKLS: partition_dim must be 0, 1 or None, got {show(dim)}"))
    faults.append(find_flag_fault("REKLS", "flatten", group["flatten"], None))
    return join_faults(faults)


def _find_cut_fault(group: dict[str, Any], rank: int) -> Exception | None:
    """Where weights are whole on all ranks there are: whether a shard has none to be cut over."""
    if group["partition_dim"] is None:
        return None
    return ValueError(
        f"REKLS: partition_dim={group['partition_dim']} says that parameters are shards over group, but the only "
        f"ranks given are those of data_group, over which they are whole; pass both: group= the ranks that hold "
        f"the shards, data_group= those whose gradients are averaged (rank {rank})"
    )


def _find_parameter_fault(number: int, parameter: Tensor, group: dict[str, Any], rank: int) -> Exception | None:
    """What is wrong with a parameter, if anything."""
    shape, where = list(parameter.shape), f"(rank {rank})"
    dim = group["partition_dim"]
    if parameter.layout != torch.strided:
        return TypeError(f"REKLS: parameter {number} is {parameter.layout}, not dense {where}")
    if not parameter.is_floating_point():
        return TypeError(f"REKLS: parameter {number} is {parameter.dtype}; parameters must be floating point {where}")
    if isinstance(getattr(parameter, "row_table", None), RowTable):
        return TypeError(
            f"REKLS: parameter {number} is the table of a weft.ShardedEmbedding; step it with "
            f"weft.optim.RowAdam {where}"
        )
    if group["algorithm"] == "rekls" and parameter.ndim > 2 and not group["flatten"]:
        return ValueError(
            f"REKLS: parameter {number} has {parameter.ndim} dimensions {shape}; put it into a group with flatten=True "
            f"(a matrix of the first by all others) or algorithm='adamw' {where}"
        )
    if dim is not None and is_dtensor(parameter):
        return ValueError(
            f"REKLS: parameter {number} is a DTensor, whose placement is read from it; leave out partition_dim={dim} "
            f"{where}"
        )
    if dim is not None and dim >= parameter.ndim:
        return ValueError(f"REKLS: partition_dim={dim} is not a dimension of parameter {number} {shape} {where}")
    return None
