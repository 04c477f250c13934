"""The Triton kernels compiled for GPUs that are not here: no spills, and bf16 differs from fp16 in loads and stores."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend

from weft.bench.linear_attention.kernels import DECAYS, GPUS
from weft.ops.fused.ahead import Counted, Shape, _specialise, compile_for
from weft.ops.fused.launch import Launch
from weft.ops.fused.operators import _SCHEMAS
from weft.ops.fused.tiling import KERNELS
from weft.ops.linear_attention.fused.ahead import launches, phases


def has_products(made: Launch) -> bool:
    """Of matrices; a chunk of 16 tokens is inverted by substitution alone."""
    name = made.kernel.__name__
    return name not in ("scan_pieces", "decay_keys", "join_key_grads") and (name, made.constants.get("BC")) != (
        "invert_pairs",
        16,
    )


def check(made: Launch, capability: int) -> None:
    compiled = compile_for(made, capability)
    where = f"{made.kernel.__name__} {made.constants} on sm_{capability}"
    assert compiled.spilled == 0, f"{where} spills {compiled.spilled} bytes"
    assert made.stages == 2 and compiled.shared <= GPUS[capability].shared_of_program, where
    assert 0 < compiled.registers <= 255
    assert (compiled.matrix > 0) == has_products(made), where
    assert not re.search(r"\b(?:atom|red)\.", compiled.ptx), f"{where} has atomics"
    assert not re.search(r"\btt\.(?:make_tensor|descriptor)", compiled.ttir), f"{where} has descriptors"


def test_every_kernel_compiles_without_spills() -> None:
    """One class, each kernel for one of the three architectures; `make soak` takes all."""
    found = launches(Shape("scalar"))
    assert {one.name for one in found} == set(KERNELS) == set(_SCHEMAS)
    for number, one in enumerate(found):
        check(one.launch, list(GPUS)[number % 3])


CLASSES = list(itertools.product(DECAYS, (torch.bfloat16, torch.float16, torch.float32), (16, 32, 64, 128)))
DIMS = ((64, 64), (128, 128), (256, 256), (128, 256), (96, 80))


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("number", range(len(CLASSES)))
def test_every_class_compiles_without_spills(number: int) -> None:
    """Each class for each architecture, with other K and V on each; the classes take turns with those, and with gates
    in half precision.
    """  # fmt: skip
    decay, dtype, chunk = CLASSES[number]
    for turn, capability in enumerate(GPUS):
        keys, values = DIMS[(number + 2 * turn) % len(DIMS)]
        gates = dtype if decay == "vector" and (number + turn) % 2 else torch.float32
        for one in launches(Shape(decay, keys, values, chunk, dtype, gates)):
            check(one.launch, capability)


def test_a_spill_is_found() -> None:
    """The measure itself: a kernel whose blocks are too large is found to spill."""
    made = next(one.launch for one in launches(Shape("scalar", dtype=torch.float32)) if one.name == "output_intra")
    large = replace(made, constants=made.constants | {"BR": 64, "BK": 64, "BV": 64}, warps=4)
    assert compile_for(large, 80).spilled > 0


FP32_ONLY = ("scan_pieces", "delta_states", "delta_state_grads")  # what they read is never in half precision


def lower(made: Launch) -> str:
    """The kernel in Triton's own IR, before anything is decided for a GPU."""
    from triton._C.libtriton import ir

    target = GPUTarget("cuda", 90, 32)
    backend = make_backend(target)
    signature, constants, attributes = _specialise(made)
    source = ASTSource(made.kernel, signature, constants, attributes)
    options = backend.parse_options({**made.options, **source.parse_options()})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions, modules = backend.get_codegen_implementation(options), backend.get_module_map()
    return str(source.make_ir(target, options, functions, modules, context))


