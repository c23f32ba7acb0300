"""`ShardedOptimizer`: an ordinary torch optimizer whose state, and more, is partitioned over ranks."""

from __future__ import annotations

import contextlib
import math
import sys
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from numbers import Real
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from shoal.base.untraced import untraced
from shoal.errors import ConfigError, LocalError
from shoal.zero.flat.engine import FlatEngine
from shoal.zero.flat.topk import share
from shoal.zero.fsdp.engine import FsdpEngine
from shoal.zero.memory.offload import Offload
from shoal.zero.parameters import UNFROZEN, local, named_parameters, unique_bytes
from shoal.zero.ranks.collectives import Collectives, Traffic
from shoal.zero.ranks.watch import Agreement
from shoal.zero.replicas import Replicas
from shoal.zero.unsharded.changes import begin, check_alike, check_whole, end, is_whole, uninterrupted
from shoal.zero.unsharded.lent import unwatched

__all__ = ["Carrier", "Memory", "ShardedOptimizer", "described"]

_TORCHS_STATES = "torch.distributed.checkpoint.state_dict"
_STATE_HOOKS = tuple(
    f"_optimizer_{which}_{when}_hooks" for which in ("state_dict", "load_state_dict") for when in ("pre", "post")
)
"""The attributes of an optimizer that have the hooks of its state dictionaries."""
_PLAIN = (bool, int, float, str, tuple, list, type(None))
"""Settings that are the same text wherever they are the same."""


class Memory(NamedTuple):
    """The memory that this rank holds, in bytes (padding included), each storage counted once.

    Offloaded memory counts in `offloaded` alone. Up to three windows of it come on top in a step
    (`shoal.zero.memory.offload`).

    Attributes:
        parameters: the parameters of the model, frozen ones too.
        gradients: gradients of all kinds; what `top_k` has not sent yet, too.
        state: the state of the optimizer, and its float32 copies of the parameters.
        messages: for messages under way, kept from one step to the next: about four buckets. In stage 1 little, as
            places of gradients serve for it; two buckets at most, where all of them are full (behind `no_sync`). The
            laws leave it out.
        offloaded: gradients, state and copies (stage 3: shards) that are in files, or on the CPU beside a device.
    """

    parameters: int
    gradients: int
    state: int
    messages: int
    offloaded: int = 0

    @property
    def total(self) -> int:
        """All but what is offloaded."""
        return sum(self) - self.offloaded


Carrier = FlatEngine | FsdpEngine
"""The engine that partitions a model: for stages 1 and 2, or FSDP2 for stage 3."""


