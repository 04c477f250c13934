"""`REKLS`: an optimizer for tensor-parallel, data-parallel and FSDP2 models; each matrix is one rank's work."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self

from torch import Tensor

from weft.comm.arguments import find_choice_fault
from weft.optim.matrix.exact import EXACT
from weft.optim.matrix.optimizer import MatrixOptimizer
from weft.optim.matrix.rule import FactorSettings, Rule, find_factor_fault
from weft.optim.matrix.stable import STABLE

VARIANTS: dict[str, Rule] = {"exact": EXACT, "stable": STABLE}
ROOT_EVERY = {"exact": 1, "stable": 5}  # where nothing is said


class _Settings(FactorSettings):
    """Of a group, with what its variant does where nothing is said."""

    @classmethod
    def of(cls, group: dict[str, Any]) -> Self:
        every = group["root_every"]
        return super().of({**group, "root_every": ROOT_EVERY[group["variant"]] if every is None else every})


class REKLS(MatrixOptimizer):
    """Matrices whitened by KL-Shampoo's factors (stable), or SOAP in their eigenbases (exact); AdamW for the rest.

    Each matrix has an owner among the ranks. Gradients go to owners, owners work, updates come back: one
    decomposition for each factor that is due in the whole world.

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

    ``variant``: "stable" is weft's own well-conditioned update, "exact" the published one (docs/matrix_optimizers.md);
    data- and context-parallel runs can follow a single process only with "stable". ``root_every``: at how many steps a
    factor is decomposed (stable: 5, exact: 1, the published), the factors of all matrices in turn, and all of them at
    the first ``dense_steps`` steps. A side over ``max_factor_dim`` is not factored. ``weight_decay_method``:
    "decoupled", "independent", "l2" or "palm"; ``cautious``: only elements decay that the update moves towards zero.

    Parameters of one dimension, and those of a group with ``"algorithm": "adamw"``, are stepped by AdamW. Further keys
    of a group: ``partition_dim``; ``flatten`` (parameters of more dimensions are matrices of the first by all others)
    or ``stacked`` (of three dimensions: a matrix for each index of the first); ``split`` and ``block_dim``, which cut a
    matrix into parts that are stepped as matrices of their own: rows into these sizes, sides to at most this length.

    A gradient that is not finite or a failed decomposition (after a second try in fp64) leaves weights and state as
    they were, on all ranks: the step raises, or with ``on_nonfinite="skip"`` is passed over and logged.

    `start`, `work` and `finish` are the three parts of a `step`, for those who want to do other things in between.

    >>> import torch
    >>> model = torch.nn.Linear(4, 3)
    >>> optimizer = REKLS(model.parameters(), lr=0.01)
    >>> model(torch.ones(2, 4)).sum().backward()
    >>> optimizer.step()
    """

    label = "REKLS"
    settings_kind = _Settings

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
        cautious: bool = False,
        variant: str = "stable",
        root_every: int | None = None,
        dense_steps: int = 20,
        max_factor_dim: int = 8192,
        group: Any = None,
        data_group: Any = None,
        on_nonfinite: str = "raise",
    ) -> None:
        defaults = {
            "lr": lr, "betas": betas, "shampoo_beta": shampoo_beta, "eps": eps, "weight_decay": weight_decay,
            "weight_decay_method": weight_decay_method, "cautious": cautious, "variant": variant,
            "max_factor_dim": max_factor_dim, "root_every": root_every, "dense_steps": dense_steps,
        }  # fmt: skip
        super().__init__(params, defaults, group, data_group, on_nonfinite)

    def rule_of(self, group: dict[str, Any]) -> Rule:
        return VARIANTS[group["variant"]]

    def find_own_fault(self, group: dict[str, Any]) -> Exception | None:
        if fault := find_choice_fault("REKLS", "variant", group["variant"], None, tuple(VARIANTS)):
            return fault
        every = ROOT_EVERY[group["variant"]] if group["root_every"] is None else group["root_every"]
        return find_factor_fault("REKLS", {**group, "root_every": every})
