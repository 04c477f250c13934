"""Autocast on the simulated device runs operators as CUDA's lists say."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

pytestmark = pytest.mark.usefixtures("sim")
HALF, FLOAT = torch.bfloat16, torch.float32


def made(*shape: int, dtype: torch.dtype = FLOAT) -> torch.Tensor:
    return torch.rand(*shape).to("sim", dtype)


IN_HALF: dict[str, Callable[[], torch.Tensor]] = {
    "linear": lambda: F.linear(made(2, 4), made(3, 4), made(3)),
    "matmul": lambda: made(2, 3) @ made(3, 2),
    "bmm": lambda: torch.bmm(made(1, 2, 3), made(1, 3, 2)),
    "addmm": lambda: torch.addmm(made(2), made(2, 3), made(3, 2)),
    "baddbmm": lambda: torch.baddbmm(made(1, 2, 2), made(1, 2, 3), made(1, 3, 2)),
    "einsum": lambda: torch.einsum("ij,jk->ik", made(2, 3), made(3, 2)),
    "mixed": lambda: made(2, 3) @ made(3, 2, dtype=HALF),
    "conv1d": lambda: F.conv1d(made(1, 2, 8), made(3, 2, 3)),
    "conv2d": lambda: F.conv2d(made(1, 2, 8, 8), made(3, 2, 3, 3)),
    "attention": lambda: F.scaled_dot_product_attention(made(1, 1, 4, 8), made(1, 1, 4, 8), made(1, 1, 4, 8)),
}
IN_FLOAT: dict[str, Callable[[], torch.Tensor]] = {
    "rms_norm": lambda: F.rms_norm(made(2, 4, dtype=HALF), (4,)),
    "rms_norm with a weight": lambda: F.rms_norm(made(2, 4, dtype=HALF), (4,), made(4)),
    "layer_norm": lambda: F.layer_norm(made(2, 4, dtype=HALF), (4,), made(4), made(4)),
    "group_norm": lambda: F.group_norm(made(2, 4, dtype=HALF), 2),
    "softmax": lambda: made(2, 4, dtype=HALF).softmax(-1),
    "log_softmax": lambda: made(2, 4, dtype=HALF).log_softmax(-1),
    "logsumexp": lambda: made(2, 4, dtype=HALF).logsumexp(-1),
    "exp": lambda: made(4, dtype=HALF).exp(),
    "log": lambda: made(4, dtype=HALF).log(),
    "pow": lambda: made(4, dtype=HALF) ** 2.5,
    "rsqrt": lambda: made(4, dtype=HALF).rsqrt(),
    "softplus": lambda: F.softplus(made(4, dtype=HALF)),
    "sum": lambda: made(4, dtype=HALF).sum(),
    "sum of a dimension": lambda: made(2, 4, dtype=HALF).sum(1),
    "prod": lambda: made(4, dtype=HALF).prod(),
    "cumsum": lambda: made(4, dtype=HALF).cumsum(0),
    "cumprod": lambda: made(4, dtype=HALF).cumprod(0),
    "norm": lambda: made(4, dtype=HALF).norm(),
    "norm of a dimension": lambda: torch.norm(made(2, 4, dtype=HALF), p=2, dim=1),
    "vector_norm": lambda: torch.linalg.vector_norm(made(4, dtype=HALF)),
    "cross_entropy": lambda: F.cross_entropy(made(2, 4, dtype=HALF), torch.zeros(2, dtype=torch.int64, device="sim")),
    "mse_loss": lambda: F.mse_loss(made(4, dtype=HALF), made(4, dtype=HALF)),
    "logits": lambda: F.binary_cross_entropy_with_logits(made(4, dtype=HALF), made(4, dtype=HALF)),
    "cosine_similarity": lambda: F.cosine_similarity(made(2, 4, dtype=HALF), made(2, 4, dtype=HALF)),
    "widest": lambda: torch.addcmul(made(4), made(4, dtype=HALF), made(4, dtype=HALF)),
}
AS_IT_IS: dict[str, Callable[[torch.dtype], torch.Tensor]] = {
    "add": lambda dtype: made(4, dtype=dtype) + made(4, dtype=dtype),
    "silu": lambda dtype: F.silu(made(4, dtype=dtype)),
    "gelu": lambda dtype: F.gelu(made(4, dtype=dtype)),
    "mean": lambda dtype: made(4, dtype=dtype).mean(),
    "sigmoid": lambda dtype: made(4, dtype=dtype).sigmoid(),
    "cat": lambda dtype: torch.cat([made(4, dtype=dtype), made(4, dtype=dtype)]),
    "embedding": lambda dtype: F.embedding(torch.zeros(2, dtype=torch.int64, device="sim"), made(3, 4, dtype=dtype)),
    "asked for": lambda dtype: made(4, dtype=HALF).softmax(0, dtype=dtype),
}


@pytest.mark.parametrize("name", IN_HALF)
def test_in_half(name: str) -> None:
    with torch.autocast("sim", HALF):
        found = IN_HALF[name]()
    assert found.dtype is HALF and found.device.type == "sim"


@pytest.mark.parametrize("name", IN_FLOAT)
def test_in_float(name: str) -> None:
    with torch.autocast("sim", HALF):
        assert IN_FLOAT[name]().dtype is FLOAT


@pytest.mark.parametrize("name", AS_IT_IS)
@pytest.mark.parametrize("dtype", [FLOAT, HALF])
def test_others_run_as_they_are(name: str, dtype: torch.dtype) -> None:
    with torch.autocast("sim", HALF):
        assert AS_IT_IS[name](dtype).dtype is dtype


def test_doubles_and_cpu_tensors_are_left_alone() -> None:
    with torch.autocast("sim", HALF):
        assert (made(2, 2, dtype=torch.float64) @ made(2, 2, dtype=torch.float64)).dtype is torch.float64
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is FLOAT
        assert made(2, dtype=torch.float64).softmax(0).dtype is torch.float64


def test_values_and_gradients_are_those_of_casts() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(3, 4), torch.randn(5, 4)
    a, b = (t.clone().to("sim").requires_grad_() for t in (x, weight))
    with torch.autocast("sim", HALF):
        loss = F.rms_norm(F.linear(a, b), (5,)).square().sum()
    loss.backward()
    c, d = x.clone().requires_grad_(), weight.clone().requires_grad_()
    F.rms_norm(F.linear(c.to(HALF), d.to(HALF)).float(), (5,)).square().sum().backward()
    assert a.grad.dtype is b.grad.dtype is FLOAT
    torch.testing.assert_close(a.grad.cpu(), c.grad)
    torch.testing.assert_close(b.grad.cpu(), d.grad)


def test_what_cuda_refuses() -> None:
    with torch.autocast("sim", HALF), pytest.raises(RuntimeError, match="unsafe to autocast"):
        F.binary_cross_entropy(made(4), made(4))
    with torch.autocast("sim", torch.float16):
        assert (made(2, 2) @ made(2, 2)).dtype is torch.float16
