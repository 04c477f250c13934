"""The trainer's model with plain pieces: what `weft bench train` and the demo compare with.

| piece             | here                                                                                           |
|-------------------|------------------------------------------------------------------------------------------------|
| linear attention  | LASP-2: a blocking all-gather of every rank's map of the state, in the backward again          |
| softmax attention | a blocking all-gather of all keys and values, whether their documents meet or not; in the      |
|                   | backward again, and a reduction of all gradients                                               |
| embedding rows    | the whole table on every rank, its dense gradient all-reduced by DistributedDataParallel, Adam |
| REKLS             | gradients all-reduced by DistributedDataParallel, every rank steps every matrix                |
| AdamW             | the same with torch's AdamW                                                                    |

Both attentions are on a contiguous layout with packed documents. Kernels, model, data and the mathematics of the step
are the trainer's own, so that a comparison is one of what is sent and when it is waited for: the losses follow each
other.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

import weft
from weft.bench.attention.baselines import Baseline, options_for, strided
from weft.bench.linear_attention.baselines import Baseline as LinearBaseline
from weft.bench.linear_attention.baselines import How, Segments
from weft.comm import Axis, Ledger, record
from weft.comm.wire import SoloWire
from weft.ops.sequence import Sequence
from weft.parallel.mesh import ParallelMesh, make_mesh, wrap_with_ddp
from weft.train.config import TrainConfig, fit_mesh
from weft.train.metrics import FAMILIES, family_of
from weft.train.model import LanguageModel, LinearMixer, SoftmaxMixer, sort_parameters
from weft.train.trainer import Trainer

METHODS = {
    "linear attention": "LASP-2: blocking all-gather of states",
    "softmax attention": "blocking all-gather of all keys and values",
    "embedding rows": "dense gradient of the whole table, all-reduced by DDP",
    "REKLS": "gradients all-reduced by DDP, every rank steps every matrix",
    "AdamW": "gradients all-reduced by DDP, every rank steps everything",
}
_FAMILIES = {"strided": "softmax attention", "lasp2": "linear attention"}  # by the names of their calls


def gather_then_attend(q: Tensor, k: Tensor, v: Tensor, where: Sequence) -> Tensor:
    """Causal softmax attention: q ``[1, T, H, D]``, k and v ``[1, T, Hk, D]`` of this rank's tokens."""
    options = options_for(q, k, where.layout, (k.shape[2],), where)
    return Baseline.apply(q, k, v, options, where.axis, strided)


def lasp2(q: Tensor, k: Tensor, v: Tensor, g: Tensor, where: Sequence) -> Tensor:
    """Linear attention without scale: q, k, v ``[1, T, H, D]`` and g ``[1, T, H]`` of this rank's tokens."""
    return LinearBaseline.apply(q, k, v, g, where.axis, How("lasp2", Segments.of(where), 1.0))


class DenseBigrams(weft.BigramHashEmbedding):
    """The whole table on every rank, with a dense gradient."""

    def __init__(self, rows: int, width: int, dtype: torch.dtype) -> None:
        super().__init__(rows, width, group=Axis.over(SoloWire()), dtype=dtype)
        self.weight = nn.Parameter(self.weight.detach())  # of no table: DDP has its gradient

    def _apply(self, fn: Any, recurse: bool = True) -> DenseBigrams:
        return nn.Module._apply(self, fn, recurse)  # a table would take the weight back

    def forward(self, *, rows: Tensor) -> Tensor:  # type: ignore[override]  # the trainer hashes ahead
        """Rows ``[1, T, width]`` of hashed bigrams ``rows`` ``[1, T]``."""
        return embedding(rows, self.weight)

    def prefetch(self, ids: Tensor) -> None:
        pass  # all rows are here


