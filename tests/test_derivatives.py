"""Derivatives of gradients: right, or the same words on every rank. Never numbers with a part missing."""

from __future__ import annotations

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from every_operation import ANY_ORDER, OPERATIONS, REFUSED, tokens, weights_like
from serial import KINDS, as_arguments, random_maps, relative_error, serial_scan
from torch import Tensor
from worlds import place, virtual_world

import weft
from weft.ops.scan import METHODS

pytestmark = pytest.mark.usefixtures("every_network")


def words_of(run) -> str:
    """What was raised, as its class and its text."""
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("size", [1, 2])
def test_a_gradient_penalty_is_refused_in_the_same_words_everywhere(name: str, size: int) -> None:
    def program(axis: weft.Axis) -> tuple[str, Tensor, Tensor]:
        x = tokens(axis.rank)
        wanted = torch.autograd.grad(REFUSED[name](axis, x).square().sum(), x)[0]
        # The gradients themselves are there; also beside a path that can be differentiated twice.
        (first,) = torch.autograd.grad(REFUSED[name](axis, x).square().sum(), x, create_graph=True)
        words = words_of(lambda: torch.autograd.grad((first * x).sum(), x))
        REFUSED[name](axis, x).square().sum().backward()  # and the group is good
        assert torch.equal(x.grad, wanted)
        return words, first.detach(), wanted

    for words, first, wanted in virtual_world(size).run(program).results:
        given = name.split()[0]
        operation = (
            given
            if given in ("linear_attention", "delta_rule", "mamba2", "selective_scan", "short_conv")
            else "attention"
        )
        assert words == (
            f"NotImplementedError: {operation}: second derivatives are not supported; detach its gradients, or leave "
            f"out create_graph=True"
        )
        assert torch.equal(first, wanted)


def arguments_of(operation: str) -> dict[str, Tensor]:
    x = tokens(0).detach()
    if operation == "short_conv":
        return {"x": x[0], "weight": torch.ones(8, 3), "bias": torch.ones(8), "initial_state": torch.ones(6, 8, 2)}
    given = {"q": x, "k": x, "v": x, "g": -x.abs(), "initial_state": torch.ones(1, 4, 8, 8)}
    return given if operation == "linear_attention" else {**given, "beta": x[..., 0].sigmoid()}


@pytest.mark.parametrize(
    ("operation", "argument"),
    [(name, argument) for name in ("linear_attention", "delta_rule", "short_conv") for argument in arguments_of(name)],
)
def test_no_argument_is_forgotten(operation: str, argument: str) -> None:
    """A single one that wants a gradient is enough, whatever the loss is; it alone gets one, and the right one.

    One that was changed before the backward is noticed.
    """
    run = getattr(weft, operation)
    given = arguments_of(operation)
    every = {name: value.clone().requires_grad_() for name, value in given.items()}
    run(**every)[0].sum().backward()
    given[argument] = given[argument].clone().requires_grad_()
    o, _ = run(**given)
    (first,) = torch.autograd.grad(o.sum(), given[argument], create_graph=True)
    assert torch.equal(first, every[argument].grad)
    assert "second derivatives are not supported" in words_of((first + given[argument]).square().sum().backward)
    buffer = given[argument] * 1
    o, _ = run(**{**given, argument: buffer})
    with torch.no_grad():
        buffer.mul_(2)  # gradients would be those of other numbers
    assert "modified by an inplace operation" in words_of(o.sum().backward)


