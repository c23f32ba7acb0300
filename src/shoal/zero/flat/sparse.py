"""Sparse updates in stages 1 and 2: only the rows that a step touches are reduced, stepped and sent.

A `Table` is a parameter whose gradients are few rows of it: the weight of an embedding with ``sparse=True``, or a
matrix of which each rank sends the largest values only (`topk`: its rows are single values). It is in no bucket.

- *Reduced*: at the end of a backward pass each rank sends each owner the indices and values of the rows of that owner
  which it has touched. The owner adds up in the order of the ranks, and divides by their number.
- *Stepped*: the optimizer steps a small tensor of the rows that any rank has touched, with the same rows of its
  statistics (`Table.begin`, `Table.end`). So any optimizer that treats each value by itself is a lazy one: a row's
  weights and statistics change in the steps that touch it, and in no other; decay of weights, too. Single numbers, such
  as the step counter of a bias correction, belong to the table: they count the steps in which any rank had a gradient
  for it, as `torch.optim.SparseAdam` does.
- *Sent*: the owner sends all ranks the indices and the new values of these rows.

How many rows come is told first. With `n` rows of `w` values a message has ``n * (w * itemsize + 4)`` bytes, 8 for `n`.

**Owners.** Frequent rows are often neighbours: vocabularies are sorted by frequency. If each rank owned a range of
rows, the first one would own nearly all rows that are touched. So rows are counted in another order (`Scattered`),
which depends on their number alone: each rank owns a range of that, whatever the number of ranks, and a checkpoint for
another number of ranks is read as any other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from shoal.layout import Order, Scattered, Tile, flat, order_of, shaped, tile_numel
from shoal.zero.flat.topk import Fraction, Residual
from shoal.zero.parameters import OwnTile, named_parameters, wide_dtype
from shoal.zero.ranks.collectives import Collectives

__all__ = ["Rows", "Table", "Tables", "add_up", "declared", "tables_of"]

_LARGEST = 2**31
"""So many rows have indices of 4 bytes."""


def declared(model: torch.nn.Module) -> set[str]:
    """The names of the weights that are sparse in each module which has them.

    One that is also the weight of another module, such as a head, has dense gradients, too: it is not among them.
    """
    sparse, dense = set[int](), set[int]()
    for module in model.modules():
        embeds = isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.sparse
        (sparse if embeds else dense).update(map(id, module.parameters(recurse=False)))
    return {name for name, each in named_parameters(model) if id(each) in sparse - dense}


class Rows(NamedTuple):
    """Some rows of a table.

    Attributes:
        places: where they are, in the order of the table; increasing, int64.
        values: shape (rows, width).
    """

    places: torch.Tensor
    values: torch.Tensor


def add_up(parts: Sequence[Rows]) -> Rows:
    """The sum of rows, first to last; values of 16 bits are added in float32."""
    every = torch.cat([each.places for each in parts])
    places, found = torch.unique(every, return_inverse=True)
    like = parts[0].values
    total = like.new_zeros((len(places), like.shape[1]), dtype=wide_dtype(like.dtype))
    for where, part in zip(found.split([len(each.places) for each in parts]), parts, strict=True):
        total.index_add_(0, where, part.values.to(total.dtype))  # no row comes twice in a part
    return Rows(places, total)


class Table:
    """One parameter whose gradients are rows.

    Args:
        name: of the parameter.
        parameter: its values are made contiguous, in the order of its dimensions (channels last is kept).
        rank: ours.
        ranks: how many there are.
        wide: the parameter's values in float32, if it has been made narrower.
        residual: of a parameter whose largest values are sent; None for an embedding.

    Attributes:
        order: the order in which its rows are counted.
        edges: the rows of rank `r` are those from `edges[r]` to `edges[r + 1]` in that order.
        tile: the values of the own rows.
        values: the tensor that the optimizer steps: the own rows that were touched since gradients were cleared; their
            mean gradient is its `grad`. Empty before that. It has memory in a step only.
        wide: float32 values of the own rows; None where the parameter itself is as wide.
    """

    def __init__(
        self,
        name: str,
        parameter: torch.nn.Parameter,
        rank: int,
        ranks: int,
        wide: torch.Tensor | None,
        residual: Residual | None,
    ) -> None:
        self.name, self.residual, self._parameter = name, residual, parameter
        layout = order_of(parameter)
        data = flat(parameter.detach(), layout)
        parameter.data = shaped(data, parameter.shape, layout)
        width = 1 if residual is not None else parameter.shape[1]
        self._data = data.view(-1, width)
        self.count, self.width = self._data.shape
        self.order: Order = layout if residual is not None else Scattered.of(self.count)
        self.edges = [rank * self.count // ranks for rank in range(ranks + 1)]
        self._start, stop = self.edges[rank], self.edges[rank + 1]
        self._own_count = stop - self._start
        self.tile = Tile(name, self._start * width, stop * width)
        dtype = wide_dtype(parameter.dtype)
        self.wide = None
        if dtype != parameter.dtype:
            source = self._data if wide is None else flat(wide, layout).view(-1, width)
            self.wide = source[self._at(self._every())].to(dtype)
        self.values = torch.nn.Parameter(data.new_empty((0, width), dtype=dtype))
        self.local: torch.Tensor | Rows | None = None  # sums of this rank that are not reduced yet
        self._touched: torch.Tensor | None = None  # which of the own rows
        self._inner: torch.optim.Optimizer | None = None  # from a step on until its values are sent
        self._began = False  # whether it steps this table, or has
        self._whole: dict[str, torch.Tensor] = {}  # statistics of all own rows, while the optimizer steps some
        self._lent: torch.Tensor | None = None  # values of all own rows, which others may have written

    def _rows_at(self, places: torch.Tensor) -> torch.Tensor:
        """Where in `_data` the rows at these places are."""
        return self.order.rows(places) if isinstance(self.order, Scattered) else places

    def _every(self) -> torch.Tensor:
        """The own rows, counted from the first one."""
        return torch.arange(self._own_count, dtype=torch.int64, device=self._data.device)

    def _at(self, own: torch.Tensor) -> torch.Tensor:
        """Where in `_data` some own rows are."""
        return self._rows_at(own + self._start)

    # ------------------------------------------------------------------------------------------------------- gradients

    def hold(self, gradient: torch.Tensor) -> None:
        """Add a gradient to those of this rank that are not reduced yet; a dense one may be kept as it is."""
        if self.residual is not None:
            values = flat(gradient.to_dense() if gradient.is_sparse else gradient, order_of(self._parameter))
            values = values.to(self.values.dtype)
            self.local = self.local + values if isinstance(self.local, torch.Tensor) else values
            return
        rows = self._rows_of(gradient)
        self.local = add_up([self.local, rows]) if isinstance(self.local, Rows) else rows

    def _rows_of(self, gradient: torch.Tensor) -> Rows:
        """The rows that a gradient touches; those of a dense one that are not zero."""
        if gradient.is_sparse:  # sums of rows that come several times are in float32
            wide = torch.sparse_coo_tensor(
                gradient._indices(),  # noqa: SLF001 (what torch's own optimizers use)
                gradient._values().to(self.values.dtype),  # noqa: SLF001
                gradient.shape,
                check_invariants=False,
            ).coalesce()
            rows, values = wide.indices()[0], wide.values()
        else:
            rows = gradient.ne(0).any(1).nonzero()[:, 0]
            values = gradient[rows].to(self.values.dtype)
        assert isinstance(self.order, Scattered)
        places, order = self.order.places(rows).sort()
        return Rows(places, values[order])

    def take(self) -> Rows:
        """The rows of this rank that are to be reduced, in the parameter's dtype; they are not held any more."""
        local, self.local = self.local, None
        if local is None:
            none = torch.empty(0, dtype=torch.int64, device=self._data.device)
            return Rows(none, self._data.new_empty((0, self.width)))
        if isinstance(local, torch.Tensor):
            assert self.residual is not None
            places, values = self.residual.choose(local, self._data.dtype)
            return Rows(places, values[:, None])
        return Rows(local.places, local.values.to(self._data.dtype))

    def add(self, parts: Sequence[Rows]) -> torch.Tensor:
        """Take in what each rank has for our rows, in the order of the ranks; returns the sum of all mean values."""
        total = add_up(parts)
        mean = Rows(total.places - self._start, total.values.div_(len(parts)))
        if self._touched is not None and self.values.grad is not None:
            mean = add_up([Rows(self._touched, self.values.grad), mean])
        self._set(mean)
        return mean.values.sum()

    def _set(self, mean: Rows) -> None:
        self.values.grad = None
        self._touched, self.values.data = mean.places, _without_memory(mean.values)
        self.values.grad = mean.values

    def clear(self) -> None:
        """Let go of all gradients, and of what the residual lost to them."""
        self.local = self._touched = self.values.grad = None
        self.values.data = self.values.data.new_empty((0, self.width))
        if self.residual is not None:
            self.residual.keep()

    # ------------------------------------------------------------------------------------------------------------ steps

    def expect(self, inner: torch.optim.Optimizer) -> None:
        """A step of the optimizer begins; if it has gradients for this table, it will step it."""
        self._lent, self._began = None, False
        self._inner = None if self.values.grad is None else inner

    def begin(self) -> None:
        """The optimizer is about to step: it finds the touched rows, and their statistics."""
        if self._inner is None:
            return
        assert self._touched is not None
        assert self.values.grad is not None
        self._began = True
        self.values.data = self._now(self._touched)
        if isinstance(self._inner, torch.optim.SparseAdam):
            places = torch.arange(len(self._touched), dtype=torch.int64, device=self._touched.device)[None]
            self.values.grad = torch.sparse_coo_tensor(
                places, self.values.grad, self.values.shape, is_coalesced=True, check_invariants=False
            )
        entry = self._inner.state.get(self.values, {})
        for key, value in entry.items():
            if isinstance(value, torch.Tensor) and value.ndim and value.numel() == self.tile.numel:
                self._whole[key] = value.view(-1, self.width)
                entry[key] = self._whole[key][self._touched]
        if self.residual is not None:
            self.residual.advance()

    def _now(self, touched: torch.Tensor) -> torch.Tensor:
        """The values of own rows. Where a program wrote others into a narrow parameter, those count."""
        narrow = self._data[self._at(touched)]
        if self.wide is None:
            return narrow
        wide = self.wide[touched]
        return torch.where(narrow != wide.to(narrow.dtype), narrow.to(wide.dtype), wide)

    def end(self) -> None:
        """The optimizer has stepped, or raised: take over what it has changed."""
        if self._inner is None:
            return
        assert self._touched is not None
        if self.values.grad is not None and self.values.grad.is_sparse:
            self.values.grad = self.values.grad._values()  # noqa: SLF001
        self._write(self._touched, self.values.detach())
        entry = self._inner.state.get(self.values, {})
        for key, value in entry.items():
            if isinstance(value, torch.Tensor) and value.shape == self.values.shape:
                whole = self._whole.get(key)
                if whole is None:  # a row that was never touched begins with zeros
                    whole = value.new_zeros((self._own_count, self.width))
                entry[key] = whole.index_copy_(0, self._touched, value)
        self.values.data = _without_memory(self.values.data)
        self._whole.clear()

    def changed(self) -> Rows:
        """The own rows with new values: those that were stepped; or all, if others may have written to them."""
        own = torch.empty(0, dtype=torch.int64, device=self._data.device)
        if self._lent is not None:
            own = self._every()
            self._write(own, self._lent)
        elif self._began:
            assert self._touched is not None
            own = self._touched
        self._lent, self._inner, self._began = None, None, False
        return Rows(own + self._start, self._data[self._at(own)])

    def _write(self, own: torch.Tensor, values: torch.Tensor) -> None:
        if self.wide is not None:
            self.wide.index_copy_(0, own, values)
        self._data.index_copy_(0, self._at(own), values.to(self._data.dtype))

    def receive(self, rows: Rows) -> None:
        """Take over new values of others' rows."""
        self._data.index_copy_(0, self._rows_at(rows.places), rows.values)

    # -------------------------------------------------------------------------------------------------------- messages

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in a message: of its index, and its values."""
        return self._index_dtype.itemsize + self.width * self._data.itemsize

    @property
    def _index_dtype(self) -> torch.dtype:
        return torch.int32 if self.count <= _LARGEST else torch.int64

    def pack(self, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows as bytes: their places, and behind these their values."""
        values = rows.values.contiguous().view(-1)
        return rows.places.to(self._index_dtype).view(torch.uint8), values.view(torch.uint8)

    def unpack(self, message: torch.Tensor) -> Rows:
        """The rows that these bytes are."""
        count = len(message) // self.row_bytes
        places, values = message.tensor_split([count * self._index_dtype.itemsize])
        # Clones begin where any dtype may begin.
        return Rows(
            places.clone().view(self._index_dtype).to(torch.int64),
            values.clone().view(self._data.dtype).view(count, self.width),
        )

    # ------------------------------------------------------------------------------------------------------ checkpoints

    def own_tile(self) -> OwnTile:
        """The own rows, in memory that may be written; `changed` takes it over."""
        self._lent = self._now(self._every())
        if self.wide is not None:
            self.wide.copy_(self._lent)
        return OwnTile(self.tile, self.values, self._lent.view(-1))

    def gradients(self) -> Iterator[torch.Tensor]:
        """All that is kept of gradients, but for those of `values`."""
        if self._touched is not None:
            yield self._touched
        if self.local is not None:
            yield from [self.local] if isinstance(self.local, torch.Tensor) else self.local
        if self.residual is not None:
            yield from self.residual.tensors()


