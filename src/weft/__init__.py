"""weft: distributed training operations for PyTorch whose communication runs under the computation.

Importing it imports nothing else: a name brings its part of weft, and torch, when it is first used.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from weft.parts import PARTS

if TYPE_CHECKING:
    from weft.attention import attention, head_strides
    from weft.comm import Axis, record
    from weft.embedding import BigramHashEmbedding, RowExchange, ShardedEmbedding
    from weft.linear_attention import linear_attention
    from weft.optim import REKLS, OverlappedStep, RowAdam, ShardedAdamW, StepPart, broadcast_parameters, clip_grad_norm_
    from weft.scan import exclusive_scan
    from weft.sequence import mean_loss, sequence, shard, unshard
    from weft.world import Machine, VirtualWorld, launch

__all__ = [
    "REKLS",
    "Axis",
    "BigramHashEmbedding",
    "Machine",
    "OverlappedStep",
    "RowAdam",
    "RowExchange",
    "ShardedAdamW",
    "ShardedEmbedding",
    "StepPart",
    "VirtualWorld",
    "attention",
    "broadcast_parameters",
    "clip_grad_norm_",
    "exclusive_scan",
    "head_strides",
    "launch",
    "linear_attention",
    "mean_loss",
    "record",
    "sequence",
    "shard",
    "unshard",
]
__version__ = "0.1.0"

_HOMES = {name: part for part, names in PARTS.items() for name in names}


def __getattr__(name: str) -> Any:
    """A public name, or a part such as ``weft.comm``, when it is first asked for."""
    if name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    if f"weft.{name}" in (*PARTS, "weft.errors"):
        return import_module(f"weft.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """`attention`, `linear_attention` and `sequence` are functions and also packages that define them.

    Importing a package sets it as an attribute here. The function stays, whichever was asked for first.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
