"""`weft sample`: text from a checkpoint, one token after the other, in one process."""

from __future__ import annotations

import codecs
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.comm.device import choose_device
from weft.parallel import checkpoint
from weft.parallel.mesh import make_mesh
from weft.train.checkpoints import check_sizes
from weft.train.config import take_settings
from weft.train.corpus import BYTES
from weft.train.model import LanguageModel
from weft.train.run_folder import whole_checkpoints

logger = logging.getLogger(__name__)
BEGIN = 0  # the byte before a document, and so the one after its end


def load_model(run: Path, device: str = "cpu") -> LanguageModel:
    """The model of a run's newest whole checkpoint (or of the checkpoint ``run``), from any mesh, in one process.

    ``device``: as `weft train --device`.
    """
    why = None
    try:
        for folder, facts in whole_checkpoints(run):
            try:
                return _load(folder, facts).to(choose_device(device))
            except (ValueError, RuntimeError, OSError) as error:
                why = error
                logger.warning("%s cannot be loaded: %s; the one before it is used", folder, error)
    except ValueError as error:
        why = why or error
    raise ValueError(f"{why}".replace("train: --resume", "sample:")) from None


def _load(folder: Path, facts: dict[str, Any]) -> LanguageModel:
    config = take_settings(facts["config"], f"{folder / checkpoint.MANIFEST}")
    config.check()
    check_sizes(folder, config, facts["vocabulary"])
    model = LanguageModel(config, facts["vocabulary"], make_mesh((1, 1, 1)))
    wanted = {f"model.{name}": value.detach().clone() for name, value in model.state_dict().items()}
    checkpoint.load_tensors(folder, wanted, None)
    model.load_state_dict({name.removeprefix("model."): value for name, value in wanted.items()})
    return model.eval()


def generate(
    model: LanguageModel, prompt: list[int], tokens: int, temperature: float, top_k: int, seed: int
) -> Iterator[int]:
    """Up to ``tokens`` tokens after ``prompt``; a document that ends, ends it.

    Every token is computed once: linear attention keeps a state, softmax attention its keys and values.
    """
    source, state = torch.Generator().manual_seed(seed), model.start_decoding()
    given = torch.tensor([[BEGIN, *prompt]])
    for _ in range(tokens):
        token = _choose(model.decode(given, state)[0, -1], temperature, top_k, source)
        if token == BEGIN:
            return
        yield token
        given = torch.tensor([[token]])


def _choose(logits: Tensor, temperature: float, top_k: int, source: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    best, where = logits.cpu().double().topk(min(top_k, len(logits)))
    chosen = torch.multinomial((best / temperature).softmax(0), 1, generator=source)
    return int(where[chosen])


def print_sample(run: Path, prompt: str, tokens: int, temperature: float, top_k: int, seed: int, device: str) -> None:
    """What `weft sample` does; the flags are described there."""
    if tokens < 0 or top_k < 1 or not 0 <= temperature < float("inf"):
        raise ValueError(
            f"sample: --tokens and --temperature must not be negative and --top-k at least 1, got {tokens}, "
            f"{temperature} and {top_k}"
        )
    model = load_model(run, device)
    if model.vocabulary != BYTES:
        raise ValueError(
            f"sample: {run} was trained on {model.vocabulary} tokens of a .bin, not on text; use "
            f"weft.train.sample.generate with token ids"
        )
    decoder = codecs.getincrementaldecoder("utf-8")("replace")  # what is no text yet is shown as such
    print(prompt, end="", flush=True)
    for token in generate(model, list(prompt.encode()), tokens, temperature, top_k, seed):
        print(decoder.decode(bytes([token])), end="", flush=True)
    print(decoder.decode(b"", final=True))
