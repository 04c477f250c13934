"""Autocast on the simulated device, by the lists of CUDA's (``ATen/autocast_mode.h``).

Private names of torch: the dispatch key AutocastPrivateUse1 and the guard that excludes it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from weft.world.simulated.memory import DEVICE_TYPE, aten
from weft.world.simulated.operators import overload

_C: Any = torch._C
_KEY = "AutocastPrivateUse1"
_EXCLUDED = _C.DispatchKeySet(_C.DispatchKey.AutocastPrivateUse1)

HALF = [
    "_convolution.deprecated", "_convolution", "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d",
    "conv_transpose2d.input", "conv_transpose3d.input", "convolution", "prelu", "addmm", "addmv", "addr", "matmul",
    "einsum", "mm", "mv", "linalg_vecdot", "linear", "addbmm", "baddbmm", "bmm", "chain_matmul", "linalg_multi_dot",
    "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell",
    "_scaled_dot_product_flash_attention", "scaled_dot_product_attention",
]  # fmt: skip
FLOAT = [
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt",
    "sinh", "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm",
    "native_layer_norm", "rms_norm", "group_norm", "frobenius_norm.dim", "nuclear_norm", "nuclear_norm.dim",
    "cosine_similarity", "poisson_nll_loss", "cosine_embedding_loss", "nll_loss", "nll_loss2d",
    "hinge_embedding_loss", "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss", "margin_ranking_loss",
    "multilabel_margin_loss", "soft_margin_loss", "triplet_margin_loss", "multi_margin_loss",
    "binary_cross_entropy_with_logits", "dist", "pdist", "cdist", "renorm", "logsumexp", "upsample_nearest1d",
    "_upsample_nearest_exact1d", "upsample_nearest2d", "_upsample_nearest_exact2d", "upsample_nearest3d",
    "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d", "_upsample_bilinear2d_aa",
    "upsample_trilinear3d", "upsample_bicubic2d", "_upsample_bicubic2d_aa",
]  # fmt: skip
FLOAT_RESULT = [
    "prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum", "linalg_vector_norm",
    "linalg_matrix_norm", "linalg_matrix_norm.str_ord", "sum", "sum.dim_IntList",
]  # fmt: skip
WIDEST = [
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put", "tensordot",
    "scatter_add",
]  # fmt: skip
WITH_DTYPE = {"norm.Scalar": "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype"}


def _eligible(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.device.type == DEVICE_TYPE
        and value.is_floating_point()
        and value.dtype is not torch.float64
    )


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, list | tuple):
        return [_cast(one, dtype) for one in value]
    return value.to(dtype) if _eligible(value) else value


def _cast_all(op: Any, dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with _C._ExcludeDispatchKeyGuard(_EXCLUDED):
        return op(*(_cast(a, dtype) for a in args), **{name: _cast(a, dtype) for name, a in kwargs.items()})


def _in_half(op: Any, *args: Any, **kwargs: Any) -> Any:
    return _cast_all(op, torch.get_autocast_dtype(DEVICE_TYPE), args, kwargs)


def _in_float(op: Any, *args: Any, **kwargs: Any) -> Any:
    return _cast_all(op, torch.float32, args, kwargs)


def _in_widest(op: Any, *args: Any, **kwargs: Any) -> Any:
    wide = any(_eligible(a) and a.dtype is torch.float32 for a in args)
    return _cast_all(op, torch.float32 if wide else torch.get_autocast_dtype(DEVICE_TYPE), args, kwargs)


def _with_float_result(op: Any, *args: Any, **kwargs: Any) -> Any:
    names = [a.name for a in op._schema.arguments]
    given = kwargs.get("dtype", args[at] if (at := names.index("dtype")) < len(args) else None)
    with _C._ExcludeDispatchKeyGuard(_EXCLUDED):
        if given is not None or not _eligible(args[0]):
            return op(*args, **kwargs)
        return op(*args[:at], **{**kwargs, "dtype": torch.float32})


def _appending_dtype(op: Any, with_dtype: Any, *args: Any) -> Any:
    with _C._ExcludeDispatchKeyGuard(_EXCLUDED):
        if not _eligible(args[0]):
            return op(*args)
        defaults = [a.default_value for a in op._schema.arguments]
        return with_dtype(*args, *defaults[len(args) :], dtype=torch.float32)


def _refuse_binary_cross_entropy(*_: Any, **__: Any) -> Any:
    raise RuntimeError(
        "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast. Many models use a "
        "sigmoid layer right before it: use binary_cross_entropy_with_logits there."
    )


def install_autocast(library: Any, everything: Any) -> None:
    """``library`` is for ATen, ``everything`` for all operators: those on no list run as they are."""
    everything.fallback(torch.library.fallthrough_kernel, _KEY)
    rules = ((HALF, _in_half), (FLOAT, _in_float), (WIDEST, _in_widest), (FLOAT_RESULT, _with_float_result))
    for names, rule in rules:
        for op in map(overload, names):
            library.impl(op, functools.partial(rule, op), _KEY)
    for name, with_dtype in WITH_DTYPE.items():
        op = overload(name)
        library.impl(op, functools.partial(_appending_dtype, op, overload(with_dtype)), _KEY)
    library.impl(aten.binary_cross_entropy.default, _refuse_binary_cross_entropy, _KEY)