@pytest.mark.parametrize("argument", [0, 1, 2])
@pytest.mark.parametrize("method", ["gather", "ulysses"])
def test_no_argument_of_attention_is_forgotten(argument: int, method: str) -> None:
    def program(axis: weft.Axis) -> str:
        given = [tokens(axis.rank).detach() for _ in range(3)]
        given[argument].requires_grad_()
        out = weft.attention(*given, causal=True, method=method)
        (first,) = torch.autograd.grad(out.sum(), given[argument], create_graph=True)
        return words_of((first + given[argument]).square().sum().backward)

    for words in virtual_world(2).run(program).results:
        assert "attention: second derivatives are not supported" in words


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reverse", [False, True])
def test_a_gradient_penalty_through_a_scan_is_that_of_the_serial_one(kind: str, reverse: bool) -> None:
    size, shape = 3, (2, 3, 4)
    states, decays = random_maps(kind, size, shape, "slow", seed=5)
    leaves = states + [decay for decay in decays if decay is not None]

    def loss_of(outs: list[Tensor]) -> Tensor:
        return sum((weights_like(out) * out.square()).sum() for out in outs)

    def both(loss: Tensor, mine: list[Tensor]) -> list[Tensor]:
        found: list[Tensor] = []
        for _ in range(3):  # the last rank's map is used by nobody
            grads = torch.autograd.grad(loss, mine, create_graph=True, materialize_grads=True)
            found += [grad.detach() for grad in grads]
            loss = sum((grad.square() * leaf).sum() for grad, leaf in zip(grads, mine, strict=True))
        return found

    wanted = both(loss_of(serial_scan(kind, states, decays, reverse)), leaves)
    for method in METHODS if kind == "dense" else ["doubling"]:

        def program(axis: weft.Axis, method: str = method) -> list[Tensor]:
            state = states[axis.rank].detach().requires_grad_()
            decay = decays[axis.rank]
            decay = None if decay is None else decay.detach().requires_grad_()
            given = as_arguments(kind, decay)
            out = weft.exclusive_scan(state, **given, group=axis, reverse=reverse, method=method)
            return both(loss_of([out]), [state] if decay is None else [state, decay])

        for rank, got in enumerate(virtual_world(size).run(program).results):
            for number, one in enumerate(got):
                order, leaf = divmod(number, len(got) // 3)
                assert relative_error(one, wanted[order * len(leaves) + leaf * size + rank]) <= 1e-12


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("size", [1, 3])
def test_derivatives_of_shard_and_unshard_are_right_to_the_third_order(layout: str, size: int) -> None:
    """Each rank's loss is another function of the whole; the truth is their sum on one device."""
    whole = torch.randn(7, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    weights = [torch.randn(7, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(r)) for r in range(size)]

    def orders(x: Tensor, loss: Tensor, orders: int = 3) -> list[Tensor]:
        found = []
        for _ in range(orders):
            (grad,) = torch.autograd.grad(loss, x, create_graph=True)
            found.append(grad.detach())
            loss = (grad * grad * x).sum()
        return found

    leaf = whole.clone().requires_grad_()
    wanted = orders(leaf, sum((w * leaf**3).sum() for w in weights))

    def program(axis: weft.Axis) -> list[tuple[Tensor, Tensor]]:
        mine = weft.shard(whole, 0, layout=layout).requires_grad_()
        got = orders(mine, (weights[axis.rank] * weft.unshard(mine, 0, layout=layout) ** 3).sum())
        return [(one, weft.shard(true, 0, layout=layout)) for one, true in zip(got, wanted, strict=True)]

    for pairs in virtual_world(size).run(program).results:
        for got, true in pairs:
            assert relative_error(got, true) <= 1e-13


@pytest.mark.parametrize("name", ANY_ORDER)
def test_gradgradcheck_where_it_can_be_asked(name: str) -> None:
    axis = weft.Axis.of(None)
    assert torch.autograd.gradgradcheck(lambda x: ANY_ORDER[name](axis, x), [tokens(0, torch.float64)])


def first_words(name: str) -> str:
    named = {
        "linear": "linear_attention",
        "delta_": "delta_rule",
        "mamba2": "mamba2",
        "select": "selective_scan",
        "short_": "short_conv",
        "exclus": "exclusive_scan",
        "unshar": "unshard",
    }
    return f"NotImplementedError: {named.get(name[:6], 'attention')}: "


@pytest.mark.parametrize("name", OPERATIONS)
def test_forward_mode_is_refused_in_words(name: str) -> None:
    x = tokens(0).detach()
    with forward_ad.dual_level():  # of a process: virtual ranks would share it
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        words = words_of(lambda: OPERATIONS[name](weft.Axis.of(None), dual))
    assert words == first_words(name) + "forward-mode derivatives are not supported; use the backward"


@pytest.mark.parametrize("name", OPERATIONS)
def test_torch_func_and_hessians_are_refused_in_words(name: str, every_network: str) -> None:
    def program(axis: weft.Axis) -> list[str]:
        x, run = tokens(axis.rank).detach(), OPERATIONS[name]
        words = []
        # By NCCL's rules the watch on the host's reads cannot look into torch.func's tensors.
        if every_network == "ideal":
            words.append(words_of(lambda: torch.func.grad(lambda x: run(axis, x).sum())(x)))
        if name in REFUSED:
            hessian = torch.autograd.functional.hessian
            words.append(words_of(lambda: hessian(lambda x: run(axis, x).square().sum(), x)))
        return words

    heard = virtual_world(2).run(program).results
    assert heard[0] == heard[1]
    wanted = ["torch.func (grad, vjp, jvp, vmap, ...) is not supported"] if every_network == "ideal" else []
    wanted += ["second derivatives are not supported"] if name in REFUSED else []
    for words, begin in zip(heard[0], wanted, strict=True):
        assert words.startswith(first_words(name) + begin)


def test_vmap_is_refused_in_words() -> None:
    x = torch.randn(3, 1, 4, 2, 8)
    for operation in (
        lambda x: weft.attention(x, x, x, causal=True),
        lambda x: weft.linear_attention(x, x, x)[0],
        lambda x: weft.delta_rule(x, x, x, x[..., 0])[0],
        lambda x: weft.short_conv(x[0], torch.ones(8, 2))[0],
    ):
        assert words_of(lambda op=operation: torch.func.vmap(op)(x)).startswith("NotImplementedError: ")


def test_a_table_gives_no_gradient_with_a_graph() -> None:
    def program(axis: weft.Axis) -> tuple[list[str], Tensor, Tensor]:
        table = place(weft.ShardedEmbedding(6, 2))
        ids = place(torch.tensor([axis.rank, 4]))
        head = place(torch.ones(2)).requires_grad_()
        words = [
            words_of(lambda: (table(ids) @ head).square().sum().backward(create_graph=True)),
            words_of(lambda: (table.full_weight() @ head).square().sum().backward(create_graph=True)),
        ]
        table.zero_grad()
        # A penalty on the gradients of other tensors is right: its own backward goes to the table's rows.
        rows = table(ids)
        (first,) = torch.autograd.grad((rows @ head).square().sum(), head, create_graph=True)
        first.sum().backward()
        leaf = rows.detach().requires_grad_()
        (true,) = torch.autograd.grad((leaf @ head).square().sum(), head, create_graph=True)
        (wanted,) = torch.autograd.grad(true.sum(), leaf)
        return words, table.weight.grad.to_dense().sum(0) * axis.size, wanted.sum(0)

    for size in (1, 2):
        results = virtual_world(size).run(program).results
        for (gathered, whole), _, _ in results:
            assert gathered.startswith("NotImplementedError: embedding: second derivatives of a table's gradient")
            assert whole.startswith("NotImplementedError: embedding.gather: second derivatives of a table's gradient")
        assert relative_error(sum(got for _, got, _ in results), sum(true for _, _, true in results)) <= 1e-5
