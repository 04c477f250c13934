"""How mixers of hybrid models are taken hold of: nothing runs beside weft, nothing changes for other models."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hybrids import HYBRIDS, each_alone, make_hybrid, torch_functions, without
from test_transformers_refusals import assert_refused
from tiny import LENGTH, SIZES, Result, alone, distance, packed_batch, plain_batch, shared, sum_of
from torch import Tensor
from worlds import virtual_world

import weft
from weft.integrations.transformers import ContextParallel
from weft.integrations.transformers.attention import Forward
from weft.integrations.transformers.linear_layers import MixerCall, apply_delta_rule
from weft.integrations.transformers.mixers import FAMILIES, REFUSED

transformers = pytest.importorskip("transformers", reason="the extra weft-torch[transformers] is not installed")
VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])
pytestmark = pytest.mark.skipif(VERSION < (5, 15), reason="hybrid models need transformers 5.15")
DELTA, FUSED = "torch_chunk_gated_delta_rule", "mamba2_split_conv1d_scan_combined"


def module_of(model: Any) -> Any:
    return sys.modules[type(model).__module__]


def enabled(cp: ContextParallel, name: str, **changes: Any) -> Any:
    model = make_hybrid(name, **changes)
    cp.enable(model)
    return model


def on_three(name: str, training: bool = False) -> Result:
    def run(axis: weft.Axis) -> Result:
        cp = ContextParallel(axis)
        return shared(cp, enabled(cp, name).train(training), packed_batch(), own_loss=False)

    return sum_of(virtual_world(3).run(run).results)


def test_fused_functions_are_not_tried_in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """With mamba_ssm at hand a mixer calls one function for convolution and scan, and nothing else."""
    names = [name for name, family in FAMILIES.items() if FUSED in family.functions]
    assert len(names) == 6
    for name in names:
        model = make_hybrid(name).train()
        asked: list[str] = []

        def fused(projected: Tensor, *_: Any, name: str = name, asked: list[str] = asked, **__: Any) -> Tensor:
            asked.append(name)
            return projected[..., : SIZES["hidden_size"]]

        wanted = each_alone(model, packed_batch())
        monkeypatch.setattr(module_of(model), FUSED, fused)
        assert distance(on_three(name, training=True), wanted) < 2e-5
        assert not asked
        model(packed_batch()["input_ids"], use_cache=False)  # is not enabled
        assert set(asked) == {name}


def test_functions_of_packages_that_do_not_run_here_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """As fla's on a CPU."""

    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("0 active drivers ([]). There should only be one.")

    model = make_hybrid("qwen3_next")
    wanted = each_alone(model, packed_batch())
    for name in ("causal_conv1d_fn", DELTA):
        monkeypatch.setattr(module_of(model), name, fails)
        assert distance(on_three("qwen3_next"), wanted) < 2e-5
        with pytest.raises(RuntimeError, match="0 active drivers"):
            model(packed_batch()["input_ids"])


@pytest.mark.slow
def test_with_fla_itself() -> None:
    pytest.importorskip("fla")
    program = """
import sys
sys.path[:0] = {paths!r}
import fla
import torch, transformers
from hybrids import HYBRIDS
from tiny import SIZES, plain_batch
from weft.integrations.transformers import ContextParallel
kind, differs = HYBRIDS["qwen3_next"]
model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**{{**SIZES, **differs}}))
try:
    model(plain_batch()["input_ids"])
    print("runs alone")
except RuntimeError as error:
    print(error)
cp = ContextParallel()
cp.enable(model)
print("loss", model(**cp.shard(plain_batch())).loss.item() > 0)
"""
    found = subprocess.run(
        [sys.executable, "-c", program.format(paths=sys.path)], capture_output=True, text=True, timeout=300, check=True
    )
    assert "active driver" in found.stdout and "loss True" in found.stdout, found.stdout


def passing(hidden_states: Tensor, **_: Any) -> Tensor:
    return hidden_states


