"""Memory for gradients that is used again once nobody holds it: fresh pages cost as much as the sums put into them."""

from __future__ import annotations

import torch
from torch import Tensor


class SpareMemory:
    """One piece of memory. `take` gives it out again when all that was made of it is gone, else a new one."""

    def __init__(self) -> None:
        self._flat: Tensor | None = None
        self._holders = 0

    def take(self, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """``[rows, width]``, with anything in it.

        >>> spare = SpareMemory()
        >>> first = spare.take(2, 3, torch.float32, torch.device("cpu"))
        >>> second = spare.take(2, 3, torch.float32, torch.device("cpu"))      # the first is still held
        >>> first.data_ptr() == second.data_ptr()
        False
        >>> where = second.data_ptr()
        >>> del second
        >>> spare.take(2, 2, torch.float32, torch.device("cpu")).data_ptr() == where
        True
        """
        size, flat = rows * width, self._flat
        fits = flat is not None and flat.numel() >= size and (flat.dtype, flat.device) == (dtype, device)
        if flat is None or not fits or _holders(flat) != self._holders:
            # A little more than asked for: the next batch may touch a few more rows.
            flat = self._flat = torch.empty(size + size // 8, dtype=dtype, device=device)
            self._holders = _holders(flat)
        return flat[:size].view(rows, width)


def _holders(tensor: Tensor) -> int:
    """How many tensors share this one's memory; torch has no public name for it."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
