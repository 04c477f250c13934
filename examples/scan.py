"""A distributed scan on real processes, in a virtual world and in virtual time.

python examples/scan.py
"""

from __future__ import annotations

import torch

import weft


def my_rank(axis: weft.Axis) -> float:
    """Each rank holds one state and forgets a little of what entered it; what enters rank r?"""
    state = torch.ones(8, 64, 64, requires_grad=True)
    log_decay = torch.full((8,), -0.01)
    entering = weft.exclusive_scan(state, log_decay=log_decay, group=axis, method="doubling")
    entering.sum().backward()  # the suffix scan, by the same schedule
    return entering[0, 0, 0].item()


if __name__ == "__main__":
    print("4 Gloo processes:", weft.launch(my_rank, 4))
    print("8 virtual ranks: ", weft.world.VirtualWorld(8).run(my_rank).results)
    machine = weft.world.Machine(latency=5e-6, bandwidth=25e9)
    for method in ("ring", "doubling", "transpose"):
        run = weft.world.VirtualWorld(256, machine).run(
            lambda axis, method=method: weft.exclusive_scan(
                torch.empty(8, 64, 64, device="meta"), group=axis, method=method
            )
        )
        print(f"256 ranks in virtual time, {method}: {run.elapsed * 1e6:.0f} us, {run.timeline.rounds} rounds")
