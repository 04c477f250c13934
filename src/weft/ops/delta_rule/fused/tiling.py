"""The blocks of the delta rule's own Triton kernels; for the shared ones see `weft.ops.fused.tiling`."""

from __future__ import annotations

from weft.ops.fused.tiling import Tiling, round_up

MAX_CHUNK = 64  # one program inverts the matrix of a chunk
# Of a kernel's arguments the one that has tokens, value heads and columns, [B, T, HV, columns].
SHAPED = {
    "key_pairs": "pairs", "invert_pairs": "inverse", "apply_inverse": "out", "decay_keys": "ended",
    "delta_states": "values", "add_entering": "out", "delta_state_grads": "grad_values", "join_key_grads": "y",
}  # fmt: skip


def tile(kernel: str, chunk: int, keys: int, values: int, gate: str, exact: bool) -> Tiling:
    """The blocks of ``kernel``: the largest that spill no registers. ``delta_states*`` hold all of K.

    ``exact``: inputs are fp32, and products take heads and remainders.
    """
    chunk = max(16, chunk)
    vector = gate == "vector"
    rows, wide_k, wide_v, warps = chunk, 64, 64, 4
    if kernel == "key_pairs":
        rows, wide_k, warps = (32, 32, 8) if exact else (32, 64 if keys > 64 else 32, 4) if vector else (64, 64, 8)
    elif kernel in ("delta_states", "delta_state_grads"):
        rows, wide_k, wide_v, warps = 16, round_up(keys), 32 if keys <= 128 else 16, 4 if keys <= 64 else 8
    elif kernel != "invert_pairs" and (exact or vector or kernel == "add_entering"):
        wide_k, wide_v, warps = 32, 32, 8
    return Tiling(chunk, min(rows, chunk), min(wide_k, round_up(keys)), min(wide_v, round_up(values)), warps)
