"""`import weft` imports nothing else, and its names are what they should be, whatever was imported first."""

from __future__ import annotations

import ast
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import weft
from weft.parts import MOVED, PUBLIC

LISTED = {name for names in PUBLIC.values() for name in names}


def python(program: str) -> None:
    """Run it in a fresh process, where an assertion that fails fails here."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_every_name_has_one_home_and_is_seen_by_type_checkers() -> None:
    assert set(weft.__all__) == LISTED | {"optim", "world"} and len(LISTED) == sum(map(len, PUBLIC.values()))
    assert set(dir(weft)) >= LISTED and "__version__" in dir(weft)
    tree = ast.parse(Path(weft.__file__).read_text())
    checking = next(
        node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    seen = {node.module: tuple(name.name for name in node.names) for node in checking.body}
    assert seen == PUBLIC | {"weft": ("optim", "world")}


@pytest.mark.parametrize(("package", "name"), [(where, name) for where, names in MOVED.items() for name in names])
def test_old_names_are_aliases_for_a_release(package: str, name: str) -> None:
    with pytest.deprecated_call(match=f"weft.{name} is now {package}.{name}"):
        assert getattr(weft, name) is getattr(importlib.import_module(package), name)


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="module 'weft' has no attribute 'atention'"):
        weft.atention  # noqa: B018
    assert not hasattr(weft, "missing")


def test_importing_weft_imports_nothing_else() -> None:
    python("""
import sys, weft
assert "torch" not in sys.modules
assert callable(weft.comm.Call) and issubclass(weft.errors.CommError, RuntimeError) and weft.ops.scan.METHODS
assert "torch" in sys.modules and "weft.optim" not in sys.modules
""")


@pytest.mark.parametrize(
    "first",
    [
        "import weft.ops.attention.plan, weft.ops.linear_attention.chunk, weft.ops.sequence.layout",
        pytest.param("from weft import *", marks=pytest.mark.slow),
        "import weft.ops.sequence as one, weft.ops.attention as two",
    ],
)  # fmt: skip
def test_functions_do_not_share_names_with_packages(first: str) -> None:
    """Whichever was imported first; the packages can still be imported, and the functions pickled."""
    python(f"""
{first}
import pickle, sys, types
import weft
import weft.ops.attention.plan, weft.ops.linear_attention.gate, weft.ops.sequence.layout
from weft import attention, linear_attention, sequence
for name, one in dict(attention=attention, linear_attention=linear_attention, sequence=sequence).items():
    assert isinstance(one, types.FunctionType) and one is getattr(weft, name), name
    assert isinstance(sys.modules["weft.ops." + name], types.ModuleType)
    assert pickle.loads(pickle.dumps(one)) is one
assert isinstance(weft.ops.attention.plan, types.ModuleType)
""")


def test_names_in_a_compiled_function() -> None:
    """Dynamo looks names up by its own rules."""
    python("""
import torch, weft
def attend(q):
    return weft.attention(q, q, q, causal=True)
q = torch.randn(1, 8, 2, 4)
found = torch.compile(attend, backend="eager")(q)
torch.testing.assert_close(found, weft.attention(q, q, q, causal=True))
""")


def test_names_can_be_replaced_in_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """By functions; only packages do not take their place."""
    with monkeypatch.context() as patch:
        patch.setattr(weft, "attention", len)
        assert weft.attention is len
    assert weft.attention is not len and callable(weft.attention)


HELP = [
    [], ["train"], ["demo"], ["sample"], ["report"], ["bench"], ["bench", "scan"], ["bench", "matrix"], ["trace"],
    ["trace", "scan"], ["kernels"],
]  # fmt: skip
PROGRAM = """
import json, resource, sys
from weft.cli import main
status = 0
try:
    main()
except SystemExit as end:
    status = end.code or 0
used = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps([status, "torch" in sys.modules, used.ru_utime + used.ru_stime]), file=sys.stderr)
"""


@pytest.mark.parametrize("words", [*([*words, "--help"] for words in HELP), ["--version"]], ids=" ".join)
def test_help_is_quick(words: list[str]) -> None:
    """Under a second of CPU: torch alone takes longer, and is not imported."""
    environment = {**os.environ, "COLUMNS": "120"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *words], capture_output=True, text=True, timeout=120, env=environment
    )
    status, with_torch, seconds = json.loads(done.stderr)
    assert status == 0 and not with_torch and seconds < 1, (status, with_torch, seconds)
    assert "weft" in done.stdout


def test_top_level_help_is_short(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from weft.cli import COMMANDS, main

    for words in (["--help"], []):
        monkeypatch.setattr(sys, "argv", ["weft", *words])
        with pytest.raises(SystemExit) as end:
            main()
        captured = capsys.readouterr()
        text = captured.out if words else captured.err
        assert end.value.code == (0 if words else 2) and "--ranks" not in text and len(text.splitlines()) < 20
        assert all(any(line.split()[:1] == [name] for line in text.splitlines()) for name in COMMANDS)
        assert max(map(len, text.splitlines())) <= 100


def test_the_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from weft.cli import main

    monkeypatch.setattr(sys, "argv", ["weft", "--version"])
    main()
    assert capsys.readouterr().out == f"weft {weft.__version__}\n"


def test_a_reader_that_has_seen_enough_is_no_fault() -> None:
    weft = f"{sys.executable} -c 'from weft.cli import main; main()'"
    done = subprocess.run(["sh", "-c", f"{weft} train --help | head -c 1"], capture_output=True, text=True, timeout=120)
    assert done.stdout and not done.stderr
