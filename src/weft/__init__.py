"""weft: distributed training operations for PyTorch whose communication runs under the computation.

Operations and modules are here, optimizers in `weft.optim`, virtual worlds and machines in `weft.world`. Importing weft
imports nothing else: a name brings its package, and torch, when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any
from warnings import warn

from weft.parts import MOVED, PACKAGES, PUBLIC

if TYPE_CHECKING:
    from weft import optim, world
    from weft.comm import Axis, record
    from weft.ops.attention import attention, head_strides
    from weft.ops.delta_rule import delta_rule
    from weft.ops.embedding import BigramHashEmbedding, RowExchange, ShardedEmbedding
    from weft.ops.linear_attention import linear_attention
    from weft.ops.mamba2 import mamba2
    from weft.ops.scan import exclusive_scan
    from weft.ops.selective_scan import selective_scan
    from weft.ops.sequence import Mask, Sequence, mean_loss, sequence, shard, unshard
    from weft.ops.short_conv import short_conv
    from weft.optim import broadcast_parameters, clip_grad_norm_
    from weft.world import launch

__all__ = [
    "Axis",
    "BigramHashEmbedding",
    "Mask",
    "RowExchange",
    "Sequence",
    "ShardedEmbedding",
    "attention",
    "broadcast_parameters",
    "clip_grad_norm_",
    "delta_rule",
    "exclusive_scan",
    "head_strides",
    "launch",
    "linear_attention",
    "mamba2",
    "mean_loss",
    "optim",
    "record",
    "selective_scan",
    "sequence",
    "shard",
    "short_conv",
    "unshard",
    "world",
]
__version__ = "0.1.0"

_HOMES = {name: package for package, names in PUBLIC.items() for name in names}
_MOVED = {name: package for package, names in MOVED.items() for name in names}


def __getattr__(name: str) -> Any:
    """A public name, or a package such as ``weft.optim``, when it is first asked for."""
    if name in _HOMES:
        value = globals()[name] = getattr(import_module(_HOMES[name]), name)
        return value
    if name in _MOVED:
        warn(f"weft.{name} is now {_MOVED[name]}.{name}; the old name goes with 0.3", DeprecationWarning, stacklevel=2)
        return getattr(import_module(_MOVED[name]), name)
    if name in PACKAGES:
        return import_module(f"weft.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
