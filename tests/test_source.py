"""Rules about the source itself that the import contract cannot say."""

from __future__ import annotations

import ast
import subprocess
import sys
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


def test_only_comm_calls_torch_distributed() -> None:
    users = {path.relative_to(SOURCE).parts[0] for path in SOURCE.rglob("*.py")
             if names_torch_distributed(ast.parse(path.read_text()))}  # fmt: skip
    assert users == {"comm"}


def test_importing_weft_does_no_work() -> None:
    """Not even the command line imports Triton."""
    code = (
        "import threading, torch; before = torch.get_rng_state(); import weft; "
        "assert threading.active_count() == 1; assert torch.equal(before, torch.get_rng_state()); "
        "import sys, weft.cli; assert not any(name.split('.')[0] == 'triton' for name in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0 and result.stdout == "", result.stderr


def test_public_names() -> None:
    assert set(weft.__all__) == {
        "Axis", "BigramHashEmbedding", "Machine", "OverlappedStep", "REKLS", "RowAdam", "RowExchange", "ShardedAdamW",
        "ShardedEmbedding", "StepPart", "VirtualWorld", "attention", "broadcast_parameters", "clip_grad_norm_",
        "exclusive_scan", "head_strides", "launch", "linear_attention", "mean_loss", "record", "sequence",
        "shard", "unshard",
    }  # fmt: skip
    assert all(callable(getattr(weft, name)) for name in weft.__all__)
