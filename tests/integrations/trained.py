"""Training with transformers' Trainer, in one process as it comes, and context-parallel on Gloo ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tiny import VOCABULARY, loss_in_full, make_model
from torch import Tensor, nn

import weft

SAMPLES = 10


class Texts(torch.utils.data.Dataset[dict[str, list[int]]]):
    """Samples of several lengths."""

    def __init__(self) -> None:
        make = torch.Generator().manual_seed(3)
        lengths = torch.randint(4, 40, (SAMPLES,), generator=make).tolist()
        self.samples = [torch.randint(3, VOCABULARY, (n,), generator=make).tolist() for n in lengths]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return {"input_ids": self.samples[index]}


def collate(samples: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """Whole batches, padded on the right."""
    rows = [torch.tensor(sample["input_ids"]) for sample in samples]
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, 0] = -100  # nobody's target, but Trainer of 4.57 counts it as one
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def full_loss(
    logits: Tensor, labels: Tensor, shift_labels: Any = None, num_items_in_batch: Any = None, **_: Any
) -> Any:
    """transformers' loss in fp64, so that what remains is due to the ranks."""
    if shift_labels is None:
        shift_labels = nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    return loss_in_full(logits, shift_labels, num_items_in_batch)


def arguments(folder: str | Path, batch_size: int, **changes: Any) -> Any:
    from transformers import TrainingArguments

    return TrainingArguments(
        **{
            "output_dir": str(folder),
            "per_device_train_batch_size": batch_size, "per_device_eval_batch_size": batch_size,
            "gradient_accumulation_steps": 2, "max_steps": 2, "gradient_checkpointing": True, "use_cpu": True,
            "learning_rate": 1e-3, "lr_scheduler_type": "constant", "report_to": [], "save_strategy": "no",
            "logging_steps": 1, "disable_tqdm": True, "prediction_loss_only": True, **changes,
        }
    )  # fmt: skip


Trained = tuple[dict[str, Tensor], list[float]]  # the weights; the losses logged, the last of an evaluation


def train(model: Any, args: Any, collator: Any, loader: Any) -> Trained:
    """``loader(dataset, batch_size)`` reads the data in an order that is the same for any number of ranks."""
    from transformers import Trainer

    class WithLoader(Trainer):
        def get_train_dataloader(self) -> Any:
            return loader(self.train_dataset, self.args.per_device_train_batch_size, self.data_collator, True)

        def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
            return loader(self.eval_dataset, self.args.per_device_eval_batch_size, self.data_collator, False)

    trainer = WithLoader(model=model, args=args, train_dataset=Texts(), eval_dataset=Texts(), data_collator=collator)
    trainer.train()
    trainer.evaluate()
    losses = [entry[name] for entry in trainer.state.log_history for name in ("loss", "eval_loss") if name in entry]
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}, losses


def train_alone(name: str, folder: str | Path, batch_size: int) -> Trained:
    """One process, SDPA, transformers' own ways; only the order of samples is given."""
    from torch.utils.data import DistributedSampler

    def loader(dataset: Any, size: int, collator: Any, shuffle: bool) -> Any:
        sampler = DistributedSampler(dataset, 1, 0, shuffle=shuffle, seed=5, drop_last=False)
        return torch.utils.data.DataLoader(dataset, size, sampler=sampler, collate_fn=collator)

    model = make_model(name)
    model.loss_function = full_loss
    return train(model, arguments(folder, batch_size), collate, loader)


def train_shared(axis: weft.Axis, name: str, folder: str, batch_size: int, data_size: int, changes: Any) -> Trained:
    """A rank of data_size x context ranks."""
    from torch.distributed.device_mesh import init_device_mesh

    from weft.integrations.transformers import ContextParallel

    mesh = init_device_mesh("cpu", (data_size, axis.size // data_size), mesh_dim_names=("dp", "cp"))
    with as_torchrun(axis):
        cp = ContextParallel(mesh["cp"], layout="zigzag")
        model = make_model(name)
        model.loss_function = full_loss
        cp.enable(model)

        def loader(dataset: Any, size: int, collator: Any, shuffle: bool) -> Any:
            return cp.loader(dataset, size, collator, data=mesh["dp"], shuffle=shuffle, seed=5)

        return train(model, arguments(folder, batch_size, **changes), cp.collator(collate), loader)


@contextmanager
def as_torchrun(axis: weft.Axis) -> Iterator[None]:
    """What a launcher leaves in the environment, by which accelerate knows of the other ranks."""
    from accelerate.state import AcceleratorState

    given = {"RANK": axis.rank, "WORLD_SIZE": axis.size, "LOCAL_RANK": axis.rank, "LOCAL_WORLD_SIZE": axis.size,
             "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}  # fmt: skip
    os.environ.update({name: str(value) for name, value in given.items()})
    try:
        yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        for name in given:
            del os.environ[name]
