"""Rules about the source itself that the import contract cannot say."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import weft

SOURCE = Path(weft.__file__).parent


def names_torch_distributed(tree: ast.AST) -> bool:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and any(a.name.startswith("torch.distributed") for a in node.names):
            return True
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.distributed"):
            return True
        if (
            isinstance(node, ast.ImportFrom)
            and node.module == "torch"
            and "distributed" in {a.name for a in node.names}
        ):
            return True
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch.distributed"):
            return True
    return False


def test_only_comm_and_parallel_call_torch_distributed() -> None:
    users = {path.relative_to(SOURCE).parts[0] for path in SOURCE.rglob("*.py")
             if names_torch_distributed(ast.parse(path.read_text()))}  # fmt: skip
    assert users == {"comm", "parallel"}


def test_no_file_is_longer_than_300_lines() -> None:
    """A longer one is asking to become two."""
    lengths = {str(path.relative_to(SOURCE)): len(path.read_text().splitlines()) for path in SOURCE.rglob("*.py")}
    assert not {file: length for file, length in lengths.items() if length > 300}


MODULE = re.compile(r"weft(\.\w+)+")


def imports(path: Path) -> set[str]:
    """Files of weft that a file imports, within functions and by a module's name in a string too.

    What only a type checker imports is left out.
    """
    found: set[str] = set()
    nodes: list[ast.AST] = [ast.parse(path.read_text())]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        nodes += ast.iter_child_nodes(node)
        if isinstance(node, ast.Constant) and MODULE.fullmatch(str(node.value)):
            file = (SOURCE.parent / str(node.value).replace(".", "/")).with_suffix(".py")
            found |= {str(file.relative_to(SOURCE))} if file.exists() else set()
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("weft"):
            continue
        for name in node.names:
            stems = (f"{node.module}.{name.name}", str(node.module))
            files = (SOURCE.parent / stem.replace(".", "/") for stem in stems)
            found |= {
                str(file.with_suffix(".py").relative_to(SOURCE)) for file in files if file.with_suffix(".py").exists()
            }
    return found


def test_no_import_hides_a_cycle() -> None:
    """Not one within a function either: who needs a file is above it."""
    files = {str(path.relative_to(SOURCE)): imports(path) for path in SOURCE.rglob("*.py")}
    assert len(list(TopologicalSorter(files).static_order())) >= len(files) > 200  # else a CycleError names them


def test_no_import_within_a_function_joins_packages() -> None:
    """What is imported late is heavy, optional or for the command line: never these packages from one another."""
    packages = ("weft.comm", "weft.parallel", "weft.ops", "weft.optim", "weft.world")
    late = {
        f"{path.relative_to(SOURCE)}: {ast.unparse(node)}"
        for path in SOURCE.rglob("*.py")
        if path.relative_to(SOURCE).parts[0] in {package.removeprefix("weft.") for package in packages}
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(packages)
    }
    assert not late


def definitions(kind: type[ast.ClassDef] | type[ast.FunctionDef]) -> list[tuple[str, ast.ClassDef | ast.FunctionDef]]:
    """Every class or function of the library, with where it is; benchmarks are apart."""
    return [
        (f"{path.relative_to(SOURCE)}: {node.name}", node)
        for path in SOURCE.rglob("*.py")
        if "bench" not in path.parts
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, kind)
    ]


def test_every_autograd_function_is_a_rank_function() -> None:
    """So it runs outside autocast, and its gradients are differentiated rightly or refused."""
    plain = {
        where for where, node in definitions(ast.ClassDef) if any("autograd" in ast.unparse(b) for b in node.bases)
    }
    assert plain == {"comm/function.py: RankFunction", "comm/function.py: _LastDerivative"}


def test_no_cache_of_functools_holds_tensors() -> None:
    """They would keep what a call under inference mode or with fake tensors made: see `weft.comm.function`."""
    for where, node in definitions(ast.FunctionDef):
        if any("cache" in ast.unparse(one) for one in node.decorator_list):
            makers = [f"torch.{name}(" for name in ("tensor", "arange", "empty", "zeros", "ones", "full", "cat")]
            assert not any(maker in ast.unparse(node) for maker in makers), where


def test_importing_weft_does_no_work() -> None:
    """Not even the command line imports Triton."""
    code = (
        "import threading, torch; before = torch.get_rng_state(); import weft; "
        "assert threading.active_count() == 1; assert torch.equal(before, torch.get_rng_state()); "
        "import sys, weft.cli; assert not any(name.split('.')[0] == 'triton' for name in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0 and result.stdout == "", result.stderr


# "weft" on PyPI is somebody else's package: who is told to install that would run a stranger's code.
STRANGER = re.compile(r"""pip3? install[^\n`;]*(?<![\w./-])weft(?![\w-])|(?<![\w-])weft\[[a-z]""")


def test_nobody_is_told_to_install_a_strangers_package() -> None:
    for words in ("pip install weft", "pip install 'weft[train]'", 'pip install -U "weft"', "the extra weft[plot]"):
        assert STRANGER.search(words), words
    for words in ("pip install 'weft-torch[train]'", "pip install .", "pip install ./weft", "weft-torch[plot]"):
        assert not STRANGER.search(words), words
    root = SOURCE.parent.parent
    assert 'name = "weft-torch"' in (root / "pyproject.toml").read_text()
    texts = [path for name in ("src", "docs", "examples", "tests") for path in (root / name).rglob("*.*")]
    texts += [root / name for name in ("README.md", "CONTRIBUTING.md", "Makefile", "pyproject.toml")]
    found = {
        f"{path.relative_to(root)}: {line.strip()}"
        for path in texts if path.suffix in ("", ".py", ".md", ".toml") and path != Path(__file__)
        for line in path.read_text().splitlines() if STRANGER.search(line)
    }  # fmt: skip
    assert not found


# Words of our own for what the field has a name for.
COINED = {
    "travel", "travels", "travelling", "tell", "tells", "told", "parcel", "parcels", "restless", "keeper", "settle",
    "settles", "settled", "trade", "trades", "traded", "chance", "chances", "blind", "sight", "sights", "yardstick",
    "yardsticks", "rehearse", "rehearsal", "rehearsals", "room", "rooms",
}  # fmt: skip
WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")


def test_names_are_the_words_of_the_field() -> None:
    """Of files, functions, classes, arguments and variables."""
    found = set()
    for path in SOURCE.rglob("*.py"):
        names = {path.stem}
        for node in ast.walk(ast.parse(path.read_text())):
            names |= {getattr(node, field) for field in ("name", "arg", "id", "attr")
                      if isinstance(getattr(node, field, None), str)}  # fmt: skip
        found |= {f"{path.relative_to(SOURCE)}: {name}" for name in names
                  if COINED & {word.lower() for word in WORD.findall(name)}}  # fmt: skip
    assert not found


def test_public_names() -> None:
    assert set(weft.__all__) == {
        "Axis", "BigramHashEmbedding", "Mask", "RowExchange", "Sequence", "ShardedEmbedding", "attention",
        "broadcast_parameters", "clip_grad_norm_", "delta_rule", "exclusive_scan", "head_strides", "launch",
        "linear_attention", "mamba2", "mean_loss", "optim", "record", "selective_scan", "sequence", "shard",
        "short_conv", "unshard", "world",
    }  # fmt: skip
    assert all(callable(getattr(weft, name)) for name in weft.__all__ if name not in ("optim", "world"))
    assert set(weft.optim.__all__) == {
        "REKLS", "SOAP", "Muon", "NorMuon", "OverlappedStep", "RowAdam", "ShardedAdamW", "StepPart",
        "broadcast_parameters", "clip_grad_norm_",
    }  # fmt: skip


def test_cuda_is_named_only_where_a_kernel_is_chosen() -> None:
    """What knows of streams, events and pinned copies is `comm/device.py`, for every kind of accelerator."""
    named = re.compile(
        r"torch\.cuda|\.is_cuda|device\.type .*\"cuda\"|pin_memory|non_blocking|record_stream|current_stream"
        r"|record_event|get_device_module|wait_event|wait_stream|\.synchronize\(|elapsed_time|torch\.accelerator"
    )
    kernels = ("ops/fused/", "ops/scan/arguments.py", "bench/linear_attention/gpu.py", "world/simulated/")
    found = {
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        for line in path.read_text().splitlines()
        if named.search(line.partition("#")[0])
    }
    assert {file for file in found if not file.startswith(kernels)} == {"comm/device.py"}
