"""The operations: each family of them in a package of its own, over sequences that ranks share.

A package is imported when it is first asked for, as ``weft.ops.scan`` or by ``import``.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

_FAMILIES = (
    "attention",
    "delta_rule",
    "embedding",
    "linear_attention",
    "mamba2",
    "scan",
    "selective_scan",
    "sequence",
    "short_conv",
)


def __getattr__(name: str) -> ModuleType:
    """A family, when it is first asked for."""
    if name not in _FAMILIES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"weft.ops.{name}")
