"""Which torch the simulated device fits; and that it comes only when it is asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from worlds import simulated_device

from weft.world import simulated


def test_it_fits_the_pinned_torch() -> None:
    assert simulated.fits() is (torch.__version__.partition("+")[0] == simulated.TORCH)


def test_another_torch_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests are skipped with one line; `install` refuses with it."""
    monkeypatch.setattr(torch, "__version__", "2.99.1+cpu")
    words = f"the simulated device fits torch {simulated.TORCH}, and this is 2.99.1"
    assert not simulated.fits() and words in str(simulated.misfit())
    with pytest.raises(pytest.skip.Exception, match=words):
        simulated_device()
    monkeypatch.setattr(simulated, "_kept", [])
    with pytest.raises(RuntimeError, match=words):
        simulated.install()


def test_a_torch_with_cuda_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", simulated.TORCH)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert not simulated.fits() and "CUDA is available" in str(simulated.misfit())


def test_nothing_happens_until_it_is_installed() -> None:
    """Importing it leaves torch as it was; importing worlds does not import it."""
    program = """
import sys, torch, weft
weft.world.VirtualWorld
assert "weft.world.simulated" not in sys.modules
names = [torch.empty, torch.UntypedStorage.__new__, torch.nn.Parameter.data, torch.autograd.graph._engine_run_backward]
import weft.world.simulated as simulated
assert names == [
    torch.empty, torch.UntypedStorage.__new__, torch.nn.Parameter.data, torch.autograd.graph._engine_run_backward
]
assert torch._C._get_privateuse1_backend_name() == "privateuseone" and not torch.accelerator.is_available()
if simulated.fits():
    simulated.install()
    simulated.install()
    assert torch.device("sim").type == "sim" and torch.ones(2, device="sim").sum().item() == 2
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("sim")
def test_the_device_module() -> None:
    module = torch.get_device_module("sim")
    assert module is torch.get_device_module(torch.device("sim", 0)) and module.is_available()
    assert (module.current_device(), module.device_count()) == (0, 1)
    assert module.default_stream() is module.current_stream()
    side = module.Stream()
    with module.stream(side):
        assert module.current_stream() is side
        with module.stream(None):
            assert module.current_stream() is side
    assert module.current_stream() is module.default_stream()
    module.set_stream(side)
    assert module.current_stream() is side
    before = module.memory_allocated()
    held = torch.empty(1000, device="sim")
    assert module.memory_allocated() == before + 4000
    del held
    assert module.memory_allocated() == before
    start, end = module.Event(enable_timing=True), module.Event(enable_timing=True)
    start.record()
    end.record()
    assert 0 <= start.elapsed_time(end) < 1000
    state = module.get_rng_state()
    first = torch.randn(3, device="sim")
    module.set_rng_state(state)
    assert torch.equal(first, torch.randn(3, device="sim"))
    assert set(module.get_amp_supported_dtype()) == {torch.float16, torch.bfloat16}
