"""`ShardedEmbedding`: an embedding table whose rows lie on the ranks and travel only when a batch touches them."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from weft.comm import Axis
from weft.comm.arguments import find_choice_fault, find_flag_fault, find_integer_fault, read
from weft.comm.device import copy_to_device
from weft.comm.function import eager, outside_modes
from weft.ops.embedding.exchange import RowExchange
from weft.ops.embedding.ids import OWNERSHIPS, IdSet, Ownership, read_ids
from weft.ops.embedding.lookup import Lookup, Prefetch, WholeTable
from weft.ops.embedding.table import RowTable, RowWeight
from weft.ops.embedding.whole import all_rows, from_checkpoint, to_checkpoint

REDUCTIONS = ("mean", "sum")
_BLOCK = 1 << 20  # elements drawn at once, a multiple of 16: blocks of that give the numbers of one long draw


@dataclass(frozen=True)
class _Options:
    """What the ranks must have in common."""

    num_embeddings: int
    embedding_dim: int
    ownership: str
    dtype: torch.dtype
    gradient: bool


class ShardedEmbedding(nn.Module):
    """A table ``[num_embeddings, embedding_dim]`` over the ranks of ``group``, used as ``nn.Embedding``.

    Every rank passes its own ids, of any shape, and gets their rows. Ids may stay on the CPU while the table is on a
    device: then the host never waits for it. A rank owns about N/P rows: "strided" (row i
    belongs to rank i mod P; frequent ids are spread evenly) or "contiguous" (rank r owns the r-th ceil(N/P)).

    | crosses ranks | forward                                       | backward                                     |
    |---------------|-----------------------------------------------|----------------------------------------------|
    | counts        | a few integers to each rank, on the CPU side  |                                              |
    | ids           | int32, each needed row's once, to its owner   |                                              |
    | rows          | the needed rows, from their owners            | a gradient for each needed row, to its owner |

    Gradients are summed at the owner in rank order, at least in fp32, and averaged over the ranks as
    DistributedDataParallel does (``reduce="sum"``: not averaged). ``weight.grad`` is sparse and holds own rows; step
    it with `RowAdam`. ``padding_idx`` gets no gradient. ``replicate=True`` keeps the whole table on every rank; a
    forward refreshes the rows its batch needs, `refresh_all` all of them.

    The first table is drawn as ``nn.Embedding`` draws it, so with one seed on all ranks it is the same at any P.

    >>> table = ShardedEmbedding(10, 4)
    >>> table(torch.tensor([[1, 2], [2, 9]])).shape
    torch.Size([2, 2, 4])
    """

    weight: nn.Parameter

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        group: Any = None,
        ownership: str = "strided",
        padding_idx: int | None = None,
        reduce: str = "mean",
        replicate: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        axis, name = Axis.of(group), type(self).__name__
        fault = (  # nothing is sent here, so it is this rank's alone
            find_integer_fault(name, "num_embeddings", num_embeddings, axis.rank, least=1)
            or find_integer_fault(name, "embedding_dim", embedding_dim, axis.rank, least=1)
            or find_choice_fault(name, "ownership", ownership, axis.rank, OWNERSHIPS)
            or find_choice_fault(name, "reduce", reduce, axis.rank, REDUCTIONS)
            or find_flag_fault(name, "replicate", replicate, axis.rank)
            or (None if padding_idx is None else find_integer_fault(name, "padding_idx", padding_idx, axis.rank))
        )
        if fault is None and padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            fault = ValueError(f"{name}: padding_idx {padding_idx} is not a row of {num_embeddings} (rank {axis.rank})")
        if fault is not None:
            raise fault
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        self.reduce, self.replicate = reduce, replicate
        self.axis, self.ownership = axis, Ownership(ownership, num_embeddings, axis.size)
        rows = num_embeddings if replicate else self.ownership.count(axis.rank)
        self._take_weight(torch.empty(rows, embedding_dim, device=device, dtype=dtype), True)
        self._prefetch: Prefetch | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the table as ``nn.Embedding`` does: N(0, 1), ``padding_idx`` zero."""
        if self.weight.is_meta:
            return
        step = max(16, _BLOCK // self.embedding_dim // 16 * 16)
        weight = self.weight.detach()
        for start in range(0, self.num_embeddings, step):
            rows = min(step, self.num_embeddings - start)
            drawn = torch.empty(rows, self.embedding_dim, device=self.weight.device, dtype=self.weight.dtype).normal_()
            if self.padding_idx is not None and 0 <= self.padding_idx - start < rows:
                drawn[self.padding_idx - start] = 0
            if self.replicate:
                weight[start : start + rows] = drawn
                continue
            slots = self.ownership.slots(torch.arange(start, start + rows))
            own = slots // self.ownership.stride == self.axis.rank
            weight[slots[own] % self.ownership.stride] = drawn[own]

    @classmethod
    def from_embedding(
        cls,
        embedding: nn.Embedding,
        *,
        group: Any = None,
        ownership: str = "strided",
        reduce: str = "mean",
        replicate: bool = False,
    ) -> ShardedEmbedding:
        """The same table, sharded. Every rank passes the whole; nothing crosses ranks."""
        if embedding.max_norm is not None or embedding.scale_grad_by_freq:
            raise NotImplementedError("ShardedEmbedding: max_norm and scale_grad_by_freq are not supported")
        made = cls.__new__(cls)
        ShardedEmbedding.__init__(
            made, embedding.num_embeddings, embedding.embedding_dim, group=group, ownership=ownership,
            padding_idx=embedding.padding_idx, reduce=reduce, replicate=replicate, device="meta",
        )  # fmt: skip
        whole = embedding.weight.detach()
        rows = whole if replicate else whole[made.ownership.ids(made.axis.rank)]
        made._take_weight(rows.clone(), embedding.weight.requires_grad)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedEmbedding:
        """A table of its own on the same ranks, for example for an average of weights."""
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        shared: dict[str, Any] = {"axis": self.axis, "table": None, "_prefetch": None, "_parameters": {}}
        for name, value in self.__dict__.items():
            made.__dict__[name] = shared[name] if name in shared else copy.deepcopy(value, memo)
        made.table = copy.deepcopy(self.table, memo)  # which an optimizer that is copied beside has, too
        made.weight = made.table.weight
        return made

    def __getstate__(self) -> dict[str, Any]:
        if self.axis.size > 1:
            raise TypeError(
                f"{type(self).__name__}: a table over {self.axis.size} ranks is not pickled (rank {self.axis.rank}); "
                f"save its state_dict(), which any number of ranks can load"
            )
        state = {name: value for name, value in self.__dict__.items() if name not in ("axis", "table", "_prefetch")}
        return {**state, "_parameters": {"weight": nn.Parameter(self.weight.data, self.weight.requires_grad)}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        world = Axis.of(None)
        self.axis, self._prefetch = world.subset([world.rank]) if world.size > 1 else world, None
        self._take_weight(self.weight.detach(), self.weight.requires_grad)

    def _apply(self, fn: Any, recurse: bool = True) -> ShardedEmbedding:
        super()._apply(fn, recurse)
        if self.weight is not self.table.weight:  # made anew, as from the meta device
            self._take_weight(self.weight.detach(), self.weight.requires_grad)
        return self

    def _take_weight(self, values: Tensor, requires_grad: bool) -> None:
        self.weight = RowWeight(values, requires_grad)
        self.table = RowTable(self.weight, self.axis, self.ownership, self.reduce, self.replicate)

    def extra_repr(self) -> str:
        """As ``nn.Embedding``, and how the rows lie on the ranks."""
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        kind = "replicate" if self.replicate else self.ownership.kind
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}, {kind} over {self.axis.size} ranks"

    @eager
    def forward(self, ids: Tensor) -> Tensor:
        """The rows of ``ids``, ``[*ids.shape, embedding_dim]``."""
        return self._look_up(self._read_ids(ids))

    def _look_up(self, ids: Tensor | Exception) -> Tensor:
        """The rows of ``ids``, on the host; or what is wrong with this rank's arguments, on all ranks."""
        gradient = self._wants_gradient
        with outside_modes(self.weight):
            exchange, rows = self._fetch(ids, gradient)
            if self.replicate:
                needed = copy_to_device(self.ownership.ids_at(exchange[0].needed.unique), rows.device)
                with self.table.writing():
                    self.table.values.index_copy_(0, needed, rows)
        assert isinstance(ids, Tensor), "a fault has been raised"
        if gradient:
            self.table.await_gradient(exchange[0].asked)
        padding = self.padding_idx
        slot = None if padding is None else int(self.ownership.slots(torch.tensor(padding)))
        return Lookup.apply(self.weight, self.table, exchange, rows, ids.shape, slot)

    def _fetch(self, ids: Tensor | Exception, gradient: bool) -> tuple[RowExchange, Tensor]:
        """The needed rows ``[U, d]``, prefetched or pulled now, and the exchange they came by."""
        ahead, self._prefetch = self._prefetch, None  # should it have failed, it is forgotten
        if ahead is not None:
            rows, used = ahead.resolve(ids)
            if rows is not None:
                return ahead.exchange, rows
            if not used:
                self._prefetch = ahead
        exchange = self._open(ids, gradient)
        exchange.wait_ids()
        (rows,) = exchange.pull([self.table.current(exchange[0].merged.unique)]).wait()
        return exchange, rows

    @eager
    def prefetch(self, ids: Tensor) -> None:
        """Start fetching the rows of the next batch's ``ids``; call it after this batch's forward, on every rank.

        The next forward with these ids takes them. Rows that this batch's step changes travel after it, so they are
        right: see docs/rows.md. With ids on the CPU the host does not wait for a device.
        """
        gradient, found = self._wants_gradient, self._read_ids(ids)
        with outside_modes(self.weight):
            before, self._prefetch = self._prefetch, None  # should it have failed, it is forgotten
            if before is not None:
                before.resolve(found if isinstance(found, Exception) else None)
            exchange = self._open(found, gradient)
            assert isinstance(found, Tensor), "a fault has been raised"
            self._prefetch = Prefetch(self.table, found, exchange)

    def _read_ids(self, ids: Any) -> Tensor | Exception:
        """Ids on the host, or what is wrong with them: the one place where it waits for those of a device."""
        rank = self.axis.rank
        found = read("embedding", rank, lambda: read_ids("embedding", [ids], [self.num_embeddings], rank))
        return found if isinstance(found, Exception) else found[0]

    @property
    def _wants_gradient(self) -> bool:
        """In the caller's modes, so asked outside of `outside_modes`."""
        return self.weight.requires_grad and torch.is_grad_enabled()

    def _open(self, ids: Tensor | Exception, gradient: bool) -> RowExchange:
        if isinstance(ids, Exception):
            self.axis.refuse("embedding", ids, metadata=1, metadata_each=1)
        kind, dtype = self.ownership.kind, self.weight.dtype
        options = _Options(self.num_embeddings, self.embedding_dim, kind, dtype, gradient)
        return RowExchange.of("embedding", [IdSet(ids, self.ownership)], self.axis, options)

    def full_weight(self) -> Tensor:
        """The whole table ``[N, d]`` on every rank, for a tied output head; all ranks must ask.

        Its gradient goes to the owners, densely: a table-sized message in each direction.
        """
        if self._wants_gradient:
            own = self.ownership.count(self.axis.rank)
            self.table.await_gradient(torch.arange(own, device="cpu"))
        return WholeTable.apply(self.weight, self.table)

    @torch.no_grad()
    def refresh_all(self) -> None:
        """With ``replicate``: bring every row of this rank's table up to date; all ranks must ask."""
        if not self.replicate:
            raise ValueError("ShardedEmbedding: refresh_all is for replicate=True; other tables have no stale rows")
        whole = all_rows(self.axis, self.ownership, self.table.current())
        with self.table.writing():
            self.table.values.copy_(whole)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "weight"] = to_checkpoint(self.axis, self.ownership, self.table.current().contiguous())

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool, missing_keys: list[str],
        unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        key = prefix + "weight"
        if key not in state_dict:
            if strict:
                missing_keys.append(key)
            return
        value, wanted = state_dict[key], (self.num_embeddings, self.embedding_dim)
        if tuple(value.shape) != wanted:
            error_msgs.append(f"size mismatch for {key}: {list(value.shape)} in the checkpoint, {list(wanted)} here")
            return
        with torch.no_grad():
            shard = self.table.current()  # steps that rows have missed belong to the old table
            shard.copy_(from_checkpoint(self.axis, self.ownership, value))
            if self.replicate:
                self.refresh_all()