class PlainStep:
    """Clip, then step everything on every rank. ``parts`` have the names that the trainer sets rates by."""

    def __init__(self, config: TrainConfig, model: LanguageModel) -> None:
        matrices, decayed, plain = sort_parameters(model)
        alone, decay = Axis.over(SoloWire()), config.weight_decay
        self.weights, self.clip, self.norm = list(model.parameters()), config.clip, 0.0
        self.parts: dict[str, torch.optim.Optimizer] = {
            "REKLS": weft.optim.REKLS(
                list(matrices.items()), lr=config.lr, variant=config.variant, weight_decay=decay, group=alone
            ),
            "ShardedAdamW": torch.optim.AdamW(
                [{"params": list(decayed.values()), "weight_decay": decay},
                 {"params": list(plain.values()), "weight_decay": 0.0}],
                lr=config.lr_adamw, fused=True,
            ),
            "RowAdam": torch.optim.Adam([model.bigrams.weight], lr=config.lr_rows, fused=True),
        }  # fmt: skip

    def step(self) -> None:
        self.norm = float(nn.utils.clip_grad_norm_(self.weights, self.clip))
        for part in self.parts.values():
            part.step()

    def zero_grad(self) -> None:
        for part in self.parts.values():
            part.zero_grad()


class PlainTrainer(Trainer):
    """A `Trainer` whose pieces are plain; the settings are those of the run it is compared with."""

    def __init__(self, config: TrainConfig, mesh: ParallelMesh) -> None:
        if mesh.tensor.size > 1:
            raise ValueError(f"train: plain pieces take whole weights, so --tp 1, not {mesh.tensor.size}")
        if "d" in config.kinds:
            raise ValueError(f"train: there are plain pieces for blocks l and s, not d: --pattern {config.pattern}")
        super().__init__(replace(config, layout="contiguous", wrap="weft"), mesh)

    def _make_model(self, vocabulary: int) -> LanguageModel:
        model = super()._make_model(vocabulary)
        weight = model.bigrams.weight
        model.bigrams = DenseBigrams(self.config.table_rows, self.config.width, weight.dtype)
        for mixer in model.modules():
            if isinstance(mixer, LinearMixer):
                mixer.attend = lasp2
            elif isinstance(mixer, SoftmaxMixer):
                mixer.attend = gather_then_attend
        return model

    def _wrap(self) -> Any:
        return self.model if self.mesh.tokens.size == 1 else wrap_with_ddp(self.mesh.tokens, self.model)

    def _make_step(self) -> Any:
        return PlainStep(self.config, self.model)

    def sent_bytes(self, ledger: Ledger) -> dict[str, int]:
        """Bytes that this rank sent in the step of ``ledger``, by family.

        What DDP sends is not in the ledger: an all-reduce over P ranks in which each sends (P - 1) / P of its gradients
        once to be summed and once more as sums, the least there is.
        """
        sent = bytes_by_family(ledger)
        matrices, decayed, plain = sort_parameters(self.model)
        ranks = self.mesh.tokens.size
        for family, weights in (
            ("embedding rows", [self.model.bigrams.weight]),
            ("REKLS", matrices.values()),
            ("AdamW", [*decayed.values(), *plain.values()]),
        ):
            size = sum(weight.numel() * weight.element_size() for weight in weights)
            sent[family] += 2 * (ranks - 1) * size // ranks
        return sent


def bytes_by_family(ledger: Ledger) -> dict[str, int]:
    """What this rank sent, by weft's operations or plain ones."""
    sent = dict.fromkeys(FAMILIES, 0)
    for event in ledger.events:
        sent[_FAMILIES.get(event.operation.partition(".")[0]) or family_of(event.operation)] += event.bytes_sent
    return sent


def count_plain_bytes(axis: Axis, config: TrainConfig) -> dict[str, Any]:
    """What one step of ``config`` sends with plain pieces, found out on all ranks of WORLD, ``axis``.

    {"bytes": {family: bytes of one step, of all ranks together}, "methods": {family: words}, "ranks": number}: what is
    written as RUN/plain.json for the report.
    """
    mesh = make_mesh(fit_mesh(config.dp, config.cp, config.tp, axis.size))
    trainer = PlainTrainer(replace(config, timeline_step=0, resume=None, device="cpu"), mesh)
    try:
        trainer.take_step()  # the first step compares the ranks
        with record() as ledger:
            trainer.take_step()
        sent = trainer.sent_bytes(ledger)
    finally:
        trainer.close()
    everybody = axis.begin("plain.bytes", metadata=list(sent.values())).metadata.wait()
    total = dict(zip(sent, (sum(column) for column in zip(*everybody, strict=True)), strict=True))
    return {"bytes": {name: total[name] for name in METHODS}, "methods": dict(METHODS), "ranks": axis.size}
