"""Rule 8 of `weft.world.nccl`: the host does not read received integers."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from weft.errors import NcclRuleError
from weft.world.nccl import NcclLines

_READS = {
    torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.__int__, torch.Tensor.__bool__, torch.Tensor.__index__,
    torch.Tensor.numpy,
}  # fmt: skip


class HostReads(TorchFunctionMode):
    """Rule 8: finds the host reading received integers. Active in every thread of such a world."""

    def __init__(self, lines: NcclLines, rank: int) -> None:
        super().__init__()
        self._lines, self._rank = lines, rank

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS:
            tensor = args[0]
            if not tensor.is_meta and tensor.untyped_storage().data_ptr() in self._lines.received_integers:
                raise NcclRuleError(
                    f"NCCL rule 8: rank {self._rank} reads received integers {list(tensor.shape)} on the host; tell "
                    f"them over the CPU side"
                )
        return func(*args, **(kwargs or {}))
