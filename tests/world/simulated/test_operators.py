"""Operators on the simulated device agree with the CPU's: values, gradients, strides and what shares memory."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

pytestmark = pytest.mark.usefixtures("sim")


def agree(program: Callable[..., object], *shapes: tuple[int, ...]) -> None:
    """The same results, with the same strides, from the same inputs on both devices."""
    torch.manual_seed(0)
    inputs = [torch.randn(shape) for shape in shapes]
    wanted = program(*(one.clone() for one in inputs))
    found = program(*(one.to("sim") for one in inputs))
    several = isinstance(wanted, list | tuple)
    for one, other in zip(found if several else [found], wanted if several else [wanted], strict=True):
        assert one.device == torch.device("sim", 0) and one.stride() == other.stride()
        torch.testing.assert_close(one.cpu(), other)


def test_factories() -> None:
    for make in (torch.empty, torch.zeros, torch.ones, torch.randn, torch.rand):
        assert make(2, 3, device="sim").device == torch.device("sim", 0)
    assert torch.randperm(5, device="sim").device.type == torch.randint(0, 4, (3,), device="sim").device.type == "sim"
    agree(lambda x: [torch.arange(5, device=x.device), torch.full((2,), 3.0, device=x.device)], ())
    agree(lambda x: [torch.linspace(0, 1, 5, device=x.device), torch.eye(3, device=x.device)], ())
    agree(lambda x: [torch.tensor([1, 2], device=x.device), torch.as_tensor([1.0], device=x.device)], ())
    agree(lambda x: [x.new_full((2,), 4.0), x.new_tensor([1.0]), torch.zeros_like(x.t())], (3, 4))
    agree(lambda x: [torch.tril_indices(3, 3, device=x.device), torch.empty_strided((2, 3), (1, 2)).to(x) * 0], ())
    with torch.device("sim"):
        assert torch.zeros(3).device.type == nn.Linear(3, 4).weight.device.type == "sim"


def test_views_and_writing_in_place() -> None:
    def write(x: torch.Tensor) -> torch.Tensor:
        x[:, 1:].copy_(torch.ones_like(x[:, 1:]))
        x.narrow(0, 0, 1).mul_(3)
        x.transpose(0, 1)[0].add_(5)
        x.view(-1)[2] = 7
        x.unflatten(1, (2, 2))[:, 0].zero_()
        x.diagonal().fill_(9)
        x[x > 8] = 1
        x[0, 1] += 2
        return x

    agree(write, (4, 4))
    agree(lambda x: x.view(torch.int32).view(torch.float32), (4,))
    agree(lambda x: [x.expand(3, 4), x.expand(3, 4).contiguous(), x.unfold(0, 2, 1), x.unfold(0, 2, 1).sum(1)], (4,))
    agree(lambda x: [x.t().reshape(-1), x.t(), x.t_(), x.squeeze().unsqueeze_(0)], (3, 4))
    agree(lambda x: [*x.split(2), *x.chunk(2), *x.unbind(), *torch.tensor_split(x, 3), *x.movedim(0, 1)], (5, 2))


def test_views_share_memory_and_versions() -> None:
    x = torch.zeros(4, device="sim")
    view = x.view(2, 2)
    view.add_(1)
    assert x.tolist() == [1.0] * 4 and view._base is x and x._version == view._version == 1
    assert x.data_ptr() == view.data_ptr() and x[1:].data_ptr() == x.data_ptr() + 4
    assert x[1:].untyped_storage() is x.untyped_storage() and x.untyped_storage().nbytes() == 16
    assert x.to("sim") is x and x.contiguous() is x and x.clone().data_ptr() != x.data_ptr()


def test_results_that_are_given() -> None:
    def write(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        out, small, wide = torch.empty_like(a), a.new_empty(0), a.new_empty(2, 3, 3)
        torch.add(a, b, out=out)
        torch.mul(out, 2, out=out[:, :])
        torch.add(a, b, out=small)
        torch.bmm(a.expand(2, 3, 3), b.expand(2, 3, 3), out=wide)
        torch.baddbmm(wide, wide, wide, beta=0, alpha=0.1, out=wide)
        joined, sums, where = a.new_empty(6, 3), a.new_empty(3), torch.empty(0, dtype=torch.int64, device=a.device)
        torch.cat([a, b], out=joined)
        torch.sum(a, 0, out=sums)
        torch.argmax(a, 1, out=where)
        return [out, small, wide, joined, sums, where]

    agree(write, (3, 3), (3, 3))


def test_dtypes_and_devices() -> None:
    x = torch.randn(3, 4)
    y = x.to("sim")
    agree(lambda x: [x.double(), x.half(), x.to(torch.bfloat16), x.long(), x.type(torch.float64)], (3, 4))
    assert y.cpu().is_cpu and not y.is_cpu and not y.is_cuda and y.is_sim and x.sim().is_sim
    torch.testing.assert_close(y.to("cpu", torch.float64), x.double())
    torch.testing.assert_close(x.to("sim", torch.float64).cpu(), x.double())
    torch.testing.assert_close(torch.empty(3, 4).copy_(y), x)
    torch.testing.assert_close(torch.empty(4, 3).t().copy_(y), x)
    torch.testing.assert_close(torch.zeros(2, 4, device="sim").copy_(x[0]).cpu(), x[:1].expand(2, 4))


def test_indexing() -> None:
    def read(x: torch.Tensor) -> list[torch.Tensor]:
        i, mask = torch.tensor([2, 0], device=x.device), x > 0
        some = [x[i], x[mask], x[:, i], x[i, i], x[None, ..., 1], x.index_select(0, i), x.take(i), x.gather(0, i[None])]
        return [
            *some,
            torch.where(mask, x, -x),
            x.masked_fill(mask, 0.0),
            mask.nonzero(),
            *torch.nonzero(mask, as_tuple=True),
        ]

    def write(x: torch.Tensor) -> torch.Tensor:
        i, mask, rows = torch.tensor([2, 0], device=x.device), x > 0, x[:2].clone()
        x[i] = 5.0
        x.index_add_(0, i, rows)
        x.scatter_(0, i[None], 1.0)
        x.index_copy_(0, i, rows)
        x.index_put_((i,), rows, accumulate=True)
        return x.masked_scatter_(mask, x.clone())

    def order(x: torch.Tensor) -> list[torch.Tensor]:
        ids = torch.tensor([3, 1, 3], device=x.device)
        values, inverse, counts = torch.unique(ids, return_inverse=True, return_counts=True)
        made = [values, inverse, counts, torch.bincount(inverse, minlength=3), torch.repeat_interleave(counts)]
        made += [*x.sort(0), *x.topk(2, 0), torch.argsort(x, stable=True), x.cumsum(0), x.flip(0), torch.roll(x, 1)]
        edges = x[0].sort()[0]
        return [
            *made,
            torch.searchsorted(edges, x),
            torch.bucketize(x, edges),
            x.logsumexp(0),
            x.repeat_interleave(2, 0),
        ]

    for program in (read, write, order):
        agree(program, (4, 4))
    x = torch.randn(4, 4, device="sim")
    assert torch.equal(x[torch.tensor([0, 1])], x[:2])  # indices on the CPU, as on CUDA
    assert torch.equal(x[:, torch.tensor([True, False, True, False])], x[:, ::2])


MIXED: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "add": lambda x, c: x + c,
    "add to": lambda x, c: c + x,
    "add_": lambda x, c: x.add_(c),
    "add_ to": lambda x, c: c.add_(x),
    "cat": lambda x, c: torch.cat([x, c]),
    "stack": lambda x, c: torch.stack([c, x]),
    "matmul": lambda x, c: x @ c,
    "out": lambda x, c: torch.add(x, x, out=c),
    "index of the CPU": lambda x, c: c[x.long()],
    "index_add_": lambda x, c: x.index_add_(0, torch.tensor([0]), x[:1]),
    "gather": lambda x, c: x.gather(0, torch.tensor([0])),
    "index_select": lambda x, c: x.index_select(0, torch.tensor([0])),
    "linear": lambda x, c: F.linear(x[None], torch.ones(2, 3)),
    "bmm": lambda x, c: torch.bmm(x.expand(1, 1, 3), c.view(1, 3, 1)),
    "embedding": lambda x, c: F.embedding(torch.tensor([0]), torch.ones(2, 3, device="sim")),
    "foreach": lambda x, c: torch._foreach_add_([x], [c]),
    "searchsorted": lambda x, c: torch.searchsorted(x, c),
    "einsum": lambda x, c: torch.einsum("i,i->", x, c),
    "attention": lambda x, c: F.scaled_dot_product_attention(*(t.expand(1, 1, 2, 3) for t in (x, c, c))),
    "cross_entropy": lambda x, c: F.cross_entropy(x[None], torch.tensor([0])),
    "lerp": lambda x, c: torch.lerp(x, c, 0.5),
    "layer_norm": lambda x, c: F.layer_norm(x, (3,), c),
    "addmm": lambda x, c: torch.addmm(x.expand(3, 3), x.expand(3, 3), c.expand(3, 3)),
    "where": lambda x, c: torch.where(x > 0, x, c),
    "empty": lambda x, c: torch.cat([x, c[:0]]),
}


@pytest.mark.parametrize("name", MIXED)
def test_mixed_devices_are_refused(name: str) -> None:
    with pytest.raises(RuntimeError, match="device"):
        MIXED[name](torch.ones(3, device="sim"), torch.ones(3))


def test_numbers_of_the_cpu_are_taken_and_numpy_is_refused() -> None:
    x = torch.ones(3, device="sim")
    assert (x + torch.tensor(2.0)).tolist() == [3.0] * 3 and (x * 2 - 1).tolist() == [1.0] * 3
    assert torch.where(x > 1, x, torch.tensor(0.0)).tolist() == [0.0] * 3
    with pytest.raises(TypeError, match="device"):
        x.numpy()
    with pytest.raises(RuntimeError, match="generator"):
        torch.randn(3, device="sim", generator=torch.Generator())


def test_linear_algebra() -> None:
    def products(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        made = [
            a @ b,
            torch.einsum("ij,jk->ki", a, b),
            torch.addmm(a, a, b),
            torch.kron(a, b),
            torch.linalg.solve(a, b),
        ]
        return [*made, torch.linalg.inv(a), torch.linalg.norm(a), torch.linalg.matrix_norm(a), torch.linalg.det(a)]

    def decompositions(a: torch.Tensor) -> list[torch.Tensor]:
        square = a @ a.T + torch.eye(4, device=a.device)
        made = [torch.linalg.eigvalsh(square), torch.linalg.cholesky(square), *torch.linalg.qr(a), *torch.linalg.svd(a)]
        return [*made, *torch.linalg.eigh(square), torch.linalg.solve_triangular(square, a, upper=False)]

    agree(products, (4, 4), (4, 4))
    agree(decompositions, (4, 4))
    agree(
        lambda x: [torch.view_as_real(torch.complex(x, x).conj() * 2), torch.fft.rfft(x).real, torch._neg_view(x) + 1],
        (4,),
    )


def test_gradients() -> None:
    def first(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        a.requires_grad_(), b.requires_grad_()
        y = (F.softmax(a @ b, -1).log() * a.sin()).sum() + F.layer_norm(a, (4,)).pow(2).sum() + F.gelu(a).mean()
        y = y + a.view(-1)[2:5].exp().sum() + F.silu(b[:, :2]).sum() + torch.cat([a, b]).std() + a.max(0)[0].sum()
        y.backward()
        return [a.grad, b.grad, y.detach(), *torch.autograd.grad((a * a).sum(), a)]

    def through_writes(a: torch.Tensor) -> torch.Tensor:
        a.requires_grad_()
        c = a.clone()
        c[:, 1:].mul_(2)
        c.view(-1)[0] = 0
        c[1] += a[0]
        c.sum().backward()
        (a * 2).sum().backward()
        return a.grad

    def second(a: torch.Tensor) -> torch.Tensor:
        (grad,) = torch.autograd.grad((a.requires_grad_() ** 3).sum(), a, create_graph=True)
        grad.sum().backward()
        return a.grad

    agree(first, (4, 4), (4, 4))
    agree(through_writes, (4, 4))
    agree(second, (4,))
    x = torch.randn(3, dtype=torch.float64, device="sim", requires_grad=True)
    assert torch.autograd.gradcheck(lambda y: (y.exp() * y).sum(), x)
    with torch.inference_mode():
        assert torch.ones(2, device="sim").add_(1).view(1, 2).sum().item() == 4


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        ctx.set_materialize_grads(False)
        total = x.sum()
        ctx.mark_non_differentiable(total)
        return x * w, total, x + w

    @staticmethod
    def backward(ctx, grad, _, unused):
        assert unused is None
        x, w = ctx.saved_tensors
        return grad * w, grad * x


def test_autograd_functions_hooks_and_checkpoints() -> None:
    def apply(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        Scaled.apply(x.requires_grad_(), w.requires_grad_())[0].sum().backward()
        return [x.grad, w.grad]

    def hooked(x: torch.Tensor) -> list[torch.Tensor]:
        seen: list[torch.Tensor] = []
        x.requires_grad_().register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        y = x * 2
        y.register_hook(lambda grad: grad * 3)
        y.sum().backward()
        return [*seen, x.grad]

    def offloaded(x: torch.Tensor) -> torch.Tensor:
        device = x.device
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.cpu(), lambda t: t.to(device)):
            y = x.requires_grad_().exp()
        y.sum().backward()
        return x.grad

    agree(apply, (3, 4), (3, 4))
    agree(hooked, (3,))
    agree(offloaded, (3,))
    for reentrant in (False, True):

        def again(x: torch.Tensor, reentrant: bool = reentrant) -> torch.Tensor:
            torch.manual_seed(1)
            checkpoint(lambda y: F.dropout(y, 0.5).exp(), x.requires_grad_(), use_reentrant=reentrant).sum().backward()
            return x.grad

        agree(again, (2, 4))


def test_modules() -> None:
    torch.manual_seed(0)
    layers = [nn.Embedding(10, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU(), nn.RMSNorm(8), nn.Linear(8, 10)]
    there = nn.Sequential(*layers)
    here, ids = copy.deepcopy(there), torch.randint(0, 10, (2, 5))
    parameters = list(there.parameters())
    there.to("sim")
    assert all(a is b for a, b in zip(parameters, there.parameters(), strict=True))  # as between CPU and CUDA
    for model, batch in ((there, ids.to("sim")), (here, ids)):
        F.cross_entropy(model(batch).flatten(0, 1), batch.flatten()).backward()
    for a, b in zip(there.parameters(), here.parameters(), strict=True):
        torch.testing.assert_close(a.grad.cpu(), b.grad)
    there.half().float().cpu()
    assert all(p.is_cpu and p.grad.is_cpu for p in there.parameters())
    there.to("sim").load_state_dict(here.state_dict())
    torch.testing.assert_close(there(ids.to("sim")).cpu(), here(ids))
    with torch.device("meta"):
        empty = nn.Linear(3, 3)
    assert empty.to_empty(device="sim").weight.device.type == "sim"


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.Conv2d(3, 4, 3), (1, 3, 8, 8)),
        (lambda: nn.Conv1d(4, 4, 3, groups=4), (1, 4, 8)),
        (lambda: nn.BatchNorm1d(4), (3, 4)),
        (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0), (3, 2, 8)),
    ],
)
def test_layers(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    layer = make()

    def gradients(x: torch.Tensor) -> list[torch.Tensor]:
        mine = copy.deepcopy(layer).to(x.device)
        y = mine(x.requires_grad_())
        y.square().sum().backward()
        return [y.detach(), x.grad, *(p.grad for p in mine.parameters())]

    agree(gradients, shape)


@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}, {"fused": True}])
def test_optimizers(options: dict[str, bool]) -> None:
    def train(x: torch.Tensor) -> list[torch.Tensor]:
        torch.manual_seed(1)
        layer = nn.Linear(4, 4).to(x.device)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, **options)
        for _ in range(2):
            optimizer.zero_grad()
            layer(x).pow(2).sum().backward()
            norm = nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
            optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        return [layer.weight.detach(), layer.bias.detach(), norm]

    agree(train, (2, 4))


def test_lists_of_tensors() -> None:
    def program(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        many = [a.clone(), b.clone()]
        torch._foreach_add_(many, [b, a], alpha=2)
        torch._foreach_mul_(many, 2.0)
        norms, roots = torch._foreach_norm(many), torch._foreach_sqrt(torch._foreach_abs(many))
        torch._foreach_lerp_(many, [a, b], 0.5)
        torch._foreach_addcdiv_(many, [a, b], roots, -1.0)
        copies = [torch.empty_like(a), torch.empty_like(b)]
        torch._foreach_copy_(copies, many)
        return [*many, *norms, *roots, *copies]

    agree(program, (3,), (3,))


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_sparse_tensors() -> None:
    def dense(x: torch.Tensor) -> list[torch.Tensor]:
        rows = torch.tensor([[2, 0, 2]], device=x.device)
        sparse = torch.sparse_coo_tensor(rows, x, (4, 3))
        joined = sparse.coalesce()
        assert sparse.is_sparse and sparse.device == x.device and joined.is_coalesced()
        emptied = sparse.clone().zero_()
        assert emptied._nnz() == 0 and emptied.is_coalesced()
        return [sparse.to_dense(), joined.indices(), joined.values(), sparse._values(), (joined * 2).to_dense()]

    def embedded(weight: torch.Tensor) -> list[torch.Tensor]:
        table = nn.Embedding(5, 3, sparse=True, _weight=weight)
        table(torch.tensor([1, 1, 4], device=weight.device)).square().sum().backward()
        gradient = table.weight.grad.to_dense()
        torch.optim.SparseAdam(list(table.parameters()), lr=0.1).step()
        return [gradient, table.weight.detach()]

    agree(dense, (3, 3))
    agree(embedded, (5, 3))


def test_saving_and_copying() -> None:
    x = torch.randn(3, 4, device="sim")
    loaded = pickle.loads(pickle.dumps(x))
    assert loaded.device.type == "sim" and torch.equal(loaded, x) and loaded.data_ptr() != x.data_ptr()
    file = io.BytesIO()
    torch.save({"x": x, "view": x[:, 1:]}, file)
    both = torch.load(io.BytesIO(file.getvalue()))
    assert both["x"].device.type == "sim" and torch.equal(both["view"], x[:, 1:])
    assert both["x"].untyped_storage().data_ptr() == both["view"].untyped_storage().data_ptr()
    assert torch.equal(torch.load(io.BytesIO(file.getvalue()), map_location="cpu")["x"], x.cpu())
    twin = copy.deepcopy(x)
    assert twin.device.type == "sim" and torch.equal(twin, x) and twin.data_ptr() != x.data_ptr()
    layer = copy.deepcopy(nn.Linear(3, 3).to("sim"))
    assert layer.weight.device.type == "sim" and x.untyped_storage().clone().nbytes() == 48


def test_storages_and_sizes() -> None:
    x, y = torch.arange(4.0, device="sim"), torch.empty(0, device="sim")
    y.set_(x.untyped_storage(), 1, (2,), (1,))
    assert y.tolist() == [1.0, 2.0] and y.set_(x).is_set_to(x)
    x.data = torch.zeros(2, device="sim")
    assert x.shape == (2,) and torch.zeros(0, 3, device="sim").sum().item() == 0
    assert torch.cat([torch.zeros(0, device="sim"), torch.ones(2, device="sim")]).tolist() == [1.0, 1.0]
    assert (torch.zeros(3, 0, device="sim") @ torch.zeros(0, 2, device="sim")).tolist() == [[0.0, 0.0]] * 3
    z = torch.arange(2.0, device="sim")
    assert z.resize_(5)[:2].tolist() == [0.0, 1.0] and z.resize_(1).tolist() == [0.0]


def test_attention_and_transforms() -> None:
    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
        for one in (q, k, v):
            one.requires_grad_()
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out.square().sum().backward()
        return [q.grad.contiguous(), k.grad.contiguous(), v.grad.contiguous()]

    agree(attention, *[(1, 2, 8, 16)] * 3)
    agree(lambda x: [torch.func.vmap(lambda y: y * 2)(x), torch.func.grad(lambda y: (y**2).sum())(x)], (3,))
    with FlopCounterMode(display=False) as counted:
        x = torch.randn(4, 4, device="sim", requires_grad=True)
        (x @ x).sum().backward()
    assert counted.get_total_flops() == 3 * 128


def test_random_numbers_and_printing() -> None:
    torch.manual_seed(0)
    there = torch.randn(3, device="sim")
    torch.manual_seed(0)
    assert torch.equal(there.cpu(), torch.randn(3))
    with torch.random.fork_rng(devices=[0], device_type="sim"):
        torch.randn(3, device="sim")
    x = torch.ones(2, device="sim")
    assert repr(x) == "tensor([1., 1.], device='sim:0')" and f"{x.sum():.2f}" == "2.00" and int(x[0]) == 1


class Marked(nn.Parameter):
    pass


def test_subclasses_of_parameters() -> None:
    marked = Marked(torch.zeros(3, device="sim"))
    (marked * 2).sum().backward()
    assert isinstance(marked, Marked) and marked.grad.tolist() == [2.0] * 3


def test_the_root_of_a_number_is_rounded_as_on_cuda() -> None:
    numbers = torch.rand(400, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).tolist()
    roots = [torch.full((), x, dtype=torch.float64, device="sim").sqrt() for x in [*numbers, math.inf, 0.0]]
    assert torch.stack(roots).cpu().tolist() == [math.sqrt(x) for x in [*numbers, math.inf, 0.0]]
    assert torch.full((1, 1), -1.0, dtype=torch.float64, device="sim").sqrt().isnan().item()
