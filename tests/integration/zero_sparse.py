"""What ranks do in the tests of sparse updates, and the same on one process, to compare with.

The one process knows nothing of `shoal.zero`: it adds up whole gradients, and lets an optimizer of torch step them,
either torch's sparse one, or an ordinary one on copies of the rows that were touched.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import shoal.zero
from shoal.errors import ConfigError, LocalError
from shoal.zero.flat.engine import FlatEngine
from shoal.zero.flat.sparse import Rows, Table
from shoal.zero.optimizer import ShardedOptimizer
from tests.integration.ranks import die_here

STEPS, BATCH, USERS, ITEMS = 6, 5, 53, 41


class Clicks(torch.nn.Module):
    """Two sparse tables, one of bags with a padding row; a dense table, and a head, unless `bare`."""

    def __init__(self, *, bare: bool = False, sparse: bool = True) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.users = torch.nn.Embedding(USERS, 6, sparse=sparse)
        self.items = torch.nn.EmbeddingBag(ITEMS, 6, mode="sum", sparse=sparse, padding_idx=0)
        self.head = None if bare else torch.nn.Linear(6, 3)
        self.days = None if bare else torch.nn.Embedding(7, 6)

    def forward(self, users: torch.Tensor | None, items: torch.Tensor) -> torch.Tensor:
        """One value for each user, shape (batch,)."""
        seen: torch.Tensor = self.items(items)
        if users is not None:
            seen = seen * self.users(users)
            if self.days is not None:
                seen = seen + self.days(users % 7)
        if self.head is not None:
            seen = self.head(torch.tanh(seen))
        return seen.sum(1)


def loss_of(model: torch.nn.Module, step: int, rank: int, micro: int = 0) -> torch.Tensor:
    """Of a micro-batch that depends on these numbers alone: few frequent rows, and repeated ones.

    In step 2 rank 1 touches no item but the padding, and in step 3 no user.
    """
    made = torch.Generator().manual_seed(1000 * step + 10 * rank + micro)
    users = (torch.rand(BATCH, generator=made) ** 3 * USERS).long()
    items = (torch.rand(BATCH, 3, generator=made) ** 3 * ITEMS).long()
    wanted = torch.rand(BATCH, generator=made)
    if (step, rank) == (2, 1):
        items = torch.zeros_like(items)
    found = model(None if (step, rank) == (3, 1) else users, items)
    return torch.nn.functional.mse_loss(found.float(), wanted)


def make(kind: str) -> Callable[[Any], torch.optim.Optimizer]:
    """A factory for `shard`."""
    makers: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "sgd": lambda each: torch.optim.SGD(each, lr=0.05),
        "momentum": lambda each: torch.optim.SGD(each, lr=0.1, momentum=0.9, weight_decay=0.01),
        "adagrad": lambda each: torch.optim.Adagrad(each, lr=0.1, initial_accumulator_value=0.1),
        "adamw": lambda each: torch.optim.AdamW(each, lr=0.05, weight_decay=0.1),
        "rmsprop": lambda each: torch.optim.RMSprop(each, lr=0.05, momentum=0.9, centered=True),
        "sparseadam": lambda each: torch.optim.SparseAdam(each, lr=0.05),
    }
    return makers[kind]


class Lazy:
    """An ordinary optimizer that steps the touched rows alone, and keeps statistics of all: the rule, in plain torch.

    Args:
        make: makes it.
        trained: all parameters.
    """

    def __init__(self, make: Callable[[Any], torch.optim.Optimizer], trained: list[torch.Tensor]) -> None:
        self._copies = [torch.nn.Parameter(each.detach().clone()) for each in trained]
        self.inner = make(self._copies)
        self._trained = trained

    def step(self, gradients: list[torch.Tensor | None], touched: list[torch.Tensor | None]) -> None:
        """Step all; of a parameter for which `touched` has a mask, the values where it is true."""
        whole: dict[int, dict[str, torch.Tensor]] = {}
        for number, (copy, real, gradient, mask) in enumerate(
            zip(self._copies, self._trained, gradients, touched, strict=True)
        ):
            copy.grad = None
            if gradient is None:
                continue
            where = torch.ones_like(real, dtype=torch.bool) if mask is None else mask.expand_as(real)
            copy.data, copy.grad = real.detach()[where], None
            copy.grad = gradient[where]
            state = self.inner.state[copy]
            whole[number] = {key: each for key, each in state.items() if torch.is_tensor(each) and each.ndim}
            state.update({key: each[where] for key, each in whole[number].items()})
        self.inner.step()
        for number, states in whole.items():
            copy, real, mask = self._copies[number], self._trained[number], touched[number]
            where = torch.ones_like(real, dtype=torch.bool) if mask is None else mask.expand_as(real)
            real.data[where] = copy.detach()
            for key, each in self.inner.state[copy].items():
                if torch.is_tensor(each) and each.ndim:
                    states.setdefault(key, torch.zeros_like(real))[where] = each
                    self.inner.state[copy][key] = states[key]


class Sums(NamedTuple):
    """The mean gradients of one step on one process."""

    gradients: list[torch.Tensor | None]
    touched: list[torch.Tensor | None]


def sums(model: torch.nn.Module, ranks: int, step: int, micro: int, chosen: Chosen | None = None) -> Sums:
    """Of all ranks' micro-batches, in the order of the ranks, whole; and which rows or values were touched."""
    named = list(model.named_parameters())
    totals: list[torch.Tensor | None] = [None] * len(named)
    touched: list[torch.Tensor | None] = [None] * len(named)
    for rank in range(ranks):
        own, own_touched = _own_sums(model, rank, step, micro)
        for place, (name, each) in enumerate(named):
            gradient, mask = own[place], own_touched[place]
            if chosen is not None and each.ndim > 1 and gradient is not None and mask is None:
                gradient = chosen.take(rank, name, gradient)
                mask = gradient != 0
            touched[place] = _either(touched[place], mask)
            totals[place] = _plus(totals[place], gradient)
    return Sums([None if each is None else each / ranks for each in totals], touched)


