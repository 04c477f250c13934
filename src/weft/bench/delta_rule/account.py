"""Where time goes: the local kernel's by kind of operator, with the FLOPs of its products; what each rank computes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from weft.bench.report import Column
from weft.bench.timing import Case
from weft.comm import Axis

PRODUCTS, INVERSES, COPIES, ELEMENTWISE, CALLS = (
    "matrix products", "triangular inverses", "copies", "elementwise and sums", "calls and views",
)  # fmt: skip
KINDS = {
    "bmm": PRODUCTS, "baddbmm": PRODUCTS, "baddbmm_": PRODUCTS,
    "linalg_solve_triangular": INVERSES,
    "copy_": COPIES, "cat": COPIES, "index_select": COPIES,
    **dict.fromkeys(
        ("mul", "mul_", "add", "add_", "sub", "sub_", "addcmul", "addcmul_", "exp2", "exp2_", "sum", "cumsum", "flip",
         "fill_", "tril_", "triu_", "max", "clamp_"), ELEMENTWISE,
    ),
}  # fmt: skip
COLUMNS = (
    Column("case", "one process, one thread"),
    Column("kind", "operators"),
    Column("percent", "% of time", "{:.0f}"),
    Column("calls", "calls", "{}"),
    Column("gflop", "GFLOP", "{:.2f}"),
    Column("counted", "that count", "{:.2f}"),
)


def account(name: str, case: Case, counted: float) -> list[dict[str, Any]]:
    """A row for each kind of operator of one call of ``case``, of whose FLOPs ``counted`` are the algorithm's.

    Watching costs time with every call, so calls look dearer than they are. Time is elapsed time.
    """
    case()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as watched:
        case()
    found = {kind: [0.0, 0, 0.0] for kind in (PRODUCTS, INVERSES, COPIES, ELEMENTWISE, CALLS)}
    for event in watched.key_averages(group_by_input_shape=True):
        kind = KINDS.get(event.key.removeprefix("aten::"), CALLS)
        row = found[kind]
        row[0] += event.self_cpu_time_total
        row[1] += event.count
        if kind == PRODUCTS:
            left, right = [shape for shape in event.input_shapes if shape][-3 if _has_out(event) else -2 :][:2]
            row[2] += 2e-9 * math.prod(left) * right[-1] * event.count
    total = sum(time for time, *_ in found.values())
    return [
        {
            "case": name, "kind": kind, "percent": 100 * time / total, "calls": calls,
            "gflop": work or None, "counted": counted / 1e9 if kind == PRODUCTS else None,
        }
        for kind, (time, calls, work) in found.items()
    ]  # fmt: skip


def _has_out(event: Any) -> bool:
    """Whether the last shape is that of ``out``."""
    tensors = sum(bool(shape) for shape in event.input_shapes)
    return tensors > (2 if event.key == "aten::bmm" else 3)


class _Calls(TorchDispatchMode):
    """Counts operators that make or write tensors; views cost next to nothing."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def count_work(axis: Axis, make: Callable[..., Mapping[str, Case]], *args: Any) -> dict[str, tuple[float, int]]:
    """GFLOP of the products and calls of operators in each case of ``make(axis, *args)``, in this rank's own thread."""
    found = {}
    for name, case in make(axis, *args).items():
        with FlopCounterMode(display=False) as products:
            case()
        with _Calls() as calls:
            case()
        found[name] = products.get_total_flops() / 1e9, calls.count
    return found


def describe_work(ranks: Sequence[Mapping[str, tuple[float, int]]]) -> dict[str, dict[str, Any]]:
    """Of what `count_work` found, by case, that of the rank with most."""
    return {
        case: {"gflop": max(rank[case][0] for rank in ranks), "calls": max(rank[case][1] for rank in ranks)}
        for case in ranks[0]
    }
