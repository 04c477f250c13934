"""pipeline (ZeCO's all-scan): a chain that passes the state in blocks, each as soon as it is ready."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.comm.rounds import Expect, Path, Round, Schedule
from weft.ops.scan.affine import Affine, Form


def pipeline(path: Path, form: Form, blocks: int | None = None) -> Schedule[Tensor | None]:
    """P+K-2 steps of 1/K of a state. A rank applies its own map, so no decay travels.

    Block k comes in round r-1+k of rank r and leaves in the next one, together with the coming of block k+1: so it
    also flows where messages stand in one line. The link to the next rank works while the next block arrives.
    """
    rank, size = path.rank, path.size
    count = form.block_count(blocks)
    whole = form.new_empty(*form.shape) if rank else None
    entering = form.cut(whole, count) if whole is not None else []
    local: Affine = yield Expect([(rank - 1 + k, rank - 1, block) for k, block in enumerate(entering)])
    pieces = local.cut(count) if rank + 1 < size else []
    leaving: list[tuple[int, Tensor]] = []
    for k in range(count):
        if rank:
            yield Round(rank - 1 + k, leaving, sends_later=True)
        elif leaving:
            yield Round(k - 1, leaving, sends_later=True)
        leaving = [(rank + 1, pieces[k].apply(entering[k] if rank else None))] if pieces else []
    if leaving:
        yield Round(rank + count - 1, leaving)
    if whole is None or form.kind != "dense":
        return whole
    return torch.cat(entering, dim=-1)