def attending(hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
    return hidden_states, None


def replace_forward(model: Any) -> None:
    """As a kernel from the hub does with a whole layer."""
    model.model.layers[2].linear_attn.forward = passing


def replace_module(model: Any) -> None:
    model.model.layers[2].linear_attn = torch.nn.Identity()
    model.model.layers[2].linear_attn.forward = passing


def replace_attention(model: Any) -> None:
    model.model.layers[1].self_attn.forward = attending


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (replace_forward, "model.layers.2.linear_attn (Qwen3NextGatedDeltaNet) called causal_conv1d_fn 0 times"),
        (replace_module, "model.layers.2.linear_attn of Qwen3NextForCausalLM did not run"),
        (replace_attention, "only 0 of 1 layers of Qwen3NextForCausalLM attended"),
    ],
)
def test_a_layer_that_goes_its_own_way_is_named(change: Any, words: str) -> None:
    def after(cp: ContextParallel) -> None:
        model = enabled(cp, "qwen3_next")
        model(**cp.shard(plain_batch()))
        change(model)
        model(**cp.shard(plain_batch()))

    assert_refused(after, words)


def test_a_layer_that_was_replaced_before_is_named_too() -> None:
    def before(cp: ContextParallel) -> None:
        model = make_hybrid("qwen3_next")
        replace_forward(model)
        cp.enable(model)
        model(**cp.shard(plain_batch()))

    assert_refused(before, "model.layers.2.linear_attn (Qwen3NextGatedDeltaNet) called causal_conv1d_fn 0 times")