class ShardedOptimizer(torch.optim.Optimizer):
    """Made by `shoal.zero.shard`. Call `step` and `zero_grad` as with any optimizer, on all ranks.

    Its `param_groups` hold this rank's part; learning rates and all other options in them are the user's, and
    schedulers work on it. Gradients are clipped with `clip_grad_norm_` of this object: torch's own sees those of one
    rank.

    Args:
        model: the trained model.
        inner: steps this rank's part.
        carrier: partitions the model.
        collectives: among the ranks.
        offload: where state and more is kept.
        listed: names of the parameters that the user gave to each group, whichever rank keeps them.
        skip_nonfinite: leave out a step, on all ranks, if a gradient of any rank is infinite or not a number.
        irregular: statistics that the inner optimizer keeps of a whole parameter, in another shape.
        replicas: the ranks that keep the same share; None if there is one copy.

    Attributes:
        reduction: the part of the carrier that has the gradients.
        names: those of `listed` that are trained.
        skipped: how many steps were left out.
        lent: what the model is lent to, and cannot be trained meanwhile, such as "within average_parameters()"; empty
            otherwise.
    """

    def __init__(  # noqa: PLR0913 (`shard` alone calls it)
        self,
        model: torch.nn.Module,
        inner: torch.optim.Optimizer,
        carrier: Carrier,
        collectives: Collectives,
        offload: Offload,
        listed: list[list[str]],
        *,
        skip_nonfinite: bool = True,
        irregular: Collection[str] = (),
        replicas: Replicas | None = None,
    ) -> None:
        # A rank may own nothing of a group, or of any.
        self.inner, self.carrier, self.skipped, self.lent = inner, carrier, 0, ""
        self.reduction = carrier.reduction
        trained = {name for name, each in named_parameters(model) if each.requires_grad}
        self.collectives, self.offload = collectives, offload
        self.listed, self.irregular = listed, irregular
        self.replicas = replicas
        self.names = [[name for name in group if name in trained] for group in listed]
        self._trainable = carrier.trainable([name for group in listed for name in group])
        self._model, self._skip_nonfinite = model, skip_nonfinite
        super().__init__([{"params": [torch.zeros((), dtype=torch.float32, device="cpu")]}], dict(inner.defaults))
        # Both optimizers show the same groups and statistics: schedulers and trainers hold on to either one.
        self.param_groups, self.state = inner.param_groups, inner.state
        for kind in _STATE_HOOKS:  # the inner optimizer runs them
            setattr(self, kind, getattr(inner, kind))

    def check_model(self, model: object, *, to_change: bool = False) -> None:
        """Raise `ConfigError` unless this is the model that it trains.

        Args:
            model: any object.
            to_change: it is about to be changed: raise `LocalError` if it is lent.
        """
        if model is not self._model:
            raise ConfigError(
                f"model must be the one that shard() returned with this optimizer, got another {type(model).__name__}: "
                "give the model itself where a wrapper is around it, such as that of torch.compile"
            )
        if to_change and self.lent:
            raise LocalError(f"the model cannot be changed {self.lent}: leave that block first")

    @property
    def whole(self) -> bool:
        """Whether no change of the weights was interrupted in its middle since the last `load`."""
        return is_whole(self._model)

    def check_whole(self) -> None:
        """Raise `LocalError` if one was."""
        check_whole(self._model)

    # ------------------------------------------------------------------------------------------------------- training

    @untraced
    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes within this block add up gradients on each rank alone, and send nothing.

        For all micro-batches of a step but the last one. Until that, every rank holds all gradients.
        """
        return self.reduction.no_sync()

    @untraced
    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT002 (torch's signature)
        """Let go of all gradients; `model.zero_grad()` does the same.

        Args:
            set_to_none: False sets those that there are to zeros: the next step moves these parameters by momentum and
                weight decay, also if they get no gradient until then.
        """
        self.reduction.zero_grad(set_to_none=set_to_none)

    @untraced
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale gradients, so that together, over all ranks' shares, their norm is at most `max_norm`.

        Those of all parameters that the optimizer lists; others do not count.

        Args:
            max_norm: above 0.
            norm_type: the p of the p-norm; may be infinite.

        Returns:
            The norm before, the same on all ranks.

        Raises:
            LocalError: nothing was reduced yet (`no_sync`): on all ranks.
            ConfigError: an argument is out of its range, or ranks give different ones, or have not cleared the same
                gradients: on all ranks.
        """
        limit, kind, written, problem = math.nan, math.nan, 0, None
        try:
            limit, kind = _above_0("max_norm", max_norm), _above_0("norm_type", norm_type)
            self.reduction.gradients()  # raises if there are none to clip yet
            written = self.carrier.written()
        except (ConfigError, LocalError) as error:
            problem = error
        self._meet("clip", problem, [f"max_norm={limit} norm_type={kind}", *self._passes()], written)
        gradients = [each for each in self._settle() if each.numel()]  # of few rows a rank may have none
        norm = self._norm(gradients, kind)
        factor = (limit / (norm + 1e-6)).clamp(max=1.0)
        with self._reading():
            for part in self.offload.in_turns(gradients, written=True):
                for gradient in part:
                    gradient.mul_(factor.to(gradient.device, gradient.dtype))
        if self.replicas is not None:
            self.replicas.seal(gradients, self.reduction.reduced())
        return norm

    def _reading(self) -> AbstractContextManager[None]:
        """If this rank cannot read or write its files in this block, all raise at its end."""
        return contextlib.nullcontext() if self.offload.folder is None else self.agreement.together()

    def _norm(self, gradients: Sequence[torch.Tensor], kind: float) -> torch.Tensor:
        # The same dtype on all ranks, also where one has no gradients, whatever the program's default is.
        double = any(each.dtype == torch.float64 for each in self._model.parameters())
        total = torch.zeros((), dtype=torch.float64 if double else torch.float32, device=self._device)
        norms: list[torch.Tensor] = []
        with self._reading():
            for part in self.offload.in_turns(gradients):
                wide = [each.float() if each.itemsize < torch.float32.itemsize else each for each in part]
                norms += [each.to(total) for each in torch._foreach_norm(wide, kind)]  # noqa: SLF001 (as torch does it)
        if norms:
            total = torch.linalg.vector_norm(torch.stack(norms), kind)
        if math.isinf(kind):
            self._all_reduce(total, dist.ReduceOp.MAX, self.collectives.group)
            return total
        total = total**kind
        self._all_reduce(total, group=self.collectives.group)
        return total ** (1.0 / kind)

    @untraced
    def step(self, closure: Callable[[], float] | None = None, **options: Any) -> float | None:  # type: ignore[override]
        """Step this rank's part; afterwards all ranks have all new parameters (stage 3: their shares).

        Args:
            closure: computes the loss again, and its gradients.
            options: for the `step` of the inner optimizer, the same on all ranks.

        Returns:
            The result of the closure.

        Raises:
            LocalError: the last backward pass was within `no_sync`, or the model or its gradients were changed in a
                way that cannot be carried: on all ranks.
            ConfigError: ranks have other learning rates or other settings of groups, or have not cleared the same
                gradients; or the inner optimizer of another rank has raised: on all ranks.
            RankLost: a rank is gone.
        """
        loss = None
        if closure is not None:
            if not callable(closure):
                raise ConfigError(f"closure must be a function that computes the loss, or None, got {closure!r:.80}")
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            finite, used = self._agree(options)
            if finite or not self._skip_nonfinite:
                self._settle()
                self.carrier.hand_over(used, self.inner)
                self._step_inner(options)
                self.collectives.traffic.steps += 1
            else:
                self.skipped += 1
        return loss

    def _step_inner(self, options: Mapping[str, Any]) -> None:
        """All ranks have the same parameters afterwards.

        Also if the inner optimizer of one has raised, or was interrupted: all raise then.
        """
        problem: BaseException | None = None
        begin(self._model)
        try:
            with closing(self.offload.windows(self.inner)) as windows:
                for stepped in windows:
                    self.carrier.adopt(stepped)
                    try:
                        with unwatched():
                            self.inner.step(**options)
                    finally:
                        self.carrier.write_out(stepped)
        except BaseException as error:  # noqa: BLE001 (also an interrupt: raised again below)
            problem = error
        with uninterrupted():
            self.carrier.publish()
            end(self._model)
            failed = torch.tensor(problem is not None, dtype=torch.int32, device=self._device)
            self._all_reduce(failed, dist.ReduceOp.MAX)
            if failed:
                with self.agreement.together():
                    if problem is not None:
                        raise problem

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """The weights of this rank change in this block; behind it all ranks get them."""
        with uninterrupted():
            begin(self._model)
            yield
            self.carrier.write_out()
            self.carrier.publish()
            end(self._model)

    def join(self, *_: object, **__: object) -> NoReturn:
        """Not possible: raises `LocalError`."""
        raise LocalError(
            "uneven inputs (join) cannot be carried: gradients are reduced while each backward pass goes on, so all "
            "ranks must run the same number of them. Leave out what is over (drop_last=True of the sampler), or let a "
            "rank without a batch compute the loss of an old one, times 0"
        )

    join_hook = join  # torch.distributed.algorithms.Join asks for it

    @property
    def top_k(self) -> float | None:
        """The share of each tile's gradient that is sent in a step; None for all of it. It may be set between steps.

        Raises:
            ConfigError: it is set to no share.
            LocalError: it is set, and `shard` was called without it.
        """
        return None if self.carrier.fraction is None else self.carrier.fraction.value

    @top_k.setter
    def top_k(self, value: float) -> None:
        if self.carrier.fraction is None:
            raise LocalError("top_k can be changed only where shard() was called with one")
        self.carrier.fraction.value = share(value)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """The attribute by which torch's GradScaler decides, from this rank's gradients alone, whether to step."""
        if not self._steps_shards:
            raise LocalError(
                "a GradScaler cannot be used in stages 1 and 2, where each rank would decide for itself whether it "
                "steps: leave it out, bfloat16 and float32 need none"
            )
        return False  # of sharded tensors it finds the same on all ranks

    @property
    def _steps_shards(self) -> bool:
        """Whether it steps whole parameters, in shards, as torch names their state."""
        return any(isinstance(each, DTensor) for group in self.param_groups for each in group["params"])

    def _agree(self, options: Mapping[str, Any]) -> tuple[bool, list[bool]]:
        """Whether the gradients of all ranks are finite; and for each parameter whether any rank got one.

        One all-reduce, which also tells whether a rank cannot step, and whether all have the same settings.
        """
        problem, finite, written = None, True, 0
        try:
            self.check_model(self._model, to_change=True)
            self.check_whole()
            self.carrier.check()
            self._check_unfrozen()
            finite, written = self.reduction.finite(), self.carrier.written()
        except LocalError as error:
            problem = error
        lines = [*self._passes(), described([*self.param_groups, options])] if problem is None else []
        infinite, *used = self._meet("step", problem, lines, written, [not finite, *self.reduction.used()])
        return not infinite, list(map(bool, used))

    def _check_unfrozen(self) -> None:
        """Raise `LocalError` if a parameter has gradients now, and no optimizer steps it."""
        for name, each in named_parameters(self._model):
            if each.requires_grad and name not in self._trainable:
                raise LocalError(UNFROZEN.format(name))

    def _passes(self) -> list[str]:
        """The number of backward passes whose gradients each parameter has: a line for each."""
        return [f"gradients of {count} passes for {name}" for name, count in self.reduction.reduced().items()]

    def _meet(
        self,
        what: str,
        problem: Exception | None,
        lines: Sequence[str],
        written: int,
        flags: Sequence[bool] | None = None,
    ) -> list[int]:
        """All ranks do the same, or all raise: if one has a problem, or is at something else, or lines are not alike.

        Args:
            what: they are about to do.
            problem: of this rank: a `ConfigError` or a `LocalError`.
            lines: what must be the same on all ranks.
            written: of the carrier: the same on all ranks, if programs have changed weights alike.
            flags: of this rank, one more than parameters, whatever they are about to do; None for no flag.

        Returns:
            For each flag whether any rank has set it.
        """
        known = "\n".join([f"the sharded model number {self.collectives.model}", f"to {what}", *lines])
        number = zlib.crc32(f"{known}\n{written}".encode())
        refused = 0 if problem is None else 1 + isinstance(problem, ConfigError)
        if flags is None:
            flags = [False] * (1 + len(self.reduction.used()))
        found = torch.tensor([refused, number, -number, *flags], dtype=torch.int64, device=self._device)
        self._all_reduce(found, dist.ReduceOp.MAX)
        refused, most, least, *told = found.tolist()
        if refused:
            texts = self.agreement.gather("" if problem is None else f"{type(problem).__name__}: {problem}")
            if problem is not None:
                raise problem
            said = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text)
            raise (ConfigError if refused > 1 else LocalError)(f"another rank cannot {what}: {said}")
        if most != -least:
            self.agreement.alike(known, "settings, and clear the same gradients; decide on them by what all ranks know")
            check_alike(self.agreement, self.carrier.writes())
        return told

    def check_written(self, written: int) -> None:
        """Raise `ConfigError` on all ranks if programs have changed weights otherwise on some.

        Args:
            written: that of the carrier.
        """
        if len(set(self.agreement.gather(str(written)))) > 1:
            check_alike(self.agreement, self.carrier.writes())

    @property
    def agreement(self) -> Agreement:
        """Among all ranks."""
        return Agreement(self.collectives.everyone, self.collectives.watch)

    def _settle(self) -> list[torch.Tensor]:
        """The gradients of this rank's part, equal on all replicas."""
        listed = [each.grad for group in self.param_groups for each in group["params"] if each.grad is not None]
        if self.replicas is not None:
            self.replicas.settle(listed, self.reduction.reduced())
        return [local(each) for each in listed]

    def _all_reduce(
        self, tensor: torch.Tensor, operation: Any = dist.ReduceOp.SUM, group: dist.ProcessGroup | None = None
    ) -> None:
        watch = self.collectives.watch
        with watch.named(watch.turn("an all-reduce")):
            dist.all_reduce(tensor, operation, group=group or self.collectives.everyone)

    @property
    def _device(self) -> torch.device:
        return self.collectives.device

    # ------------------------------------------------------------------------------------------------------- counters

    def memory(self) -> Memory:
        """The memory that this rank holds now. The laws of `shoal.zero.plan.laws` predict it."""
        parameters = list(self._model.parameters())
        kept, copies = self.carrier.kept()
        gradients = [*(each.grad for each in parameters if each.grad is not None), *kept]
        state = [*copies, *(each for each in tree_leaves(list(self.state.values())) if isinstance(each, torch.Tensor))]
        resident = [
            unique_bytes(each for each in kind if not self.offload.holds(each))
            for kind in (parameters, gradients, state)
        ]
        offloaded = unique_bytes(each for each in (*parameters, *gradients, *state) if self.offload.holds(each))
        return Memory(resident[0], resident[1], resident[2], self.collectives.scratch.nbytes, offloaded)

    def traffic(self) -> Traffic:
        """The bytes of tensors that this rank has sent since sharding, without the headers of messages."""
        now = self.collectives.traffic
        among = Traffic() if self.replicas is None else self.replicas.collectives.traffic
        return Traffic(now.reduced + among.sent, now.gathered, now.steps)

    # ---------------------------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """The part of this rank, for the same rank of a group that is sharded alike; `shoal.zero.save` writes all.

        Its ``share`` names the rank and the model that it belongs to.

        Raises:
            ConfigError: `torch.distributed.checkpoint` asks for it, in stages 1 and 2.
        """
        self._check_caller()
        return {**self.inner.state_dict(), "share": self.share(), "residuals": dict(self.carrier.residuals())}

    def share(self) -> dict[str, Any]:
        tiles = [[*own.tile] for own in self.carrier.own_tiles()]
        return {"rank": self.collectives.rank, "ranks": self.collectives.ranks, "groups": self.listed, "pieces": tiles}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of `state_dict` of this rank.

        Raises:
            ConfigError: it is of another rank or of another sharding, or does not fit.
        """
        self._check_caller()
        if not isinstance(state_dict, Mapping):
            raise ConfigError(f"state_dict must be the result of state_dict(), got a {type(state_dict).__name__}")
        here, there = self.share(), state_dict.get("share")
        if there != here:
            of = "an optimizer that is not sharded"
            if isinstance(there, Mapping) and {"rank", "ranks"} <= there.keys():
                of = f"rank {there['rank']} of {there['ranks']}"
            raise ConfigError(
                f"state_dict is that of {of}, or of another model or groups, and this is rank {here['rank']} of "
                f"{here['ranks']}: each rank can load what it saved itself. shoal.zero.save() and load() carry the "
                "state of all ranks, to any number of them"
            )
        if missing := [key for key in ("state", "param_groups", "residuals") if key not in state_dict]:
            raise ConfigError(f"state_dict lacks {missing[0]!r}: give the result of state_dict() as it was")
        self.inner.load_state_dict(state_dict)
        self.offload.settle(self.inner)
        for name, kept in self.carrier.residuals().items():
            kept.copy_(state_dict["residuals"][name])
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    def _check_caller(self) -> None:
        """Raise `ConfigError` if the method's caller is torch's helper, which would end in a KeyError."""
        caller = sys._getframe(2).f_globals.get("__name__")  # noqa: SLF001 (it does not say so in any other way)
        if caller == _TORCHS_STATES and not self._steps_shards:
            raise ConfigError(
                f"{_TORCHS_STATES} names an optimizer's state by whole parameters, and in stages 1 and 2 a rank has "
                "pieces of them: save with shoal.zero.save(path, model, optimizer) and load() (consolidated=True for "
                "plain torch), or use stage 3"
            )

    def __getstate__(self) -> NoReturn:
        """It cannot be copied or pickled: raises `LocalError`."""
        raise LocalError(
            "a sharded optimizer is copied or pickled (copy.deepcopy, torch.save), and it is a part of the ranks' "
            "training: save with shoal.zero.save(path, model, optimizer), or this rank's part by its state_dict()"
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Not possible any more: raises `LocalError`."""
        if "inner" in self.__dict__ and "state" in self.__dict__ and self.param_groups:
            raise LocalError("parameters cannot be added to an optimizer that is sharded: give all groups to shard()")
        super().add_param_group(param_group)


def _above_0(name: str, value: object) -> float:
    """A number above 0, or a tensor of one; may be infinite. Raises `ConfigError` for anything else."""
    number = math.nan
    if isinstance(value, Real | torch.Tensor) and not isinstance(value, bool):
        with contextlib.suppress(RuntimeError, TypeError, ValueError):  # tensors of several values, or of none
            number = float(value)
    if not number > 0:
        raise ConfigError(f"{name} must be a number above 0, got {value!r:.80}")
    return number


def check_sharded(optimizer: object) -> None:
    """Raise `ConfigError` unless it is a sharded optimizer."""
    if not isinstance(optimizer, ShardedOptimizer):
        raise ConfigError(f"optimizer must be the one that shard() returned, got a {type(optimizer).__name__}")


def described(groups: Sequence[Mapping[str, Any]]) -> str:
    """The settings of parameter groups, as far as ranks must have them in common: a line for each."""
    lines = []
    for number, group in enumerate(groups):
        for key, value in group.items():
            known = value.item() if isinstance(value, torch.Tensor) and value.is_cpu and not value.ndim else value
            if key != "params" and isinstance(known, _PLAIN):
                lines.append(f"group {number} {key}={known}")
    return "\n".join(lines)
