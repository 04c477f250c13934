"""fla's names over ranks: its signatures, what is refused, and arguments of wrong kinds."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_fla import HOMES
from test_wrong_kinds import SLICES, find_wrong, rightly
from worlds import virtual_world
from wrong_kinds import SUBJECTS, VALUES, Subject

import weft
from weft.integrations import fla as ours
from weft.integrations.fla.keywords import INSTEAD


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", HOMES)
def test_the_signatures_are_the_originals(name: str) -> None:
    pytest.importorskip("fla")
    original = inspect.unwrap(getattr(importlib.import_module(HOMES[name]), name))
    wanted = [one for one in inspect.signature(original).parameters.values() if one.kind is not one.VAR_KEYWORD]
    found = list(inspect.signature(getattr(ours, name)).parameters.values())
    assert [one.name for one in found[: len(wanted)]] == [one.name for one in wanted]
    assert [one.default for one in found[: len(wanted)]] == [one.default for one in wanted]
    assert {one.kind for one in found[: len(wanted)]} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}
    added = {one.name for one in found[len(wanted) :]}
    assert {"group", "layout", "sequence"} <= added
    # What it reads from its keywords is an argument here, or is refused with a word of what to do.
    read = re.findall(r"kwargs\.\w+\(.(\w+)|.(\w+). in kwargs", inspect.getsource(original))
    assert {one or other for one, other in read} <= added | INSTEAD.keys()


def test_fla_is_not_imported() -> None:
    code = "import sys, weft.integrations.fla; sys.exit('fla' in sys.modules or 'triton' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


Q, BETA, STATE = torch.ones(1, 6, 2, 4) / 2, torch.ones(1, 6, 2) / 2, torch.ones(1, 2, 4, 4)
RIGHT: dict[str, dict[str, Any]] = {
    "chunk_delta_rule": {"q": Q, "k": Q, "v": Q, "beta": BETA},
    "chunk_gated_delta_rule": {"q": Q, "k": Q, "v": Q, "g": -BETA, "beta": BETA},
    "chunk_kda": {"q": Q, "k": Q, "v": Q, "g": -Q, "beta": BETA},
    "chunk_gla": {"q": Q, "k": Q, "v": Q, "g": -Q},
    "chunk_simple_gla": {"q": Q, "k": Q, "v": Q, "g": -BETA},
    "causal_conv1d": {"x": Q.flatten(2), "weight": torch.ones(8, 3)},
}


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("chunk_gated_delta_rule", {"cp_context": object}, "cp_context=<class 'object'> is not supported over ranks"),
        ("chunk_gated_delta_rule", {"cp_context": object}, "(rank 1); pass group=, layout= or sequence= of weft"),
        ("chunk_gated_delta_rule", {"chunk_indices": torch.ones(2)}, "chunk_indices=a tensor of torch.float32 is not"),
        ("chunk_gated_delta_rule", {"head_first": True}, "head_first=True is not supported over ranks (rank 1)"),
        ("chunk_gated_delta_rule", {"transpose_state_layout": True}, "it is now state_v_first"),
        ("chunk_gated_delta_rule", {"g": -Q}, "g must be [B, T, HV], got [1, 6, 2, 4] (rank 1)"),
        ("chunk_gated_delta_rule", {"allow_neg_eigval": True}, "needs use_beta_sigmoid_in_kernel=True (rank 1)"),
        ("chunk_gated_delta_rule", {"use_gate_in_kernel": True}, "use_gate_in_kernel=True needs A_log (rank 1)"),
        ("chunk_gated_delta_rule", {"A_log": torch.ones(2)}, "A_log needs use_gate_in_kernel=True (rank 1)"),
        ("chunk_gated_delta_rule", {"use_gate_in_kernel": True, "A_log": torch.ones(3)},
         "A_log must have 2 entries, got 3 (rank 1)"),
        ("chunk_kda", {"use_graph": True}, "use_graph=True is not supported over ranks (rank 1); leave it out"),
        ("chunk_kda", {"max_num_seqs": 4}, "max_num_seqs=4 is not supported over ranks (rank 1)"),
        ("chunk_kda", {"disable_recompute": True}, "disable_recompute=True is not supported over ranks (rank 1)"),
        ("chunk_kda", {"return_intermediate_states": True}, "return_intermediate_states=True is not supported"),
        ("chunk_kda", {"lower_bound": -5.0}, "lower_bound needs use_gate_in_kernel=True (rank 1)"),
        ("chunk_kda", {"use_gate_in_kernel": True, "safe_gate": True}, "needs lower_bound (rank 1)"),
        ("chunk_kda", {"use_gate_in_kernel": True, "lower_bound": 1}, "lower_bound must be negative, got 1 (rank 1)"),
        ("chunk_kda", {"g": -BETA}, "g must be [B, T, HV, K], got [1, 6, 2] (rank 1)"),
        ("chunk_gla", {"g": -BETA}, "g must be [B, T, H, K], got [1, 6, 2] (rank 1)"),
        ("chunk_simple_gla", {"g_gamma": -torch.ones(2)}, "pass g or g_gamma, not both (rank 1)"),
        ("chunk_simple_gla", {"initial_state": STATE[..., :3], "state_v_first": True},
         "initial_state must be [1, 2, 4, 4], got [1, 2, 3, 4] (rank 1)"),
        ("chunk_delta_rule", {"cu_seqlens_cpu": torch.tensor([0, 18])}, "a copy of cu_seqlens, which is missing"),
        ("chunk_delta_rule", {"seq_idx": torch.ones(6)}, "pass cu_seqlens, of the whole sequence"),
        ("causal_conv1d", {"seq_idx": torch.ones(6)}, "pass cu_seqlens, of the whole sequence"),
        ("causal_conv1d", {"activation": "relu"}, "activation 'relu' is not one of silu, swish (rank 1)"),
        ("causal_conv1d", {"backend": "torch"}, "backend 'torch' is not one of triton, cuda, mix (rank 1)"),
        ("causal_conv1d", {"residual": Q}, "residual [1, 6, 2, 4] on cpu must be as x [1, 6, 8] on cpu (rank 1)"),
        ("causal_conv1d", {"weight": None}, "weight must be a floating tensor, got NoneType (rank 1)"),
    ],
)  # fmt: skip
def test_what_is_refused_is_refused_on_all_ranks(name: str, changes: dict[str, Any], words: str) -> None:
    def program(axis: weft.Axis) -> str:
        try:
            getattr(ours, name)(**{**RIGHT[name], **(changes if axis.rank == 1 else {})}, group=axis)
        except (ValueError, TypeError, NotImplementedError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    found = virtual_world(3).run(program).results
    assert len(set(found)) == 1 and words in found[0], found


def subject_of(name: str) -> Subject:
    function = getattr(ours, name)
    return Subject(
        lambda axis: lambda **changes: function(**{**RIGHT[name], "group": axis, **changes})[0],
        function,
        leave_out=("group", "kwargs"),
    )


def find_all_wrong(name: str, keep: Callable[[tuple[str, str]], bool], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    subject = subject_of(name)
    monkeypatch.setitem(SUBJECTS, name, subject)
    cases = [(argument, value) for argument in subject.arguments() for value in VALUES if keep((argument, value))]
    found = []
    for number, case in enumerate(cases):
        later = number % 2 == 1
        found.append(find_wrong(name, *case, later, rightly(subject, later)))
    return [words for words in found if words is not None]


@pytest.mark.parametrize("name", HOMES)
def test_a_slice_of_all_wrong_kinds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def keep(case: tuple[str, str]) -> bool:
        return zlib.crc32(repr((name, *case)).encode()) % SLICES < 2

    found = find_all_wrong(name, keep, monkeypatch)
    assert not found, "\n".join(found)


@pytest.mark.slow
@pytest.mark.parametrize("name", HOMES)
def test_all_wrong_kinds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = find_all_wrong(name, lambda case: True, monkeypatch)
    assert not found, f"{len(found)}:\n" + "\n".join(found[:20])