class Tables:
    """All tables of a model.

    Args:
        tables: in the same order on all ranks.
        collectives: among the ranks.

        fraction: of those with a residual; None if there are none.

    Attributes:
        of: the tables by name.
    """

    def __init__(self, tables: Iterable[Table], collectives: Collectives, fraction: Fraction | None = None) -> None:
        self.of: Mapping[str, Table] = {each.name: each for each in tables}
        self._collectives, self.fraction = collectives, fraction

    def among(self, stepped: Iterable[torch.Tensor] | None) -> list[Table]:
        """The tables whose `values` are among these tensors; none for None, which are tensors that nobody steps."""
        found = {id(each) for each in stepped or ()}
        return [each for each in self.of.values() if id(each.values) in found]

    def reduce(self) -> list[torch.Tensor]:
        """Send what is held to the owners. All ranks call it; returns the sum of the mean values of each table."""
        if not self.of:
            return []
        here, ranks = self._collectives.rank, range(self._collectives.ranks)
        shares: list[list[Rows]] = []  # for each table, by owner
        for table in self.of.values():
            places, values = table.take()
            edges = torch.tensor(table.edges[1:-1], dtype=torch.int64, device=places.device)
            cuts = torch.searchsorted(places, edges).tolist()
            ends = [0, *cuts, len(places)]
            shares.append([Rows(places[ends[r] : ends[r + 1]], values[ends[r] : ends[r + 1]]) for r in ranks])
        sends = {rank: [each[rank] for each in shares] for rank in ranks if rank != here}
        found, sent = self._exchange(sends)
        self._collectives.traffic.reduced += sent
        found[here] = [each[here] for each in shares]
        return [table.add([found[rank][number] for rank in ranks]) for number, table in enumerate(self.of.values())]

    def publish(self) -> None:
        """Send the new values of own rows to all ranks, and receive theirs. All ranks call it."""
        if not self.of:
            return
        here = self._collectives.rank
        mine = [table.changed() for table in self.of.values()]
        found, sent = self._exchange({rank: mine for rank in range(self._collectives.ranks) if rank != here})
        self._collectives.traffic.gathered += sent
        for rows in found.values():
            for table, each in zip(self.of.values(), rows, strict=True):
                table.receive(each)

    def _exchange(self, sends: Mapping[int, Sequence[Rows]]) -> tuple[dict[int, list[Rows]], int]:
        """Rows of each table for each other rank, and theirs for this one; and how many bytes were sent."""
        tables, device = list(self.of.values()), self._collectives.device
        counts = {
            rank: torch.tensor([len(each.places) for each in rows], dtype=torch.int64, device="cpu")
            for rank, rows in sends.items()
        }
        told = self._collectives.exchange(
            "to tell how many rows come", {rank: each.to(device).view(torch.uint8) for rank, each in counts.items()}
        )
        messages = {
            rank: torch.cat([part for table, each in zip(tables, rows, strict=True) for part in table.pack(each)])
            for rank, rows in sends.items()
        }
        sizes: dict[int, list[int]] = {}
        for rank, each in told.items():
            numbers = each.view(torch.int64).tolist()
            sizes[rank] = [table.row_bytes * number for table, number in zip(tables, numbers, strict=True)]
        came = self._collectives.exchange(
            "an exchange of rows", messages, {rank: sum(each) for rank, each in sizes.items()}
        )
        found = {
            rank: [table.unpack(part) for table, part in zip(tables, torch.split(message, sizes[rank]), strict=True)]
            for rank, message in came.items()
        }
        return found, sum(each.nbytes for each in (*counts.values(), *messages.values()))


def _without_memory(like: torch.Tensor) -> torch.Tensor:
    """A tensor of this shape and dtype that takes no memory."""
    return like.new_empty(()).expand(like.shape)


def tables_of(
    model: torch.nn.Module,
    parameters: Mapping[str, torch.nn.Parameter],
    top_k: float | None,
    wide: Mapping[str, torch.Tensor],
    collectives: Collectives,
) -> Tables:
    """The tables of a model: its sparse embeddings, and with `top_k` its matrices.

    Args:
        model: the model.
        parameters: the trained ones.
        top_k: the share of a tile that is sent; None for all.
        wide: float32 values of parameters that have been made narrower.
        collectives: among the ranks.
    """
    sparse, fraction = declared(model), None if top_k is None else Fraction(top_k)
    tile, found = tile_numel(sum(each.numel() for each in parameters.values())), []
    for name, each in parameters.items():
        residual = None
        if name not in sparse:
            if fraction is None or each.ndim < 2:  # vectors are few values, and matter much
                continue
            residual = Residual(each, tile, fraction)
        found.append(Table(name, each, collectives.rank, collectives.ranks, wide.get(name), residual))
    return Tables(found, collectives, fraction)
