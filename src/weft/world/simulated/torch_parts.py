"""Parts of torch that need more than the fallback: sparse tensors, convolutions, storages, Module.to.

Private names of torch: ``_has_compatible_shallow_copy_type``, ``_swap_tensor_impl``;
replaced are the constructor of `torch.UntypedStorage` and ``Parameter.data``.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from weft.world.simulated.memory import DEVICE_TYPE, allocate, aten
from weft.world.simulated.operators import ON_SPARSE_CPU, cpu_operators, emulated, run_operator
from weft.world.simulated.places import place
from weft.world.simulated.streams import current_stream

_C: Any = torch._C
_torch: Any = torch
# Of a sparse tensor these look only at its parts, which are tensors of the device already.
_SPARSE_PARTS = {
    "_indices", "_values", "is_coalesced", "_coalesced_", "sparse_dim", "dense_dim", "_nnz", "_dimI", "_dimV",
    "indices", "values", "sparse_resize_", "sparse_resize_and_clear_", "_sparse_coo_tensor_with_dims_and_tensors",
    "_sparse_coo_tensor_with_dims", "zero_",
}  # fmt: skip


def _install_sparse(library: Any) -> None:
    """By name, each operator that the CPU has for sparse tensors: a composite kernel would go before a fallback."""
    for op in cpu_operators("SparseCPU"):
        parts_only = op.overloadpacket.__name__ in _SPARSE_PARTS
        kernel, first = (op.redispatch, ON_SPARSE_CPU) if parts_only else (run_operator, op)
        library.impl(op, functools.partial(kernel, first), "SparsePrivateUse1")


def _convolution_backward(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *more: Any) -> Any:
    return run_operator(aten.convolution_backward.default, grad, x, weight, [weight.shape[0]], *more)


def _square_root(x: torch.Tensor) -> torch.Tensor:
    """As CUDA rounds it, where it is one fp64 number: torch's on the CPU is off by a bit once in 80 times."""
    if x.numel() != 1 or x.dtype is not torch.float64 or not x >= 0:
        return torch.sqrt(x)
    return torch.full_like(x, math.sqrt(x))


def _install_storages() -> None:
    """torch's own constructor needs an allocator in C++ and crashes without: for deepcopy and `torch.load`."""
    make: Any = torch.UntypedStorage.__new__

    def new(cls: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        if device is None:
            return make(cls, *args, **kwargs)
        if torch.device(device).type == DEVICE_TYPE:
            return allocate(make(cls, *args), current_stream(), place())
        return make(cls, *args, device=device, **kwargs)

    _torch.UntypedStorage.__new__, _torch.UntypedStorage.__init__ = new, lambda self, *args, **kwargs: None


def _install_module_to() -> None:
    """`Module.to` keeps the Parameter between CPU and CUDA, by ``parameter.data =``, which C++ refuses here."""
    shallow, data = _torch._has_compatible_shallow_copy_type, _torch.Tensor.data

    def compatible(input: torch.Tensor, from_: torch.Tensor) -> bool:  # torch.compile compares this signature
        return shallow(input, from_) or {input.device.type, from_.device.type} == {"cpu", DEVICE_TYPE}

    def set_data(self: torch.nn.Parameter, value: torch.Tensor) -> None:
        if shallow(self, value):
            data.__set__(self, value)
            return
        value = value.detach().requires_grad_(self.requires_grad)
        value.grad = None if self.grad is None else self.grad.to(value.device)
        _C._swap_tensor_impl(self, value)

    _torch._has_compatible_shallow_copy_type = compatible
    _torch.nn.Parameter.data = property(lambda self: data.__get__(self), set_data)


def install_parts(library: Any) -> None:
    """All of them; ``library`` is for ATen."""
    _install_sparse(library)
    emulated[aten.sqrt.default] = _square_root
    library.impl("convolution_overrideable", functools.partial(run_operator, aten.convolution.default), "PrivateUse1")
    library.impl("convolution_backward_overrideable", _convolution_backward, "PrivateUse1")
    _install_storages()
    _install_module_to()
