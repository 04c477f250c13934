"""What a rule of a matrix optimizer is, and what rules share: the numbers of a group, Adam, decompositions.

A rule is the functions of `Rule` in a file of its own. It sees one whole matrix, on the rank that owns it. The engine
does the rest for all of them: `placement.py` says where parameters lie, `plan.py` which rank owns which matrix,
`engine.py` moves gradients and updates and sees to it that a step is made on every rank or on none, `checkpoint.py`
saves and loads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from weft.comm.arguments import find_choice_fault, find_flag_fault, find_integer_fault, find_number_fault, show
from weft.comm.device import runs_behind
from weft.optim.step.compare import join_faults
from weft.optim.step.part import find_kind_fault

T = TypeVar("T")
# A matrix of smaller entries, its sides shorter than 2^23, has products and squares that are finite.
LARGEST = {torch.float32: 2.0**40, torch.float64: 2.0**488}
Layout = dict[str, tuple[tuple[int, ...], torch.dtype]]  # of each tensor of a state: shape and dtype
State = dict[str, Any]
Advanced = tuple[State, Tensor]  # the state after a step, and the update
Advancing = Generator[State, State, Advanced]  # gives the factors that are due, and takes what is made of them
_SHRINK = {
    "decoupled": lambda lr, decay: 1 - lr * decay,
    "independent": lambda lr, decay: 1 - decay,
    "palm": lambda lr, decay: 1 - lr * lr * decay,
    "l2": lambda lr, decay: 1.0,
}
DECAY_METHODS = tuple(_SHRINK)


@dataclass(frozen=True)
class Settings:
    """One step's numbers for the parameters of a group: what AdamW needs. Rules add their own."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    weight_decay_method: str
    cautious: bool

    @classmethod
    def of(cls, group: dict[str, Any]) -> Self:
        """Read from a group; learning rates may be tensors."""
        return cls(**{one.name: _plain(group[one.name], one.type) for one in fields(cls)})

    @property
    def shrink(self) -> float:
        """What weight decay leaves of a weight, before the update."""
        return _SHRINK[self.weight_decay_method](self.lr, self.weight_decay)

    @property
    def keeps_roots(self) -> bool:
        """Whether what is made of the state may be older than that state."""
        return False

    @property
    def decays_gradient(self) -> bool:
        """Whether the decay is part of the gradient (l2), so that whoever works needs the weights too."""
        return self.weight_decay_method == "l2" and self.weight_decay != 0


def _plain(value: Any, kind: object) -> Any:
    """A number of a group as its settings hold it."""
    if isinstance(value, tuple | list):
        return tuple(_plain(one, "float" if isinstance(one, float) else "") for one in value)
    return float(value) if kind == "float" else value


@dataclass(frozen=True)
class FactorSettings(Settings):
    """Of rules with a factor for each side of a matrix, which is decomposed now and then."""

    shampoo_beta: float
    max_factor_dim: int
    root_every: int
    dense_steps: int

    @property
    def keeps_roots(self) -> bool:
        return self.root_every > 1

    def sides(self, shape: tuple[int, ...]) -> list[tuple[str, int]]:
        """The sides of a matrix that have a factor: L of its rows, R of its columns, unless there are too many."""
        return [(side, dim) for side, dim in zip("LR", shape, strict=True) if dim <= self.max_factor_dim]

    def factors(self, shape: tuple[int, ...], dtype: torch.dtype) -> Layout:
        """The layout of the factors."""
        return {side: ((dim, dim), dtype) for side, dim in self.sides(shape)}

    def keep_factor(self, number: int) -> float:
        """b_t: what the ``number``-th step leaves of a factor, with bias correction."""
        return 1 - (1 - self.shampoo_beta) / (1 - self.shampoo_beta**number)