def check_half_precision(launches: Callable[[Shape], list[Counted]], decay: str) -> None:
    """Triton's interpreter cannot do arithmetic in bf16; it need not: there is none. What it proves of fp16 holds."""
    for gate_dtype in (None, torch.float32):
        bf16, fp16 = (
            launches(Shape(decay, 96, 80, 64, dtype, gate_dtype or dtype)) for dtype in (torch.bfloat16, torch.float16)
        )
        for one, other in zip(bf16, fp16, strict=True):
            texts = [re.sub(r" loc\(.*?\)|^#loc.*$", "", lower(x.launch), flags=re.M) for x in (one, other)]
            # The types, and the names of functions, which hold them ("Pfp16").
            assert texts[0].replace("bf16", "f16") == texts[1].replace("Pfp16", "Pf16"), one.name
            assert "bf16" in texts[0] or one.name in FP32_ONLY
            for line in (line for line in texts[0].splitlines() if "bf16" in line):
                operation = re.search(r"= ([\w.]+)|^\s*(tt\.store|tt\.func|tt\.call)", line)
                assert operation is None or (operation[1] or operation[2]) in (
                    "tt.load", "tt.store", "tt.func", "tt.call", "tt.splat", "tt.addptr", "tt.broadcast", "arith.extf",
                    "arith.truncf", "arith.constant", "ub.poison",
                ), line  # fmt: skip


@pytest.mark.parametrize("decay", DECAYS)
def test_bf16_and_fp16_differ_in_loads_and_stores_only(decay: str) -> None:
    check_half_precision(launches, decay)


@pytest.mark.parametrize("decay", ["scalar", *(pytest.param(decay, marks=pytest.mark.slow) for decay in DECAYS)])
def test_one_token_and_one_head_are_taken(decay: str) -> None:
    """At a launch Triton makes a number that is 1 a constant, which has fewer methods; its interpreter does not."""
    for one in launches(Shape(decay, 16, 16, heads=1, tokens=1)):
        assert one.name in lower(one.launch)


@pytest.mark.parametrize("decay", ["vector"])
def test_heads_may_lie_far_apart(decay: str) -> None:
    """Heads first, a head times its stride passes 2**31 on long sequences: those products are of 64 bits."""
    for one in launches(Shape(decay, 96, 80)):
        used = re.findall(r"= (arith\.\w+) .*%\w+_[bh]\b.* : (i32|i64)\b", lower(one.launch))
        assert used or one.name == "scan_pieces"  # which has no strides
        assert ("arith.muli", "i32") not in used, one.name


PHASES = {
    "forward": ("chunk_states", "scan_pieces"),
    "forward.intra": ("output_intra",),
    "forward.finish": ("scan_pieces", "output_inter"),
    "backward": ("chunk_states", "scan_pieces"),
    "backward.intra": ("chunk_states", "scan_pieces", "query_grads", "key_grads", "output_intra"),
    "backward.finish": ("scan_pieces", "key_finish", "output_inter"),
}


def check_page(scalar: dict[str, list[Counted]], vector: dict[str, list[Counted]], wanted: dict[str, tuple]) -> None:
    """Phases launch the kernels that are ``wanted``, and docs/kernels.md has a row with them, their bytes and FLOPs."""
    page = (Path(__file__).parents[3] / "docs" / "kernels.md").read_text()
    for phase, names in wanted.items():
        assert tuple(one.name for one in scalar[phase]) == tuple(one.name for one in vector[phase]) == names
        sizes, flops = (
            [sum(getattr(one, key) for one in found[phase]) / (8192 * 16) for found in (scalar, vector)]
            for key in ("size", "flops")
        )
        figures = f"{sizes[0]:,.0f} ({sizes[1]:,.0f}) | {flops[0] / 1e3:.0f} ({flops[1] / 1e3:.0f}) |"
        row = next(line for line in page.splitlines() if figures in line)
        assert all(f"`{name}`" in row for name in names)


def test_the_docs_tell_what_each_phase_launches_moves_and_computes() -> None:
    check_page(phases(Shape("scalar")), phases(Shape("vector")), PHASES)
