"""The delta rule's Triton kernels compiled for GPUs that are not here: no spills, and what its phases launch."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from test_kernels_ahead import check, check_half_precision, check_page, lower

from weft.bench.linear_attention.kernels import GPUS
from weft.ops.delta_rule.fused.ahead import launches, phases
from weft.ops.delta_rule.fused.operators import _SCHEMAS
from weft.ops.fused.ahead import Shape

GATES = ("none", "scalar", "vector")
PHASES = {
    "forward": (
        "decay_keys", "key_pairs", "invert_pairs", "apply_inverse", "apply_inverse", "delta_states",
    ),
    "forward.intra": ("output_intra", "output_inter") * 2,
    "forward.finish": ("add_entering",),
    "backward.intra": (
        "decay_keys", "key_pairs", "invert_pairs", "apply_inverse", "apply_inverse", "delta_states", "chunk_states",
        "output_intra", "query_grads", "key_grads",
    ),
    "backward.finish": (
        "delta_state_grads", "apply_inverse", "query_grads", "key_grads", "join_key_grads", "key_finish",
    ),
}  # fmt: skip


def test_every_kernel_compiles_without_spills() -> None:
    """One class, each of its own kernels for one of the three architectures; `make soak` takes all, and the shared."""
    found = [one for one in launches(Shape("scalar")) if one.name in _SCHEMAS]
    assert {one.name for one in found} == set(_SCHEMAS)
    for number, one in enumerate(found):
        check(one.launch, list(GPUS)[number % 3])


CLASSES = list(itertools.product(GATES, (torch.bfloat16, torch.float16, torch.float32), (16, 32, 64)))
DIMS = ((64, 64), (128, 128), (256, 256), (128, 256), (96, 80))


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("number", range(len(CLASSES)))
def test_every_class_compiles_without_spills(number: int) -> None:
    """Each class for each architecture, with other K and V on each."""
    gate, dtype, chunk = CLASSES[number]
    for turn, capability in enumerate(GPUS):
        keys, values = DIMS[(number + 2 * turn) % len(DIMS)]
        for one in launches(Shape(gate, keys, values, chunk, dtype)):
            check(one.launch, capability)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("gate", GATES)
def test_the_sizes_of_models_compile_without_spills(gate: str, dim: int) -> None:
    for capability in GPUS:
        for one in launches(Shape(gate, dim, dim)):
            check(one.launch, capability)


@pytest.mark.parametrize("gate", ["scalar", *(pytest.param(gate, marks=pytest.mark.slow) for gate in GATES)])
def test_one_token_and_one_head_are_taken(gate: str) -> None:
    """At a launch Triton makes a number that is 1 a constant, which has fewer methods; its interpreter does not."""
    for one in launches(Shape(gate, 16, 16, heads=1, tokens=1)):
        assert one.name in lower(one.launch)


@pytest.mark.parametrize("gate", ["vector", *(pytest.param(gate, marks=pytest.mark.slow) for gate in GATES[:2])])
def test_bf16_and_fp16_differ_in_loads_and_stores_only(gate: str) -> None:
    check_half_precision(launches, gate)


def test_heads_may_lie_far_apart() -> None:
    """Heads first, a head times its stride passes 2**31 on long sequences: those products are of 64 bits."""
    for one in launches(Shape("vector", 96, 80)):
        used = re.findall(r"= (arith\.\w+) .*%\w+_[bh]\b.* : (i32|i64)\b", lower(one.launch))
        assert ("arith.muli", "i32") not in used, one.name


def test_the_docs_tell_what_each_phase_launches_moves_and_computes() -> None:
    scalar, vector = phases(Shape("scalar")), phases(Shape("vector"))
    assert scalar["backward"] == vector["backward"] == []  # a product of torch's
    check_page(scalar, vector, PHASES)
