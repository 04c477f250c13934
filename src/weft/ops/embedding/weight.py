"""`RowWeight`: the parameter of a table, up to date for whoever reads it."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

_READING = {getattr(Tensor, name).__get__ for name in ("data", "T", "mT", "H", "mH", "real", "imag")}
_LOOKING = {
    getattr(Tensor, name)
    for name in (
        "size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "element_size", "get_device",
        "is_floating_point", "is_complex", "is_contiguous", "is_inference", "__len__", "__hash__", "new_empty",
        "new_zeros", "requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "retain_grad",
    )
}  # fmt: skip
# What wraps parameters asks for their device first, and only for those of them that it will take over.
_WRAPPERS = {
    "torch.nn.parallel.distributed": "DistributedDataParallel",
    "torch.distributed.fsdp._fully_shard._fsdp_init": "fully_shard",
}


class RowWeight(nn.Parameter):
    """A parameter whose rows an optimizer may have left behind: see `weft.optim.RowAdam`.

    All that reads or writes its values (another operation, ``detach()``, ``.data``, an average of weights, a copy)
    finds every row up to date. weft's own work on it goes through `RowTable` and touches the rows it needs.
    """

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func == Tensor.device.__get__:
                _refuse_wrapper(sys._getframe(1).f_globals.get("__name__"))
            elif _touches_values(func):
                for weight in _weights_in([*args, *(kwargs or {}).values()]):
                    if (table := getattr(weight, "row_table", None)) is not None:
                        table.current()
            return func(*args, **(kwargs or {}))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return torch._utils._rebuild_parameter, (self.data, self.requires_grad, OrderedDict())


def _touches_values(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return func in _READING
    if name in ("__set__", "__delete__"):
        return func == Tensor.data.__set__  # type: ignore[attr-defined]
    return func not in _LOOKING


def _weights_in(values: Any) -> Iterator[RowWeight]:
    for value in values:
        if isinstance(value, RowWeight):
            yield value
        elif isinstance(value, list | tuple):
            yield from _weights_in(value)


def _refuse_wrapper(module: str | None) -> None:
    if module in _WRAPPERS:
        raise ValueError(
            f"ShardedEmbedding: {_WRAPPERS[module]} would take over a table, whose rows lie on different ranks and "
            f"whose gradients go to their owners; keep the table's weight off it: "
            f'DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["NAME.weight"]) before '
            f"wrapping, or fully_shard(model, ignored_params={{NAME.weight}})"
        )