def find_group_fault(label: str, group: dict[str, Any]) -> Exception | None:
    """All that is wrong with the numbers and options of a group that every matrix optimizer has, if anything."""
    if fault := find_kind_fault(label, group, "eps", "weight_decay"):
        return fault
    lr, eps, decay = float(group["lr"]), group["eps"], group["weight_decay"]
    (b1, b2), dim, split = group["betas"], group["partition_dim"], group["split"]
    faults: list[Exception | None] = []
    if not all(0 <= value < float("inf") for value in (lr, eps, decay)):
        words = f"lr, eps and weight_decay must be finite and not negative, got {lr}, {eps} and {decay}"
        faults.append(ValueError(f"{label}: {words}"))
    if not all(0 <= beta < 1 for beta in (b1, b2)):
        faults.append(ValueError(f"{label}: betas must be in [0, 1), got ({b1}, {b2})"))
    known = {"weight_decay_method": DECAY_METHODS, "algorithm": (label.lower(), "adamw")}
    faults += [find_choice_fault(label, name, group[name], None, choices) for name, choices in known.items()]
    faults += [find_flag_fault(label, name, group[name], None) for name in ("flatten", "stacked", "cautious")]
    if group["flatten"] is True and group["stacked"] is True:
        faults.append(ValueError(f"{label}: flatten and stacked say different things of a parameter; choose one"))
    if group["cautious"] is True and group["weight_decay_method"] == "l2":
        faults.append(ValueError(f"{label}: cautious says which weights decay; with l2 none do, gradients do"))
    dims = (0, 1, 2) if group["stacked"] is True else (0, 1)
    if dim is not None and (find_integer_fault(label, "partition_dim", dim, None) or dim not in dims):
        words = f"{', '.join(map(str, dims))} or None, got {show(dim)}"
        faults.append(ValueError(f"{label}: partition_dim must be {words}"))
    if group["block_dim"] is not None:
        faults.append(find_integer_fault(label, "block_dim", group["block_dim"], None, least=1))
    for size in split if isinstance(split, tuple | list) else [] if split is None else [split]:
        faults.append(find_integer_fault(label, "split", size, None, least=1))
    return join_faults(faults)


def find_factor_fault(label: str, group: dict[str, Any]) -> Exception | None:
    """What is wrong with the numbers of a group that factors need."""
    if fault := find_number_fault(label, "shampoo_beta", group["shampoo_beta"], None, allow="any"):
        return fault
    if not 0 <= group["shampoo_beta"] < 1:
        return ValueError(f"{label}: shampoo_beta must be in [0, 1), got {group['shampoo_beta']}")
    least = {"max_factor_dim": 0, "root_every": 1, "dense_steps": 0}
    return join_faults([find_integer_fault(label, name, group[name], None, least=at) for name, at in least.items()])


def _no_kept(shape: tuple[int, ...], dtype: torch.dtype, settings: Any) -> Layout:
    return {}


def _derive_nothing(state: State, due: Collection[str], zero: bool = False) -> None:
    """Nothing is left out of a checkpoint."""


@dataclass(frozen=True)
class Rule:
    """How the state and the update of a matrix follow from its gradient.

    ``layout(shape, dtype, settings)`` is the shape and dtype of each tensor of the state, all zero before the first
    step. ``kept(shape, dtype, settings)`` are those that `derive` makes of it: they are saved only where they are older
    than what they are made of.

    ``derive(state, due, zero=False)`` makes what is kept anew for the sides that are ``due``: the same bits as in the
    step that made these. ``zero``: there has been no step, and all is zero.

    ``advance(state, grad, weight, settings, due)`` gives the state after a step and the update, both new: the step may
    be dropped. One that decomposes is a generator: it yields the new factors that are due, by side, and is sent what
    `derive` makes of them, since that may be another rank's work. The engine subtracts ``rate(shape, settings)`` times
    the update from the weight. On a device the host must not wait: what depends on numbers there is chosen there.
    ``weight`` is given where the decay is part of the gradient (l2); it does not enter factors. ``due``: the sides
    whose factors are decomposed in this step.
    """

    layout: Callable[[tuple[int, ...], torch.dtype, Any], Layout]
    advance: Callable[[State, Tensor, Tensor | None, Any, Collection[str]], Advanced | Advancing]
    derive: Callable[..., None] = _derive_nothing
    kept: Callable[[tuple[int, ...], torch.dtype, Any], Layout] = _no_kept
    rate: Callable[[tuple[int, ...], Any], float] = lambda shape, settings: 1.0

    def made_of(self, factors: State) -> State:
        """What `derive` makes of factors, given by side."""
        state = dict(factors)
        self.derive(state, tuple(factors))
        return {name: made for name, made in state.items() if name not in factors}

    def laid_out(self, name: str, tensor: Tensor) -> Tensor:
        """What `derive` makes by this name, which comes from elsewhere, in the layout that it has here.

        Decompositions leave bases in columns, and products have other bits otherwise.
        """
        return tensor.mT.contiguous().mT if name in _in_columns(self, name[-1]) else tensor

    def advance_here(self, *args: Any) -> Advanced:
        """`advance`, with all decompositions made here and now."""
        found = self.advance(*args)
        return complete(found, self) if isinstance(found, Generator) else found