def _own_sums(model: torch.nn.Module, rank: int, step: int, micro: int) -> Sums:
    """Of one rank: the gradient of each micro-batch is made whole, then they are added."""
    named = list(model.parameters())
    totals: list[torch.Tensor | None] = [None] * len(named)
    touched: list[torch.Tensor | None] = [None] * len(named)
    for number in range(micro):
        torch.autograd.backward(loss_of(model, step, rank, number))
        for place, each in enumerate(named):
            gradient, each.grad = each.grad, None
            if gradient is not None and gradient.is_sparse:
                mask = torch.zeros(len(each), 1, dtype=torch.bool)
                mask[gradient.coalesce().indices()[0]] = True
                touched[place], gradient = _either(touched[place], mask), gradient.to_dense()
            totals[place] = _plus(totals[place], gradient)
    return Sums(totals, touched)


def _plus(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    return other if one is None else one if other is None else one + other


def _either(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    return other if one is None else one if other is None else one | other


class Chosen:
    """Top-k with error feedback of some ranks, in plain torch."""

    def __init__(self, share: float, tile: int) -> None:
        self._share, self._tile = share, tile
        self.kept: dict[tuple[int, str], torch.Tensor] = {}

    def take(self, rank: int, name: str, gradient: torch.Tensor) -> torch.Tensor:
        """What a rank sends of a gradient, zeros elsewhere."""
        whole = gradient.reshape(-1) + self.kept.get((rank, name), 0.0)
        sent = torch.zeros_like(whole)
        for start in range(0, len(whole), self._tile):
            part = whole[start : start + self._tile]
            for place in part.abs().topk(math.ceil(self._share * len(part))).indices.tolist():
                sent[start + place] = part[place]
        self.kept[rank, name] = whole - sent
        return sent.reshape(gradient.shape)


@cache
def alone(
    ranks: int,
    kind: str,
    *,
    micro: int = 1,
    own: bool = False,
    bare: bool = False,
    top_k: tuple[float, int] | None = None,
) -> dict[str, torch.Tensor]:
    """The weights of one process after all steps: by `Lazy`; or by torch's own sparse optimizer, if `own`."""
    model = Clicks(bare=bare)
    trained: list[torch.Tensor] = list(model.parameters())
    lazy, plain = Lazy(make(kind), trained), make(kind)(trained)
    chosen = None if top_k is None else Chosen(*top_k)
    for step in range(STEPS):
        found = sums(model, ranks, step, micro, chosen)
        if not own:
            lazy.step(found.gradients, found.touched)
            continue
        for each, gradient, mask in zip(trained, *found, strict=True):
            each.grad = gradient
            if mask is not None and gradient is not None:
                rows = mask[:, 0].nonzero()[:, 0]
                each.grad = _sparse(rows, gradient)
        plain.step()
        plain.zero_grad()
    return {name: value.clone() for name, value in model.state_dict().items()}


def _sparse(rows: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    return torch.sparse_coo_tensor(rows[None], whole[rows], whole.shape, is_coalesced=True, check_invariants=False)


# ------------------------------------------------------------------------------------------------------------ on ranks


def _shard(kind: str, *, stage: int = 2, bare: bool = False, **options: Any) -> tuple[Clicks, ShardedOptimizer]:
    model = Clicks(bare=bare)
    if dist.get_rank():  # rank 0's values count
        with torch.no_grad():
            for each in model.parameters():
                each.add_(1.0)
    return shoal.zero.shard(model, make(kind), stage=stage, **options)


def train(
    model: torch.nn.Module,
    optimizer: ShardedOptimizer,
    *,
    micro: int = 1,
    steps: int = STEPS,
    first: int = 0,
    sync: bool = False,
) -> None:
    """Train on this rank's micro-batches; with `sync` each is reduced."""
    rank = dist.get_rank()
    for step in range(first, first + steps):
        with contextlib.nullcontext() if sync else optimizer.no_sync():
            for number in range(micro - 1):
                torch.autograd.backward(loss_of(model, step, rank, number))
        torch.autograd.backward(loss_of(model, step, rank, micro - 1))
        optimizer.step()
        optimizer.zero_grad()


def weights(
    kind: str, stage: int, micro: int = 1, bare: bool = False, top_k: float | None = None, sync: bool = False
) -> dict[str, torch.Tensor]:
    """After all steps."""
    model, optimizer = _shard(kind, stage=stage, bare=bare, top_k=top_k)
    train(model, optimizer, micro=micro, sync=sync)
    return {name: value.clone() for name, value in shoal.zero.full_state_dict(model).items()}


def in_turn(jobs: list[tuple[Any, ...]]) -> list[dict[str, torch.Tensor]]:
    """`weights` of each."""
    return [weights(*each) for each in jobs]


def offloaded(folder: str, top_k: float | None) -> dict[str, torch.Tensor]:
    """`weights` of AdamW in stage 2, with its state in files."""
    model, optimizer = _shard("adamw", top_k=top_k, offload=folder)
    train(model, optimizer)
    assert optimizer.memory().offloaded > 0
    return {name: value.clone() for name, value in shoal.zero.full_state_dict(model).items()}


class Traffic(NamedTuple):
    """What a rank sent in each step, and what it would be by the law."""

    reduced: list[int]
    gathered: list[int]
    reduced_law: list[int]
    gathered_law: list[int]


def traffic(top_k: float | None) -> Traffic:
    """Train, and count: rows that others own, and rows of this rank that any rank touched."""
    model, optimizer = _shard("adamw", top_k=top_k)
    engine = optimizer.carrier
    assert isinstance(engine, FlatEngine)
    others, tables = dist.get_world_size() - 1, engine.tables.of.values()
    dense = [each for name, each in model.named_parameters() if name not in engine.tables.of]
    buckets = sum(each.numel() * 4 for each in dense)
    own = sum(tile.numel * 4 for tile in engine.own if tile.name not in engine.tables.of)
    found = Traffic([], [], [], [])
    told = 8 * len(tables) * others
    taken: dict[str, torch.Tensor] = {}

    def watched(table: Table) -> Callable[[], Rows]:
        take = table.take

        def look() -> Rows:
            rows = take()
            taken[table.name] = rows.places
            return rows

        return look

    for table in tables:
        table.take = watched(table)  # type: ignore[method-assign]
    for step in range(STEPS):
        before = optimizer.traffic()
        torch.autograd.backward(loss_of(model, step, dist.get_rank()))
        touched = {table.name: len(table.values) for table in tables}
        optimizer.step()
        optimizer.zero_grad()
        after, here = optimizer.traffic(), dist.get_rank()
        found.reduced.append(after.reduced - before.reduced)
        found.gathered.append(after.gathered - before.gathered)
        to_others = {
            table.name: sum(
                not table.edges[here] <= place < table.edges[here + 1] for place in taken[table.name].tolist()
            )
            for table in tables
        }
        bytes_of = {table.name: 4 + 4 * table.width for table in tables}
        found.reduced_law.append(buckets - own + told + sum(to_others[name] * each for name, each in bytes_of.items()))
        found.gathered_law.append(
            others * own + told + others * sum(touched[name] * each for name, each in bytes_of.items())
        )
    return found


def goes_on(path: str, kind: str, top_k: float | None, steps: int) -> dict[str, torch.Tensor]:
    """Load a checkpoint, and train on."""
    model, optimizer = _shard(kind, stage=1, top_k=top_k)
    shoal.zero.load(path, model, optimizer)
    train(model, optimizer, first=steps, steps=STEPS - steps)
    return {name: value.clone() for name, value in shoal.zero.full_state_dict(model).items()}


def saves(path: str, kind: str, top_k: float | None, steps: int) -> dict[str, torch.Tensor]:
    """Train a few steps, and save; then train on to the end."""
    model, optimizer = _shard(kind, top_k=top_k)
    train(model, optimizer, steps=steps)
    shoal.zero.save(path, model, optimizer)
    train(model, optimizer, first=steps, steps=STEPS - steps)
    return {name: value.clone() for name, value in shoal.zero.full_state_dict(model).items()}


def loaded(path: str, kind: str, stage: int, top_k: float | None) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """A checkpoint that is loaded and saved again, whole."""
    model, optimizer = _shard(kind, stage=stage, top_k=top_k) if stage < 3 else _dense(kind)
    shoal.zero.load(path, model, optimizer)
    shoal.zero.save(f"{path}-{stage}", model, optimizer)
    found = shoal.zero.consolidate(f"{path}-{stage}")
    return found["model"], found["optimizer"]["state"]


def _not_counted(model: Clicks, optimizer: ShardedOptimizer) -> list[int]:
    """Bytes that each table takes beyond those that `memory` counts: one value of each may be."""
    engine, found = optimizer.carrier, []
    assert isinstance(engine, FlatEngine)
    for table in engine.tables.of.values():
        counted = [*table.gradients(), table.values.grad, table.wide, *model.parameters()]
        taken = [each for owner in (table, table.residual) if owner for each in vars(owner).values()]
        storages = [
            {
                each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
                for each in some
                if torch.is_tensor(each)
            }
            for some in (counted, taken)
        ]
        found.append(sum(size for place, size in storages[1].items() if place not in storages[0]))
    return found


def _dense(kind: str) -> tuple[Clicks, ShardedOptimizer]:
    return shoal.zero.shard(Clicks(sparse=False), make(kind), stage=3)


def rest() -> dict[str, Any]:
    """Many small things, one after another; each says what it saw."""
    found: dict[str, Any] = {}
    model, optimizer = _shard("adamw")
    engine = optimizer.carrier
    assert isinstance(engine, FlatEngine)
    found["owned"] = [each.tile.numel for each in engine.tables.of.values()]

    # A step that is left out changes nothing, and the next one goes on.
    before = shoal.zero.full_state_dict(model)
    factor = math.nan if dist.get_rank() else 1.0
    torch.autograd.backward(loss_of(model, 0, dist.get_rank()) * factor)
    optimizer.step()
    optimizer.zero_grad()
    found["skipped"] = optimizer.skipped, apart(before, shoal.zero.full_state_dict(model))

    # The norm of all gradients, of which each row is with one rank.
    whole = sums(Clicks(), dist.get_world_size(), 0, 1)
    norm = torch.stack([each.norm() for each in whole.gradients if each is not None]).norm()
    torch.autograd.backward(loss_of(model, 0, dist.get_rank()))
    found["norm"] = float(optimizer.clip_grad_norm_(1e-3)) - float(norm)
    named = [name for name, _ in Clicks().named_parameters()]
    rows = {name: int(mask.sum()) for name, mask in zip(named, whole.touched, strict=True) if mask is not None}
    places = sum(tensor.nbytes for table in engine.tables.of.values() for tensor in table.gradients())
    values = sum(each.data.numel() for each in engine.own.values()) * 4
    found["gradients"] = optimizer.memory().gradients, values + places
    found["not counted"] = _not_counted(model, optimizer)
    optimizer.step()
    changed = {
        name: int((before[name] != value).any(1).sum())
        for name, value in shoal.zero.full_state_dict(model).items()
        if name in rows
    }
    found["rows"] = rows, changed
    padding = shoal.zero.full_state_dict(model)["items.weight"][0]
    found["padding"] = float((padding - before["items.weight"][0]).abs().max())
    optimizer.zero_grad()
    found["cleared"] = [len(each.values) for each in engine.tables.of.values()]

    # A table that was frozen for a while; and one whose gradient is dense for once.
    model.users.weight.requires_grad_(False)
    train(model, optimizer, steps=1)
    model.users.weight.requires_grad_(True)
    torch.autograd.backward((model.users.weight[3:5] ** 2).sum())
    found["dense"] = sum(len(each.values) for each in engine.tables.of.values())
    optimizer.step()
    optimizer.zero_grad()

    # What waits within no_sync is not stepped.
    with optimizer.no_sync():
        torch.autograd.backward(loss_of(model, 0, dist.get_rank()))
    try:
        optimizer.step()
    except LocalError as error:
        found["no_sync"] = str(error)
    optimizer.zero_grad()

    # The state of this rank goes out and in.
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    train(model, optimizer, steps=1)

    # bfloat16: the rows are stepped in float32.
    model, optimizer = _shard("sgd", dtype=torch.bfloat16)
    train(model, optimizer)
    engine = optimizer.carrier
    assert isinstance(engine, FlatEngine)
    found["wide"] = {str(each.wide.dtype) for each in engine.tables.of.values() if each.wide is not None}
    wide = alone(dist.get_world_size(), "sgd")
    found["narrow"] = apart(shoal.zero.full_state_dict(model), wide)
    found["equal"] = shoal.zero.full_state_dict(model)

    model, optimizer = _shard("adamw", top_k=0.5)
    torch.autograd.backward(loss_of(model, 0, dist.get_rank()))
    found["not counted"] += _not_counted(model, optimizer)
    return found


def apart(state: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """The largest difference of any value."""
    return max(float((state[name].float() - value.float()).abs().max()) for name, value in wanted.items())


def refused() -> dict[str, str]:
    """What `shard` says of what it cannot do, on this rank; nobody waits."""
    import pytorch_optimizer

    def other_modules() -> None:
        shoal.zero.shard(Clicks(sparse=dist.get_rank() == 0), make("adamw"), stage=2)

    def max_norm() -> None:
        model = torch.nn.Embedding(5, 3, sparse=True, max_norm=1.0)
        shoal.zero.shard(model, make("adamw"), stage=2)

    cases: dict[str, Callable[[], object]] = {
        "sparse differs": other_modules,
        "max_norm": max_norm,
        "SparseAdam of dense ones": lambda: _shard("sparseadam"),
        "state that begins otherwise": lambda: shoal.zero.shard(
            Clicks(), lambda each: pytorch_optimizer.MADGRAD(each, lr=0.1), stage=1
        ),
        "whole tensors": lambda: shoal.zero.shard(Clicks(), lambda each: pytorch_optimizer.Lamb(each, lr=0.1), stage=1),
        "Rprop": lambda: shoal.zero.shard(Clicks(sparse=False), torch.optim.Rprop, stage=1, top_k=0.5),
        "stage 3": lambda: _shard("adamw", stage=3),
        "top_k in stage 3": lambda: shoal.zero.shard(Clicks(sparse=False), make("adamw"), stage=3, top_k=0.1),
        "top_k": lambda: _shard("adamw", top_k=1.5),
        "top_k differs": lambda: _shard("adamw", top_k=0.5 if dist.get_rank() else 0.1),
        "top_k later": lambda: setattr(_shard("adamw")[1], "top_k", 0.5),
        "top_k to nothing": lambda: setattr(_shard("adamw", top_k=0.5)[1], "top_k", 0.0),
    }
    found = {}
    for name, case in cases.items():
        try:
            case()
        except (ConfigError, LocalError) as error:
            found[name] = str(error)
    return found


def tied() -> list[str]:
    """The tables of a model whose sparse embedding is its head, and of one with a weight for two embeddings."""
    head = Clicks()
    head.head = torch.nn.Linear(6, USERS, bias=False)
    head.head.weight = head.users.weight
    twice = Clicks()
    twice.days = torch.nn.Embedding(USERS, 6, sparse=True)
    twice.days.weight = twice.users.weight
    found = []
    for model in (head, twice):
        _, optimizer = shoal.zero.shard(model, make("adamw"), stage=2)
        assert isinstance(optimizer.carrier, FlatEngine)
        found.append(" ".join(optimizer.carrier.tables.of))
        train(model, optimizer, steps=2)
    return found


def lost(where: str) -> None:
    """Rank 1 dies in the middle of an exchange of rows; or in forward, by a row that is not there."""
    model, optimizer = _shard("adamw")
    train(model, optimizer, steps=1)
    if dist.get_rank() == 1 and where == "exchange":
        optimizer.collectives.exchange = lambda *_: die_here()  # type: ignore[method-assign, assignment]
    if dist.get_rank() == 1 and where == "index":
        try:
            model(torch.tensor([USERS]), torch.zeros(1, 3, dtype=torch.long))
        except IndexError:
            die_here()
    train(model, optimizer, steps=1)
