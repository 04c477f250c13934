"""The command line: weft train | demo | sample | report | bench | check-device | trace | layouts | kernels.

What is here shows help without importing torch; a command imports what it needs when it runs.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import tyro

from weft import __version__
from weft.bench.commands import BENCHES
from weft.bench.flags import Json, check_at_least, check_file
from weft.report.page import show_report
from weft.train.config import TrainConfig

Command = Callable[..., None]
MOST_VIRTUAL_RANKS = 4096  # each is a thread


def make_train(arguments: Sequence[str]) -> Callable[..., None]:
    """`weft train` for tyro; its defaults are what ``arguments`` say of a config file and of a run to resume."""
    defaults = TrainConfig()
    if "-h" not in arguments and "--help" not in arguments:
        from weft.train.command import or_exit, read_defaults

        defaults = or_exit(lambda: read_defaults(arguments))

    def train(
        config: Annotated[Path | None, tyro.conf.Positional] = None,
        settings: Annotated[TrainConfig, tyro.conf.arg(name="")] = defaults,
    ) -> None:
        """Train a hybrid language model with all four families at once.

        It starts dp x cp x tp local ranks; `torchrun ... -m weft.train` joins the ranks there are.

        Args:
            config: Settings in a .json or .toml file, by their names below with underscores; flags come after it.
            settings: Every one of them.
        """
        from weft.train.command import or_exit, start

        or_exit(lambda: start(settings, arguments))

    return train


def demo(out: Path = Path("demo"), steps: int = 100, ranks: int = 4) -> None:
    """Train a small language model on local ranks, then in one process, and write a report that compares them.

    Args:
        out: Folder for both runs and the report; if it is taken, one with a number after it.
        steps: Steps of each run.
        ranks: 2 or 4 local ranks: 2 context-parallel ones, the others data-parallel.
    """
    check_at_least(1, steps=steps)
    from weft.bench.train.demo import run_demo

    run_demo(out, steps, ranks)


def sample(
    run: Annotated[Path, tyro.conf.Positional], prompt: str = "def ", tokens: int = 300, temperature: float = 0.7,
    top_k: int = 40, seed: int = 0, device: str = "auto",
) -> None:  # fmt: skip
    """Print text that a trained model writes after a prompt.

    Args:
        run: Folder of a run, or one of its checkpoints.
        prompt: What the text begins with.
        tokens: Bytes to add at most.
        temperature: 0 takes the likeliest byte, 1 draws as the model says.
        top_k: Draw among this many.
        seed: Of the draws.
        device: What it is computed on: cpu, cuda, cuda:1; auto is an accelerator, or the CPU where there is none.
    """
    from weft.train.sample import print_sample

    print_sample(run, prompt, tokens, temperature, top_k, seed, device)


def trace_scan(
    out: Path, method: str = "doubling", ranks: int = 8, heads: int = 16, keys: int = 128, values: int = 128,
    latency: float = 5e-6, bandwidth: float = 25e9, flops: float = float("inf"), memory_bandwidth: float = float("inf"),
) -> None:  # fmt: skip
    """Run one scan in virtual time and write its timeline for ui.perfetto.dev.

    Args:
        out: The trace file to write.
        method: A schedule; a name that is not known gets the list of them.
        ranks: Ranks of the virtual world.
        heads: States a rank holds, each keys x values in fp32.
        keys: K of the state.
        values: V of the state.
        latency: Seconds a message is on its way.
        bandwidth: Bytes per second of a rank's link.
        flops: FLOP per second of local products.
        memory_bandwidth: Bytes per second of local operators.
    """
    check_at_least(1, ranks=ranks, heads=heads, keys=keys, values=values)
    if ranks > MOST_VIRTUAL_RANKS:
        raise ValueError(f"--ranks must be at most {MOST_VIRTUAL_RANKS}, got {ranks}")
    check_file("--out", out)
    import torch

    from weft.ops.scan import exclusive_scan
    from weft.world import Machine, VirtualWorld

    def scan(axis: Any) -> None:
        state, log = torch.empty(heads, keys, values, device="meta"), torch.empty(heads, device="meta")
        exclusive_scan(state, log_decay=log, group=axis, method=method)

    run = VirtualWorld(ranks, Machine(latency, bandwidth, flops, memory_bandwidth)).run(scan)
    run.timeline.save_trace(out)
    print(f"{method} on {ranks} ranks: {run.elapsed:.3e} virtual s, {run.timeline.rounds} rounds; written: {out}")


def show_layouts(
    ranks: int = 8, tokens: int = 4096, chunks_per_rank: int | None = None, median: float = 600.0, spread: float = 1.5,
    seed: int = 0, picture: Path | None = None,
) -> None:  # fmt: skip
    """Share out a packed batch by every layout: the work of the ranks, their runs, and the keys that travel.

    Documents have lognormal lengths, and tokens see those before them in their document. Nothing is computed.

    Args:
        ranks: Ranks that share the sequence.
        tokens: Tokens of a rank.
        chunks_per_rank: Of layout balanced. Left out: 8 to 64.
        median: Of the documents' lengths.
        spread: Standard deviation of the logarithm of their lengths.
        seed: Of the draws.
        picture: Write an .svg file of who holds what.
    """
    check_at_least(1, ranks=ranks, tokens=tokens, chunks_per_rank=chunks_per_rank)
    if not (median >= 1 and 0 <= spread <= 5):
        raise ValueError(f"--median must be at least 1 and --spread from 0 to 5, got {median} and {spread}")
    check_file("--picture", picture)
    from weft.report.layouts import run_layouts

    run_layouts(ranks, tokens, chunks_per_rank, median, spread, seed, picture)


def show_kernels(
    decays: tuple[str, ...] = (), dims: tuple[int, ...] = (64, 128, 256), chunks: tuple[int, ...] = (64,),
    dtypes: tuple[str, ...] = ("bf16",), capabilities: tuple[int, ...] = (), tokens: int = 8192, heads: int = 16,
    json: Json = None,
) -> None:  # fmt: skip
    """Compile the Triton kernels of linear attention ahead of time and say what they use. No GPU is needed.

    Spilled registers or too much shared memory for two stages end the command with code 1. FLOP/byte counts each tensor
    that a kernel reads or writes once. "% of peak" is the rate of tf32 products memory allows at that intensity on a
    preset machine (A100, H100, B200); "% of roof" is what is left of it when the last wave of programs is not full.
    A second table has the bytes and FLOPs of each phase beside the least there is.

    Args:
        decays: Classes of decay: none, constant, scalar, vector. All if left out.
        dims: K = V.
        chunks: Tokens of a chunk.
        dtypes: Of q, k and v: bf16, fp16, fp32. Gates are fp32.
        capabilities: Compute capabilities: 80, 90, 100. All if left out.
        tokens: Tokens of the sequence; grids, bytes and FLOPs are those of this length.
        heads: Heads.
    """
    check_at_least(1, dims=dims, chunks=chunks, tokens=tokens, heads=heads)
    check_file("--json", json)
    from weft.bench.linear_attention import kernels
    from weft.bench.ranks import run_here

    todo, gpus = kernels.shapes(decays or kernels.DECAYS, dims, chunks, dtypes, tokens, heads), tuple(kernels.GPUS)
    layouts, faults = kernels.layouts(tokens, heads), list[str]()
    run_here(
        "kernels", json, {}, layouts, lambda report: faults.extend(kernels.run(report, todo, capabilities or gpus))
    )
    for fault in faults:
        print(f"weft kernels: {fault}", file=sys.stderr)
    if faults:
        sys.exit(1)


def check_device(device: str = "auto", ranks: int | None = None, only: tuple[str, ...] = (), json: Json = None) -> None:
    """Run every operation on an accelerator and compare it with the CPU; one verdict, and status 0 or 1.

    `torchrun --nproc-per-node 2 -m weft check-device` takes two GPUs, without torchrun it takes one.

    Args:
        device: An accelerator by name; auto is the one there is; sim is a simulated one, on virtual ranks, where host
            syncs are counted and races between streams are found.
        ranks: Virtual ranks of --device sim (2 if left out).
        only: Families: scan, linear-attention, delta-rule, attention, sequence, rows, optimizers, model. All if left
            out.
    """
    check_file("--json", json)
    from weft.check.command import run_check

    if not run_check(device, ranks, only, json):
        sys.exit(1)


# What each does in a line; a function, or several of them by name. The flags of train depend on what it is given.
COMMANDS: dict[str, tuple[str, Command | dict[str, Command] | None]] = {
    "train": ("Train a hybrid language model with all four families at once.", None),
    "demo": ("Train a small model on local ranks and in one process, and compare them.", demo),
    "sample": ("Print text that a trained model writes.", sample),
    "report": ("Write the report of a run as one HTML file.", show_report),
    "bench": ("Measure weft beside what people use today.", BENCHES),
    "check-device": ("Compare every operation on an accelerator with the CPU.", check_device),
    "trace": ("Simulate an operation and write its timeline.", {"scan": trace_scan}),
    "layouts": ("Share out a packed batch by every layout and say how balanced it is.", show_layouts),
    "kernels": ("Compile the Triton kernels ahead of time and say what they use.", show_kernels),
}


def main() -> None:
    """Entry point of the ``weft`` command."""
    try:
        _run(sys.argv[1:])
    except (ValueError, TypeError) as error:
        _end(2, f"weft: {error}")
    except BrokenPipeError:  # whoever read our output has seen enough, as `head` has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python would still write
        sys.exit(128 + signal.SIGPIPE)
    except OSError as error:
        if error.filename is None:
            raise  # not about a file that the user named
        _end(1, f"weft: {error.filename}: {error.strerror}")
    except KeyboardInterrupt:
        _end(130, "weft: stopped")


def _run(words: list[str]) -> None:
    if words in (["--version"], ["-V"]):
        print(f"weft {__version__}")
        return
    lines = {name: line for name, (line, _) in COMMANDS.items()}
    name = _choose("weft", words, "Distributed training operations, measured and simulated.", lines)
    command, rest = COMMANDS[name][1], words[1:]
    if isinstance(command, dict):
        lines = {one: (function.__doc__ or "").splitlines()[0] for one, function in command.items()}
        one = _choose(f"weft {name}", rest, COMMANDS[name][0], lines)
        tyro.cli(command[one], prog=f"weft {name} {one}", args=rest[1:])
    else:
        tyro.cli(make_train(rest) if command is None else command, prog=f"weft {name}", args=rest)


def _choose(program: str, words: list[str], about: str, commands: dict[str, str]) -> str:
    """The first word, if it is one of ``commands``; without a word, or asked for help, list them and end."""
    if words and words[0] in commands:
        return words[0]
    if words and words[0] not in ("-h", "--help"):
        raise ValueError(f"{words[0]!r} is not one of {', '.join(commands)}; `{program} --help` describes them")
    width = max(map(len, commands))
    listed = "\n".join(f"  {name:{width}}  {line}" for name, line in commands.items())
    more = f"`{program} COMMAND --help` lists the flags of a command"
    more += ", `weft --version` says the version." if program == "weft" else "."
    text = f"usage: {program} COMMAND ...\n\n{about}\n\n{listed}\n\n{more}"
    if words:
        print(text)
        sys.exit(0)
    _end(2, text)


def _end(status: int, words: str) -> NoReturn:
    print(words, file=sys.stderr)
    sys.exit(status)