@cache
def _in_columns(rule: Rule, side: str) -> frozenset[str]:
    """The names of what a rule makes of a factor that lie in columns."""
    made = rule.made_of({side: torch.eye(2)})
    return frozenset(name for name, one in made.items() if one.ndim == 2 and one.stride(0) == 1)


@dataclass(frozen=True)
class RuleRun:
    """A rule at work on the gradient of the ``number``-th parameter.

    ``work`` yields factors once at most, is sent what is made of them, and returns the update.
    """

    number: int
    rule: Rule
    work: Generator[State, State, Tensor]
    grad: Tensor


def complete(work: Generator[State, State, T], rule: Rule) -> T:
    """What ``work`` returns, with its factors decomposed here and now."""
    try:
        factors = next(work)
        try:
            made = rule.made_of(factors)
        except EigenError as error:
            work.throw(error)
        else:
            work.send(made)
    except StopIteration as end:
        return end.value
    raise AssertionError("a rule yields once")


def adam_direction(state: State, grad: Tensor, first: Tensor, settings: Settings) -> tuple[State, Tensor]:
    """Both moments after a step from the ``first`` one, and Adam's direction: bias correction, eps outside the root."""
    b1, b2 = settings.betas
    number = int(state["step"]) + 1
    first = (first * b1).add_(grad * (1 - b1))
    second = (state["exp_avg_sq"] * b2).add_((grad * grad).mul_(1 - b2))
    root = (second / (1 - b2**number)).sqrt_().add_(settings.eps)
    return {"exp_avg": first, "exp_avg_sq": second}, (first / (1 - b1**number)).div_(root)


class EigenError(RuntimeError):
    """A factor could not be decomposed, not in fp64 either."""


def decompose(factor: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues ``[n]``, descending, and the eigenvectors ``[n, n]`` as columns of a symmetric matrix.

    One that fails is tried again in fp64. A zero matrix gets the basis that LAPACK gives it. On a device the host waits
    for the decomposition, in torch, and for nothing else: eigenvalues that are not finite make vectors of NaN there.
    """
    if not runs_behind(factor.device) and is_zero(factor):
        return zero_basis(factor)
    for dtype in (factor.dtype, torch.float64):
        try:
            values, vectors = torch.linalg.eigh(factor.to(dtype))
        except torch.linalg.LinAlgError:
            continue
        fine = torch.isfinite(values).all()
        if runs_behind(factor.device):
            found = values.flip(0).to(factor.dtype), torch.where(fine, vectors.flip(1), math.nan).to(factor.dtype)
            pairs = zip(found, zero_basis(factor), strict=True)  # laid out as the first: in columns, as on the CPU
            values, vectors = (torch.where(~is_zero(factor), other, blank) for other, blank in pairs)
            return values, vectors
        if fine:
            return values.flip(0).to(factor.dtype), vectors.flip(1).to(factor.dtype)
    raise EigenError(f"a factor of {len(factor)} x {len(factor)} could not be decomposed")


def is_zero(factor: Tensor) -> Tensor:
    """Whether all of a factor is zero: it has no negative eigenvalue, so the diagonal tells. On its device."""
    return ~factor.diagonal().any()


def zero_basis(factor: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors of a zero matrix as large as ``factor``."""
    return factor.new_zeros(len(factor)), torch.eye(len(factor), dtype=factor.dtype, device=factor.device).flip(1)


def within_range(matrix: Tensor, limit: float) -> Tensor:
    """The matrix, times a power of two where an entry is not below ``limit``, itself a power of two: then all are."""
    if not matrix.numel():
        return matrix
    exponent = torch.frexp(matrix.abs().amax().double())[1]  # the largest entry is in [2^(exponent - 1), 2^exponent)
    above = (exponent - int(math.log2(limit))).clamp_min(0).to(torch.int64)
    return matrix * ((1023 - above) << 52).view(torch.float64)  # 2^-above
