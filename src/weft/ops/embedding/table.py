"""`RowTable`: the own rows of a table, their gradients, and who brings them up to date. `RowWeight`: its parameter."""

from __future__ import annotations

import copy
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from weft.comm import Axis, Ledger, Pending
from weft.comm.device import copy_to_device, start_copy_to_host
from weft.ops.embedding.ids import Ownership, ScratchMemory, compact, segment_sum

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


class DeferredRows(Protocol):
    """The rows of a table, to an optimizer that leaves them alone until they are needed."""

    def catch_up(self, places: Tensor | None) -> None:
        """Bring own rows (None: all) to where the last step left the table."""
        ...

    def moves_without_gradient(self, places: Tensor) -> Tensor:
        """Of own rows: whether the next step changes them even if they get no gradient."""
        ...


class RowTable:
    """What a `ShardedEmbedding` and its optimizer know about one table. Found as ``weight.row_table``.

    ``weight`` is ``[n, d]``, the own rows by place, or with ``replicate`` ``[N, d]``, all rows, of which only the own
    ones are sure to be up to date. Gradients are sparse, at least fp32, and only of own rows. Places are on the host.
    """

    def __init__(self, weight: Parameter, axis: Axis, ownership: Ownership, reduce: str, replicate: bool) -> None:
        self.weight, self.axis, self.ownership = weight, axis, ownership
        self.reduce, self.replicate = reduce, replicate
        self.scale = 1.0 / axis.size if reduce == "mean" else 1.0
        self.deferred: DeferredRows | None = None
        self.memory = ScratchMemory()  # of the last gradient
        self.lock = threading.RLock()  # a prefetch reads rows beside the main line
        self.version = 0  # rises with every step
        self._own_writes = self._stepped_by_others = 0
        self._changed: Tensor | None = None  # for each own row the version it last changed in, once somebody asks
        self.collects_late = False  # whether gradients that have arrived are summed when asked for, not in the backward
        self._arriving: list[Callable[[], None]] = []  # what will take them, in the order of backwards
        self._promise: Tensor | None = None  # ``weight.grad`` while they are under way
        self._is_blank = False  # whether that says nothing by itself
        self.pushes = Ledger()  # of those gradients
        self._reads: list[Pending[None]] = []  # of own rows, on other streams
        self._awaiting: list[Tensor] = []  # places that have been pulled and will get a gradient before the next step
        weight.row_table = self  # type: ignore[attr-defined]

    def __deepcopy__(self, memo: dict[int, Any]) -> RowTable:
        """A table of its own on the same ranks, up to date, without gradients and without an optimizer."""
        weight = copy.deepcopy(self.weight, memo)
        made = memo[id(self)] = RowTable(weight, self.axis, self.ownership, self.reduce, self.replicate)
        return made

    @property
    def values(self) -> Tensor:
        """The weight as it lies in memory, in which rows may be behind."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.weight.detach()

    @property
    def shard(self) -> Tensor:
        """The own rows ``[n, d]``: a view of `values`."""
        return self.values[self.ownership.ids(self.axis.rank)] if self.replicate else self.values

    @property
    def wide(self) -> torch.dtype:
        """Sums, gradients and optimizer states are in this dtype."""
        return torch.promote_types(self.weight.dtype, torch.float32)

    def current(self, places: Tensor | None = None) -> Tensor:
        """The shard, after ``places`` (None: all) have been brought up to date."""
        if places is None:
            self._wait_for_reads()  # who asks for all may write to them
        if self.deferred is not None:
            self.deferred.catch_up(places)
        return self.shard

    def expect_gradient(self, take: Callable[[], None]) -> None:
        """A gradient is under way that ``take`` waits for and adds.

        Until then ``weight.grad``, if there was none, is a sparse tensor with one row of zeros: whoever removes or
        empties it, as ``model.zero_grad()`` does, means what is under way.
        """
        self._drop_forgotten()
        self._arriving.append(take)
        grad = self.weight.grad
        if grad is None or (grad.is_sparse and not grad._nnz()):
            rows = min(1, self.ownership.count(self.axis.rank))
            zeros = torch.zeros(rows, self.weight.shape[1], dtype=self.wide, device=self.weight.device)
            self._set_gradient(torch.arange(rows, device="cpu"), zeros)
            self._is_blank = True
        self._promise = self.weight.grad

    def _drop_forgotten(self) -> None:
        """Wait for gradients under way and drop them, if ``weight.grad`` has been set to None or to zero since."""
        grad = self.weight.grad
        emptied = grad is not None and grad is self._promise and grad.is_sparse and not grad._nnz()
        if self._arriving and (grad is None or emptied):
            self.collect()
            self.weight.grad = grad
            self.pushes.events.clear()

    @property
    def has_gradient(self) -> bool:
        """Whether there is a gradient, or one under way."""
        self._drop_forgotten()
        return self.weight.grad is not None

    def collect(self) -> None:
        """Wait for gradients under way; they are then in ``weight.grad``."""
        arriving, self._arriving = self._arriving, []
        grad = self.weight.grad
        if self._is_blank and grad is not None and grad is self._promise and grad._nnz() <= 1:
            self.weight.grad = None
        self._promise, self._is_blank = None, False
        for take in arriving:
            take()

    def gradient(self) -> tuple[Tensor, Tensor] | None:
        """(places ``[M]``, rows ``[M, d]``) of the gradient that is here, if any. Places that others made are read."""
        self._drop_forgotten()
        self.collect()
        grad = self.weight.grad
        if grad is None:
            return None
        if not grad.is_sparse:  # somebody computed with the weight itself, for example a penalty on it
            if self.replicate:
                raise TypeError(
                    f"ShardedEmbedding: the gradient of a replica is dense: its weight was used directly; what other "
                    f"ranks say about these rows is not known (rank {self.axis.rank}); use the module or full_weight()"
                )
            self._set_gradient(torch.arange(len(grad), device="cpu"), grad.to(self.wide))
            return self.gradient()
        if not grad.is_coalesced():
            self.weight.grad = grad = grad.coalesce()
        places = getattr(grad, "row_places", None)
        if places is None or len(places) != grad._nnz():
            ids, places = self.ownership.ids(self.axis.rank), start_copy_to_host(grad.indices()[0]).wait()
            places = (places - ids.start) // (ids.step or 1) if self.replicate else places
        return places, grad.values()

    def add_gradient(self, places: Tensor, rows: Tensor) -> None:
        """Add gradients of own rows, each place once and rising. Earlier backwards come first in every sum."""
        before = self.gradient()
        if before is not None and len(before[0]):
            found = compact(torch.cat([before[0], places]))
            places, rows = found.unique, segment_sum(torch.cat([before[1], rows]), found, rows.dtype)
        self._set_gradient(places, rows)

    def _set_gradient(self, places: Tensor, rows: Tensor) -> None:
        if self.weight.grad_dtype != rows.dtype:
            self.weight.grad = None
            self.weight.grad_dtype = rows.dtype
        ids = self.ownership.ids(self.axis.rank)
        where = places * (ids.step or 1) + ids.start if self.replicate else places  # in the weight
        self.weight.grad = torch.sparse_coo_tensor(
            copy_to_device(where[None], rows.device), rows, self.weight.shape, is_coalesced=True, check_invariants=False
        )
        self.weight.grad.row_places = places  # type: ignore[attr-defined]  # as the host knows them

    # What prefetching asks: see `weft.ops.embedding.lookup.Prefetch`.

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Around changes of the weight that `stepped` notes, or that change no row's value."""
        with self.lock:
            self._wait_for_reads()
            before = self.weight._version
            yield
            self._own_writes += self.weight._version - before

    def read_beside(self, read: Pending[None]) -> None:
        """A lane reads own rows until ``read``: whoever writes to them comes after it."""
        self._reads.append(read)

    def _wait_for_reads(self) -> None:
        reads, self._reads = self._reads, []
        for read in reads:
            read.wait()

    @property
    def foreign_writes(self) -> int:
        """How often somebody else has written to the weight."""
        return self.weight._version - self._own_writes

    def await_gradient(self, places: Tensor) -> None:
        """These own rows were pulled for a forward that will have a backward."""
        if self.foreign_writes != self._stepped_by_others:  # an optimizer that does not call `stepped` has
            self._stepped_by_others = self.foreign_writes
            self._awaiting.clear()
        self._awaiting.append(places)
        if len(self._awaiting) > 64:  # nobody steps
            self._awaiting = [torch.cat(self._awaiting).unique()]

    def stepped(self, places: Tensor) -> None:
        """A step has changed own rows, besides those that move without a gradient."""
        self.version += 1
        self._awaiting.clear()
        if self._changed is not None:
            self._changed[places] = self.version

    def changed_since(self, places: Tensor, version: int) -> Tensor:
        """Of own rows that were not expected to change: whether they have since ``version``.

        Also those that move by themselves now: since then weight decay or another mode may have been switched on.
        """
        assert self._changed is not None, "will_change is asked first"
        found = self._changed[places] > version
        if self.deferred is not None and self.version > version:
            found |= self.deferred.moves_without_gradient(places)
        return found

    def will_change(self, places: Tensor) -> Tensor:
        """Of own rows: whether the next step is expected to change them."""
        count = self.ownership.count(self.axis.rank)
        if self._changed is None:
            self._changed = torch.zeros(count, dtype=torch.int64, device=places.device)
        expected = torch.zeros(count, dtype=torch.bool, device=places.device)
        for some in list(self._awaiting):
            expected[some] = True
        found = expected[places]
        return found if self.deferred is None else found | self.deferred.moves_without_gradient(places)


class RowWeight(Parameter):
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
    if name in ("__set__", "__delete__"):
        return func == Tensor.data.__set__  # type: ignore[attr-defined]
    return func in _READING if name == "__get__" else func not in _LOOKING


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
