"""Fine-tune a small Llama on the standard library's text, each sequence cut over 2 ranks.

python examples/transformers_context_parallel.py
torchrun --nproc-per-node 2 examples/transformers_context_parallel.py
accelerate launch --cpu --num_processes 2 examples/transformers_context_parallel.py
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

import weft
from weft.integrations.transformers import ContextParallel

LENGTH, ROWS, RATE = 509, 2, 3e-3  # any length: it need not be a multiple of the ranks


def make_model() -> LlamaForCausalLM:
    """Random, the same everywhere. A token is a byte."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, num_key_value_heads=2, **sizes))


def batch(step: int) -> dict[str, Tensor]:
    """Every rank reads the whole batch."""
    text = torch.frombuffer(bytearray(Path(os.__file__).read_bytes()), dtype=torch.uint8).long()
    ids = text[step * LENGTH * ROWS :][: LENGTH * ROWS].view(ROWS, LENGTH)
    return {"input_ids": ids, "labels": ids}


def train_alone(steps: int) -> list[float]:
    """transformers as it comes: what the ranks must find too."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    losses = []
    for step in range(steps):
        loss = model(**batch(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train(_: weft.Axis | None, steps: int) -> list[float]:
    """One rank of a context group that is the whole world."""
    model = make_model()
    cp = ContextParallel(layout="zigzag")  # with other kinds of ranks beside it: ContextParallel(mesh["cp"])
    cp.enable(model)
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    losses = []
    for step in range(steps):
        share = wrapped(**cp.shard(batch(step))).loss  # this rank's share of the mean
        loss = weft.mean_loss(share, group=cp.axis)  # the mean, with the gradient that DDP's averaging makes right
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    if "RANK" in os.environ:  # started by a launcher
        dist.init_process_group("gloo")
    found = train(None, 8) if dist.is_initialized() else weft.launch(train, 2, 8)[0]
    if os.environ.get("RANK", "0") == "0":
        for step, (shared, alone) in enumerate(zip(found, train_alone(8), strict=True)):
            assert abs(shared - alone) < 1e-3 * alone, "the loss on the ranks is not that of one process"
            print(f"step {step}: loss {shared:.4f} on the ranks, {alone:.4f} in one process")
