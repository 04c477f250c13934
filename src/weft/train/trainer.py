"""`Trainer`: one rank of a run. It makes mesh, data, model and optimizer, and takes steps."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import weft
from weft.comm import Ledger, record
from weft.comm.device import copy_to_device, start_copy_to_host
from weft.comm.rounds import gather_text
from weft.parallel.mesh import ParallelMesh, wrap_with_ddp, wrap_with_fsdp2
from weft.parallel.rendezvous import device_of_rank
from weft.train.batches import IGNORED, Batch, Batches, Shard, validation_batches
from weft.train.checkpoints import Resumption, Saver, StateToLoad
from weft.train.config import TrainConfig
from weft.train.corpus import Corpus, open_corpus
from weft.train.metrics import StepResult, gather_floats, gather_step, spans_of
from weft.train.model import LanguageModel, Place, make_step, rate_at, set_rates
from weft.train.run_folder import move_later_aside, run_of, write_whole


@dataclass(frozen=True)
class _Common:
    """What the ranks must have in common when a run begins."""

    config: str
    data: str


def open_data(config: TrainConfig) -> Corpus:
    """The corpus of a run, held-out part included."""
    return open_corpus(
        config.data, vocabulary=config.vocabulary, token_bytes=config.token_bytes,
        document_token=config.document_token,
    )  # fmt: skip


class Trainer:
    """One rank of a run; all ranks make one and iterate over it.

    What crosses ranks in a step: states and keys and values between context ranks, rows and their gradients between
    all ranks, gradients to owners and results back, activations between tensor ranks (by torch), and integers.

    ``signal``: the number of a signal that this process was sent, or 0. Once any rank has one, all save the same step
    and end after it; ``ended_by`` is the number then.
    """

    def __init__(self, config: TrainConfig, mesh: ParallelMesh, signal: Callable[[], int] = lambda: 0) -> None:
        self.config, self.mesh, self._signal = config, mesh, signal
        self.done, self.ended_by = 0, 0
        corpus = self._open_data()
        self.corpus, held_out = corpus.split(config.held_out) if config.held_out else (corpus, None)
        before = Resumption(mesh.world, config) if config.resume is not None else None
        if before is not None and before.facts is not None:
            before.check_data(self.corpus.digest, corpus.vocabulary)
        self.device = device_of_rank(config.device)
        self.model = self._make_model(corpus.vocabulary).to(self.device)
        self._forward = self._wrap()
        self.step = self._make_step()
        self._saver = Saver(config.out, config.keep)
        self._where: dict[str, Any] = {
            "shard": Shard(mesh.data.rank, mesh.data.size, mesh.context.rank, mesh.context.size, config.layout),
            "length": config.length,
            "hash_rows": lambda tokens, bounds: self.model.bigrams.rows_of(tokens, cu_seqlens=bounds),
        }
        position = 0 if before is None or before.facts is None else self._resume(before)
        self._batches = Batches(self.corpus, batch=config.batch, seed=config.seed, position=position, **self._where)
        self._held_out = held_out

    def _open_data(self) -> Corpus:
        """The corpus; all ranks raise alike if one cannot open it, or if theirs differ."""
        config, fault, corpus = self.config, None, None
        try:
            corpus = open_data(config)
        except ValueError as error:
            fault = error
        common = _Common(replace(config, data=None).as_json(), corpus.digest) if corpus else None
        self.mesh.world.begin("train", common, metadata=[], fault=fault).metadata.wait()
        assert corpus is not None
        return corpus

    def _make_model(self, vocabulary: int) -> LanguageModel:
        return LanguageModel(self.config, vocabulary, self.mesh)

    def _make_step(self) -> weft.optim.OverlappedStep:
        return make_step(self.config, self.model, self.mesh)

    def _wrap(self) -> Any:
        if self.config.wrap == "ddp" and self.mesh.world.size > 1:
            return wrap_with_ddp(self.mesh.tokens, self.model, tables=["bigrams.weight"])
        if self.config.wrap == "fsdp2" and self.mesh.world.size > 1:
            wrap_with_fsdp2(self.mesh, self.model, list(self.model.blocks), [self.model.bigrams.weight])
        return self.model

    # Steps.

    def __iter__(self) -> Iterator[StepResult]:
        """The steps that are left, with their checkpoints and validation losses."""
        config = self.config
        try:
            while self.done < config.steps:
                result = self.take_step()
                last = self.done == config.steps
                if result.signal and not last:
                    self.ended_by = result.signal
                elif config.validate_every and (last or self.done % config.validate_every == 0):
                    result = replace(result, valid_loss=self.validation_loss())
                ends = last or bool(self.ended_by)
                if ends or (config.checkpoint_every and self.done % config.checkpoint_every == 0):
                    self._save()
                if ends:
                    self._saver.wait()
                yield result
                if self.ended_by:
                    return
        finally:
            self.close()

    def close(self) -> None:
        """End the thread that reads ahead, and a write that is under way."""
        self._batches.close()
        self._saver.close()

    def take_step(self) -> StepResult:
        """One optimizer step on the next batch."""
        config = self.config
        clock = self.mesh.world.wire.clock
        began = clock()
        batch = next(self._batches)
        set_rates(config, self.step, rate_at(config, self.done))
        with record() as ledger:
            total = self._loss_of(batch)
            copied = start_copy_to_host(total.detach())
            if self.done + 1 < config.steps:
                self.model.bigrams.prefetch(self._batches.peek().rows)
            # Gradients are averaged over the ranks that have other tokens; each has its part of a sum over all.
            (total * (self.mesh.tokens.size / self._tokens_of_step)).backward()
            self.step.step()
            self.step.zero_grad()
            loss = float(copied.wait())  # long there: the step has read its verdict
        ended = clock()
        self.done += 1
        if self.done == config.timeline_step:
            self._write_timeline(ledger, began, ended)
        losses, figures = gather_step(self.mesh.world, ledger, ended - began, self._signal(), loss)
        assert self.step.norm is not None
        mean = float(self._sum_over_tokens(losses)) / self._tokens_of_step
        return StepResult(self.done, mean, self.step.norm, self._tokens_of_step, **figures)

    @property
    def _tokens_of_step(self) -> int:
        return self.config.batch * self.config.length

    def _loss_of(self, batch: Batch) -> Tensor:
        """The sum over this rank's tokens."""
        tokens, targets, positions = (
            copy_to_device(part, self.device) for part in (batch.tokens, batch.targets, batch.positions)
        )
        layout, bounds = self.config.layout, batch.cu_seqlens
        where = weft.sequence(tokens.shape[1], layout=layout, cu_seqlens=bounds, group=self.mesh.context)
        half = torch.autocast(self.device.type, torch.bfloat16) if self.config.dtype == "bf16" else nullcontext()
        with half:
            logits = self._forward(tokens, batch.rows, Place(where, positions))  # rows: ids of the host
        return self.model.loss(logits, targets)

    def _sum_over_tokens(self, everybody: Tensor) -> Tensor:
        """Of all ranks' figures ``[P, ...]``: tensor-parallel neighbours have the same tokens, the first counts."""
        return everybody[:: self.mesh.tensor.size].sum(0)

    @torch.no_grad()
    def validation_loss(self) -> float | None:
        """The mean over held-out tokens; None if there are none. All ranks must ask."""
        if self._held_out is None or not self.config.validate_batches:
            return None
        total, count = torch.zeros((), dtype=torch.float64, device=self.device), 0  # of losses, of tokens that count
        at_most = self.config.validate_batches
        with validation_batches(self._held_out, batch=self.config.batch, at_most=at_most, **self._where) as batches:
            for batch in batches:
                count += int((batch.targets != IGNORED).sum())
                total += self._loss_of(batch).double()
        mine = float(start_copy_to_host(total).wait())
        everybody = gather_floats(self.mesh.world, "train.validation", [mine, count])
        losses, tokens = self._sum_over_tokens(everybody).tolist()
        return losses / tokens

    def _write_timeline(self, ledger: Ledger, began: float, ended: float) -> None:
        mine = json.dumps(spans_of(ledger, began, ended))
        everybody = gather_text(self.mesh.world, "train.timeline", mine)
        if self.mesh.world.rank == 0:
            ranks = [{"rank": rank, "spans": json.loads(text)} for rank, text in enumerate(everybody)]
            write_whole(self.config.out / "timeline.json", json.dumps({"step": self.done, "ranks": ranks}))

    # Checkpoints.

    def _save(self) -> None:
        facts = {
            "step": self.done, "position": self._batches.position, "data": self.corpus.digest,
            "vocabulary": self.model.vocabulary, "mesh": list(self.mesh.shape),
            "config": json.loads(self.config.as_json()),
        }  # fmt: skip
        self._saver.start(self.model, self.step, facts)

    def _resume(self, before: Resumption) -> int:
        """Take up the state of a checkpoint; the position in the data. What came after it is moved aside."""
        facts = before.load(StateToLoad(self.model, self.step), self._saver.group)
        self.done = int(facts["step"])
        config, fault = self.config, None
        goes_back = self.done < config.steps and run_of(before.folder).resolve() == config.out.resolve()
        if goes_back and self.mesh.world.rank == 0:
            try:
                move_later_aside(config.out, self.done)
            except OSError as error:
                fault = ValueError(
                    f"train: what came after step {self.done} in {config.out} cannot be moved aside: {error.strerror}"
                )
        self.mesh.world.begin("train.back", metadata=[], fault=fault).metadata.wait()
        return int(facts["position"])
