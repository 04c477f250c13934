"""A run that never ran: the files that a trainer leaves, with numbers that look like those of one."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

FAMILIES = {
    "linear attention": (1_180_000, 5_900_000, "blocking LASP-2 all-gather"),
    "softmax attention": (9_400_000, 25_200_000, "blocking gather of keys and values, contiguous slices"),
    "embedding rows": (640_000, 768_000_000, "dense gradient of the table, all-reduced by DDP"),
    "REKLS": (14_200_000, 28_300_000, "replicated on every rank, gradients all-reduced"),
    "AdamW": (2_100_000, 3_900_000, "replicated, gradients all-reduced"),
    "agreeing": (18_400, 0, ""),
}


def metrics(steps: int, *, seed: int = 0, ranks: int = 4) -> list[dict[str, Any]]:
    noise, rounding = random.Random(0), random.Random(seed)
    lines = []
    for step in range(1, steps + 1):
        loss = 1.35 + 4.1 * math.exp(-step / 35) + 0.25 * math.exp(-step / 400) + noise.gauss(0, 0.035)
        seconds = 0.31 * (1 + abs(noise.gauss(0, 0.05))) * (4 if step == 1 else 1)
        several = ranks > 1
        exposed = {f: seconds * abs(noise.gauss(0.011, 0.004)) * several for f in FAMILIES}
        line: dict[str, Any] = {
            "step": step,
            "loss": loss * (1 + rounding.gauss(0, 2e-6 * (1 + step / 40)) * several),
            "norm": 1.2,
            "seconds": seconds,
            "tokens_per_second": 8192 / seconds,
            "bytes": {f: int(size * noise.uniform(0.97, 1.03)) * several for f, (size, _, _) in FAMILIES.items()},
            "exposed": exposed,
            "exposed_share": sum(exposed.values()) / seconds,
        }
        if step % 25 == 0:
            line["valid_loss"] = loss + 0.12
        lines.append(line)
    return lines


def timeline(ranks: int = 4) -> dict[str, Any]:
    """Layers forward and backward, then the optimizers; messages start with a piece of work and end in the next."""
    pieces = [("embed", "embedding rows", 9)]
    pieces += [("linear", "linear attention", 22), ("softmax", "softmax attention", 26)] * 2 + [
        ("loss", "agreeing", 14)
    ]
    pieces += [("softmax ∇", "softmax attention", 48), ("linear ∇", "linear attention", 40)] * 2
    pieces += [("embed ∇", "embedding rows", 10), ("REKLS", "REKLS", 40), ("AdamW", "AdamW", 16)]
    noise = random.Random(3)
    found = []
    for rank in range(ranks):
        now, spans = 0.0, []
        for name, family, length in pieces:
            length_s = length / 1000 * noise.uniform(0.93, 1.07)
            wait = max(0.0, noise.gauss(0.002, 0.003))
            spans.append({"name": name, "family": family, "kind": "work", "start": now, "end": now + length_s})
            start = now + 0.1 * length_s
            end = now + length_s * noise.uniform(0.5, 0.9) if wait == 0 else now + length_s + wait
            spans.append({"name": name, "family": family, "kind": "under way", "start": start, "end": end})
            now += length_s
            if wait:
                spans.append({"name": name, "family": family, "kind": "exposed", "start": now, "end": now + wait})
                now += wait
        found.append({"rank": rank, "spans": spans})
    return {"step": 120, "ranks": found}


def plain(ranks: int = 4) -> dict[str, Any]:
    bytes_of = {family: size for family, (_, size, _) in FAMILIES.items()}
    return {"bytes": bytes_of, "methods": {f: words for f, (_, _, words) in FAMILIES.items() if words}, "ranks": ranks}


def write_run(folder: Path, steps: int = 200, *, ranks: int = 4, whole: bool = True) -> Path:
    """``whole``: with a timeline and the bytes of plain pieces."""
    folder.mkdir(parents=True)
    config = {
        "data": None, "steps": steps, "mesh": {"dp": max(1, ranks // 2), "cp": min(2, ranks), "tp": 1},
        "model": {"layers": ["linear", "softmax", "linear", "softmax"], "width": 256, "bigram_rows": 250_000},
        "optimizer": {"rekls": "stable", "rate": 0.003, "clip": 1.0}, "dtype": "float32", "seed": 0,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    write_metrics(folder, metrics(steps, seed=ranks, ranks=ranks))
    if whole:
        (folder / "timeline.json").write_text(json.dumps(timeline(ranks)))
        (folder / "plain.json").write_text(json.dumps(plain(ranks)))
    return folder


def write_metrics(folder: Path, lines: list[dict[str, Any]], end: str = "") -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + end)