@pytest.mark.parametrize("name", HYBRIDS)
def test_every_function_of_every_mixer_is_counted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever of them is put back by others, the first mixer that calls it is named."""
    model = make_hybrid(name)
    cp = ContextParallel()
    cp.enable(model)
    part = cp.shard(packed_batch())
    model(**part)
    with torch.no_grad():
        for function, ours in FAMILIES[name].functions.items():
            if ours.__name__ == "skip_fused":
                continue
            path = function.split(".")
            owner = module_of(model) if len(path) == 1 else getattr(module_of(model), path[0])
            with monkeypatch.context() as patch:
                patch.setattr(owner, path[-1], getattr(owner, path[-1]).__wrapped__)
                with pytest.raises(
                    NotImplementedError, match=rf"layers.0.*{FAMILIES[name].mixer}.* called {function} 0"
                ):
                    model(**part)
    model(**part)


def test_a_mixer_that_convolves_twice_is_named() -> None:
    def program(cp: ContextParallel) -> None:
        model = enabled(cp, "lfm2")
        conv = model.model.layers[2].conv
        once = type(conv).forward
        conv.forward = lambda hidden_states, **more: once(conv, once(conv, hidden_states, **more), **more)
        model(**cp.shard(plain_batch()))

    assert_refused(program, "model.layers.2.conv (Lfm2ShortConv) called causal_conv1d_fn 2 times in place of once")


def test_a_mixer_cannot_be_called_alone() -> None:
    def program(cp: ContextParallel) -> None:
        model = enabled(cp, "lfm2")
        model.model.layers[0].conv(torch.zeros(1, 3, 32, dtype=torch.float64))

    assert_refused(program, "model.layers.0.conv (Lfm2ShortConv) was called without the keyword 'weft'")


def test_an_error_inside_a_mixer_leaves_the_model_usable() -> None:
    def run(axis: weft.Axis) -> Result:
        cp = ContextParallel(axis)
        model = enabled(cp, "mamba2")  # no attention, so that the mixers are the first to see the keyword
        hook = model.backbone.register_forward_pre_hook(
            lambda _, args, given: (args, {**given, "temperature": 0.5}), with_kwargs=True
        )
        with pytest.raises(NotImplementedError, match=r"not known here \(temperature\) in Mamba2ForCausalLM"):
            model(**cp.shard(packed_batch()))
        hook.remove()
        return shared(cp, model, packed_batch(), own_loss=False)

    wanted = each_alone(make_hybrid("mamba2"), packed_batch())
    assert distance(sum_of(virtual_world(2).run(run).results), wanted) < 2e-5


def test_other_models_of_the_process_do_not_change() -> None:
    """Not enabled, disabled and paused ones: the very bits of before."""
    for name in ("qwen3_next", "nemotron_h", "minimax", "lfm2"):
        other, model, batch = make_hybrid(name), make_hybrid(name), plain_batch()
        hooks = [(len(one._forward_pre_hooks), len(one._forward_hooks)) for one in model.modules()]
        with torch_functions(other):
            before = alone(other, batch)
        functions = {path: vars(module_of(model)).get(path) for path in FAMILIES[name].functions}
        cp = ContextParallel()
        cp.enable(model)
        shared(cp, model, batch)
        found = [alone(other, batch)]
        with cp.paused():
            found.append(alone(model, batch))
        cp.disable(model)
        found.append(alone(model, batch))
        for one in found:
            assert one.loss == before.loss and all(torch.equal(one.grads[n], before.grads[n]) for n in before.grads)
        assert hooks == [(len(one._forward_pre_hooks), len(one._forward_hooks)) for one in model.modules()]
        again = {path: vars(module_of(model)).get(path) for path in FAMILIES[name].functions}
        assert all(functions[path] is again[path] or again[path].__wrapped__ is functions[path] for path in again)
        cp.enable(model)
        assert distance(shared(cp, model, batch), before) < 2e-5


def test_generate_while_paused_on_one_rank_alone() -> None:
    prompt = plain_batch(1, 9)["input_ids"]
    for name in ("lfm2", "mamba2"):
        wanted = make_hybrid(name).generate(prompt, max_new_tokens=6, do_sample=False)

        def run(axis: weft.Axis, name: str = name) -> Tensor | None:
            cp = ContextParallel(axis)
            model, text = enabled(cp, name), None
            shared(cp, model, plain_batch())
            if axis.rank == 1:
                with cp.paused():
                    text = model.generate(prompt, max_new_tokens=6, do_sample=False)
            shared(cp, model, plain_batch())
            return text

        assert torch.equal(virtual_world(2).run(run).results[1], wanted)


def test_a_cache_is_refused_by_every_name() -> None:
    def program(cp: ContextParallel) -> None:
        enabled(cp, "mamba2")(**cp.shard(plain_batch()), cache_params=object())

    assert_refused(program, "was called with a cache")


def test_a_copy_of_an_enabled_model_is_enabled() -> None:
    def run(axis: weft.Axis) -> Result:
        cp = ContextParallel(axis)
        return shared(cp, copy.deepcopy(enabled(cp, "bamba")), packed_batch(), own_loss=False)

    wanted = each_alone(make_hybrid("bamba"), packed_batch())
    assert distance(sum_of(virtual_world(3).run(run).results), wanted) < 2e-5


def test_a_model_without_a_head() -> None:
    def run(axis: weft.Axis) -> Tensor:
        cp, model = ContextParallel(axis), make_hybrid("qwen3_next").model
        cp.enable(model)
        part = cp.shard({"input_ids": plain_batch()["input_ids"]})
        return weft.unshard(model(**part).last_hidden_state, 1, sequence=cp.sequence(part))

    model = make_hybrid("qwen3_next").model
    with torch_functions(model):
        whole = model(plain_batch()["input_ids"]).last_hidden_state
    for hidden in virtual_world(3).run(run).results:
        assert (hidden - whole).abs().max() < 1e-5


def test_nothing_is_printed(capfd: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder) -> None:
    model = make_hybrid("nemotron_h").train()
    capfd.readouterr()
    recwarn.clear()
    cp = ContextParallel()
    cp.enable(model)
    model(**cp.shard(packed_batch())).loss.backward()
    assert tuple(capfd.readouterr()) == ("", "") and not recwarn.list


def test_a_gate_of_minus_infinity_forgets_all_that_was_before() -> None:
    draw = {"generator": torch.Generator().manual_seed(0), "dtype": torch.float64}
    q, k, v = (torch.randn(1, LENGTH, 2, 6, **draw) for _ in range(3))
    beta, cut = torch.rand(1, LENGTH, 2, **draw) * 2, 19
    g = -torch.rand(1, LENGTH, 2, 6, **draw) / 10
    g[:, cut] = -torch.inf

    def run(axis: weft.Axis, tokens: slice) -> Tensor:
        mine = [weft.shard(x[:, tokens], 1, group=axis) for x in (q, k, v, g, beta)]
        sequence = weft.sequence(mine[0].shape[1], group=axis)
        whole = ContextParallel(axis).shard(plain_batch())["weft"]
        call = MixerCall("a mixer", Forward("a model", whole, [sequence], "auto"))
        out, _ = apply_delta_rule(call, *mine, use_qk_l2norm_in_kernel=True)
        return weft.unshard(out, 1, sequence=sequence)

    whole = virtual_world(3).run(lambda axis: run(axis, slice(0, LENGTH))).results[2]
    after = virtual_world(1).run(lambda axis: run(axis, slice(cut, LENGTH))).results[0]
    assert (whole[:, cut:] - after).abs().max() < 1e-12 and whole.isfinite().all()


def test_another_transformers_and_other_mixers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_hybrid("lfm2")
    with monkeypatch.context() as patch:
        patch.setattr(transformers, "__version__", "5.14.1")
        assert_refused(
            lambda cp: cp.enable(model), "hybrid model, for which transformers 5.15 is needed; this is 5.14.1"
        )
    with monkeypatch.context() as patch:
        patch.delattr(module_of(model), "causal_conv1d_fn")
        assert_refused(lambda cp: cp.enable(model), "has mixers Lfm2ShortConv without causal_conv1d_fn")
    model.model.layers[0].conv = torch.nn.Identity()
    assert_refused(lambda cp: cp.enable(model), "has 2 layers of type conv, but 1 modules Lfm2ShortConv")
    cp = ContextParallel()
    cp.enable(make_hybrid("lfm2"))  # as it is


ZAMBA = {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon_mamba": ("FalconMambaConfig", {}),
    "glm5_next_text": ("Glm5NextTextConfig", {"num_key_value_heads": 4}),
    "inkling2_text": ("Inkling2TextConfig", {}),
    "inkling_text": ("InklingTextConfig", {}),
    "jamba": ("JambaConfig", {}),
    "mamba": ("MambaConfig", {}),
    "qwen4_exp_text": ("Qwen4ExpTextConfig", {}),
    "recurrent_gemma": ("RecurrentGemmaConfig", {}),
    "rwkv": ("RwkvConfig", {}),
    "xlstm": ("xLSTMConfig", {"num_heads": 4, "embedding_dim": 32}),
    "zamba": ("ZambaConfig", ZAMBA),
    "zaya": ("ZayaConfig", {}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_hybrids_that_would_be_wrong_are_refused_by_name(name: str) -> None:
    kind, differs = KINDS[name]
    config = getattr(transformers, kind)(**{**SIZES, **differs})
    assert config.model_type == name
    with torch.device("meta"), without("fla"):
        model = transformers.AutoModel.from_config(config)
    assert_refused(lambda cp: cp.enable(model), f"{type(model).__name__} has {REFUSED[name]}; of hybrid models only")


def test_hybrids_with_images_are_refused() -> None:
    with torch.device("meta"), without("fla"):
        model = transformers.AutoModelForImageTextToText.from_config(transformers.Qwen3_5Config())
    assert_refused(lambda cp: cp.enable(model), "enable its text model alone")


def test_positions_of_qwen3_5_and_the_masks_of_granite() -> None:
    """Qwen3.5 makes four axes of the positions, and Granite asks for its mask without them."""
    for name, batch in (("qwen3_5_text", plain_batch()), ("granitemoehybrid", packed_batch())):
        with_positions = {"position_ids": torch.arange(LENGTH).expand(2, -1), **batch}
        wanted = each_alone(make_hybrid(name), batch)

        def run(axis: weft.Axis, name: str = name, batch: Any = with_positions) -> Result:
            cp = ContextParallel(axis, layout="contiguous")
            model = enabled(cp, name)
            return shared(cp, model, batch, own_loss=False)

        assert distance(sum_of(virtual_world(3).run(run).results), wanted) < 2e-5, name


def test_the_docs_name_every_family() -> None:
    page = (Path(__file__).parents[2] / "docs" / "transformers.md").read_text()
    for name in (*FAMILIES, *REFUSED):
        assert f"`{name}`" in page, name
