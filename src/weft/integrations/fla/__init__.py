"""weft's operations under the names and arguments of flash-linear-attention, so that a program changes its imports.

    from weft.integrations.fla import chunk_gated_delta_rule

Each takes what fla-core 0.6.0 takes, in its order and with its defaults, and besides by keyword ``group``, ``layout``,
``method`` and ``sequence`` of weft: tensors are this rank's tokens, `cu_seqlens` the boundaries in the whole sequence.
Keywords that cannot be honoured (`cp_context`, `chunk_indices`, ...) are refused by name, on every rank alike. fla is
not imported, and need not be installed.
"""

from weft.integrations.fla.conv import causal_conv1d
from weft.integrations.fla.delta import chunk_delta_rule, chunk_gated_delta_rule, chunk_kda
from weft.integrations.fla.gla import chunk_gla, chunk_simple_gla

__all__ = [
    "causal_conv1d",
    "chunk_delta_rule",
    "chunk_gated_delta_rule",
    "chunk_gla",
    "chunk_kda",
    "chunk_simple_gla",
]
