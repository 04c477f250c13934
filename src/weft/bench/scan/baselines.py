"""The floor of `weft bench scan`: each schedule written by hand for Gloo, with nothing around it.

The same rounds and bytes as weft's methods, for one kind of map (states ``[N, K, V]`` with a log decay
``[N]``), straight on the process group's send and recv: no checks, no ledger, no gradient, no other decay.
A method of weft is measured against its function here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Line:
    """Rank and size of a process group, and its point-to-point calls with ever new tags."""

    def __init__(self, group: Any) -> None:
        self.group, self.rank, self.size, self.tag = group, group.rank(), group.size(), 1 << 30

    def put(self, tensor: Tensor, peer: int, number: int = 0) -> Any:
        return self.group.send([tensor], peer, self.tag + number)

    def get(self, tensor: Tensor, peer: int, number: int = 0) -> Any:
        return self.group.recv([tensor], peer, self.tag + number)


def chain(line: Line, state: Tensor, log: Tensor, blocks: int) -> Tensor:
    """Ring with one block, pipeline with several: blocks of rows."""
    rows = state.view(-1, state.shape[-1])
    decay = log.exp().repeat_interleave(state.shape[1]).unsqueeze(1)
    entering = torch.zeros_like(rows) if line.rank == 0 else torch.empty_like(rows)
    parts = list(entering.tensor_split(blocks))
    mine = list(rows.tensor_split(blocks))
    factors = decay.tensor_split(blocks)
    if line.rank > 0:
        arriving = [line.get(part, line.rank - 1, number) for number, part in enumerate(parts)]
    sent = []
    for number in range(blocks):
        if line.rank > 0:
            arriving[number].wait()
        if line.rank + 1 < line.size:
            out = torch.addcmul(mine[number], factors[number], parts[number]) if line.rank else mine[number]
            sent.append((out, line.put(out, line.rank + 1, number)))
    for _, work in sent:
        work.wait()
    return entering.view(state.shape)


def gather(line: Line, state: Tensor, log: Tensor) -> Tensor:
    """Every map to every later rank, then a weighted sum."""
    mine, count = torch.cat([state.view(-1), log]), state.numel()
    maps = mine.new_empty(line.rank, len(mine))
    works = [line.get(maps[peer], peer) for peer in range(line.rank)]
    works += [line.put(mine, peer) for peer in range(line.rank + 1, line.size)]
    for work in works:
        work.wait()
    if line.rank == 0:
        return torch.zeros_like(state)
    after = torch.zeros(line.rank, len(log))
    after[:-1] = maps[1:, count:].flip(0).cumsum(0).flip(0)
    return torch.einsum("rn,rne->ne", after.exp(), maps[:, :count].view(line.rank, len(log), -1)).view(state.shape)


def doubling(line: Line, state: Tensor, log: Tensor) -> Tensor:
    """Recursive doubling with a window ending here and one ending just before."""
    count = state.numel()
    window, before = torch.cat([state.view(-1), log]), None
    step = 1
    while step < line.size:
        last = 2 * step >= line.size
        works = []
        if line.rank >= step:
            earlier = torch.empty_like(window)
            works.append(line.get(earlier[:count] if last else earlier, line.rank - step, step))
        if line.rank + step < line.size:
            works.append(line.put(window[:count] if last else window, line.rank + step, step))
        for work in works:
            work.wait()
        if line.rank >= step:
            before, window = _after(earlier, before, state), window if last else _after(earlier, window, state)
        step *= 2
    return torch.zeros_like(state) if before is None else before[:count].view(state.shape)


def _after(earlier: Tensor, later: Tensor | None, like: Tensor) -> Tensor:
    """The map ``later`` applied after ``earlier``, both flat."""
    if later is None:
        return earlier
    count, out = like.numel(), torch.empty_like(later)
    decay = later[count:].exp().view(-1, 1)
    shape = (len(decay), -1)
    torch.addcmul(later[:count].view(shape), decay, earlier[:count].view(shape), out=out[:count].view(shape))
    torch.add(earlier[count:], later[count:], out=out[count:])
    return out


def tree(line: Line, state: Tensor, log: Tensor) -> Tensor:
    """Up-sweep of maps, down-sweep of states, shift."""
    rank, size, count = line.rank, line.size, state.numel()
    window, step = torch.cat([state.view(-1), log]), 1
    while step < size:
        if rank % (2 * step) == 2 * step - 1:
            earlier = torch.empty_like(window)
            line.get(earlier, rank - step, step).wait()
            window = _after(earlier, window, state)
        elif rank % (2 * step) == step - 1 and rank + step < size:
            line.put(window, rank + step, step).wait()
        step *= 2
    prefix = window[:count]
    while step > 1:
        step //= 2
        if rank % (2 * step) == 2 * step - 1 and rank + step < size:
            line.put(prefix, rank + step, size + step).wait()
        elif rank % (2 * step) == step - 1 and rank >= step:
            earlier = torch.empty_like(prefix)
            line.get(earlier, rank - step, size + step).wait()
            shape = (len(log), -1)
            prefix = torch.addcmul(prefix.view(shape), window[count:].exp().view(-1, 1), earlier.view(shape)).view(-1)
    entering = torch.zeros_like(prefix)
    works = [line.get(entering, rank - 1, 3 * size)] if rank else []
    works += [line.put(prefix, rank + 1, 3 * size)] if rank + 1 < size else []
    for work in works:
        work.wait()
    return entering.view(state.shape)


def transpose(line: Line, state: Tensor, log: Tensor) -> Tensor:
    """Slices of elements out, prefixes of them back."""
    rank, size, flat = line.rank, line.size, state.view(-1)
    share = flat.numel() // len(log)
    bounds = [flat.numel() * owner // size for owner in range(size + 1)]
    logs = [(bounds[o] // share, -(-bounds[o + 1] // share)) for o in range(size)]
    slices = [torch.cat([flat[bounds[o] : bounds[o + 1]], log[slice(*logs[o])]]) for o in range(size)]
    maps = flat.new_empty(size - 1, len(slices[rank]))
    works = [line.get(maps[peer], peer) for peer in range(size - 1) if peer != rank]
    if rank < size - 1:
        maps[rank] = slices[rank]
        works += [line.put(slices[peer], peer) for peer in range(size) if peer != rank]
    for work in works:
        work.wait()
    count, offset = bounds[rank + 1] - bounds[rank], bounds[rank] % share
    decays = maps[:, count:].repeat_interleave(share, dim=1)[:, offset : offset + count].exp()
    prefixes = maps[:, :count].clone()
    for row in range(1, size - 1):
        prefixes[row].addcmul_(decays[row], prefixes[row - 1])
    entering = torch.zeros_like(flat)
    works = [line.put(prefixes[peer - 1], peer, 1) for peer in range(1, size) if peer != rank]
    if rank > 0:
        entering[bounds[rank] : bounds[rank + 1]] = prefixes[rank - 1]
        works += [line.get(entering[bounds[p] : bounds[p + 1]], p, 1) for p in range(size) if p != rank]
    for work in works:
        work.wait()
    return entering.view(state.shape)


# By weft's name: a method that is not here is measured without a floor.
METHODS: dict[str, Callable[[Line, Tensor, Tensor, int], Tensor]] = {
    "ring": lambda line, state, log, blocks: chain(line, state, log, 1),
    "pipeline": chain,
    "gather": lambda line, state, log, blocks: gather(line, state, log),
    "doubling": lambda line, state, log, blocks: doubling(line, state, log),
    "tree": lambda line, state, log, blocks: tree(line, state, log),
    "transpose": lambda line, state, log, blocks: transpose(line, state, log),
}


def scan(line: Line, method: str, state: Tensor, log: Tensor, blocks: int) -> Tensor:
    """The hand-written version of ``method``."""
    line.tag += 1 << 12
    return METHODS[method](line, state, log, blocks)
