"""The settings of `shoal run`, for the `shoal.DHT` and the `shoal.Optimizer` of the program that it starts.

The program runs in the process of `shoal run`. The constructors of the two classes ask here for each argument that the
program leaves out. What the program gives itself stays, and a warning names the setting that has no effect. Without
`shoal run` nothing happens here. Processes that the program starts, and forks of it, are given nothing: they would have
the same identity and the same files.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

from shoal.base.warning_names import named
from shoal.runtime.places import filled_in

__all__ = ["Launch", "Setting", "launch", "launched"]

C = TypeVar("C", bound=Callable[..., None])

_logger = logging.getLogger("shoal.run")


class _Living(Protocol):
    def is_alive(self) -> bool: ...


@dataclass(frozen=True)
class Setting:
    """One setting.

    Attributes:
        owner: the class that it is for: `"DHT"` or `"Optimizer"`.
        argument: of its constructor.
        value: of that argument.
        origin: where the user gave it, such as `--identity`.
        needs: another argument of the constructor, without which this one has no meaning; empty if there is none.
    """

    owner: str
    argument: str
    value: Any
    origin: str
    needs: str = ""

    def instead_of(self, own: Any) -> Any:
        """The value that the argument gets, where the program itself gives it `own`; None if that stays."""
        if self.argument == "host_maddrs":
            return filled_in(own, self.value)
        # A program that hands on its own arguments, and was given none, gives an empty list of peers.
        return self.value if own is None or own == [] else None


class Launch:
    """The settings of one program. They go to the first object of each class, and to a later one when that has ended.

    Args:
        settings: for the program.

    Attributes:
        made: for each class the living objects that the program has made.
    """

    def __init__(self, settings: Sequence[Setting]) -> None:
        self._settings = settings
        self._pid = os.getpid()
        self._first: dict[str, weakref.ref[Any]] = {}
        self.made: dict[str, weakref.WeakSet[Any]] = {"DHT": weakref.WeakSet(), "Optimizer": weakref.WeakSet()}
        self._on_made: Callable[[str, Any], None] = lambda _, __: None

    @property
    def is_here(self) -> bool:
        """Whether this process is the program itself, and no fork of it."""
        return os.getpid() == self._pid

    def unused(self) -> list[Setting]:
        """The settings for a class of which the program has made no object so far."""
        return [each for each in self._settings if each.owner not in self._first]

    def fill(self, owner: str, arguments: dict[str, Any]) -> None:
        """Add the settings of a class to the arguments that the program gives its constructor."""
        settings = [each for each in self._settings if each.owner == owner]
        if not settings:
            return
        first = self._first.get(owner, lambda: None)()
        if first is not None and first.is_alive():
            _logger.warning(
                named(
                    "this program has two of shoal.%s: only the first one gets the settings of `shoal run`. Give the "
                    "second one its arguments in the program"
                ),
                owner,
            )
            return
        for setting in settings:
            if setting.needs and arguments.get(setting.needs) is None:
                # An option is wrong, not the program: its traceback would say nothing of that.
                other = f"--{setting.needs}, or a program that gives shoal.{owner} {setting.needs}="
                raise SystemExit(f"shoal run: {setting.origin} needs {other}")
            own = arguments.get(setting.argument)
            if (value := setting.instead_of(own)) is not None:
                arguments[setting.argument] = value
                _logger.info("shoal.%s: %s=%r, by %s", owner, setting.argument, value, setting.origin)
            else:
                _logger.warning(
                    named("%s has no effect: the program itself gives shoal.%s %s=%.80r. Leave one of the two out"),
                    setting.origin,
                    owner,
                    setting.argument,
                    own,
                )

    def when_made(self, call: Callable[[str, Any], None]) -> None:
        """Call this with the class and each new object from now on."""
        self._on_made = call

    def has_made(self, owner: str, new: _Living) -> None:
        """The program has made this object."""
        first = self._first.get(owner, lambda: None)()
        if first is None or not first.is_alive():
            self._first[owner] = weakref.ref(new)
        self.made[owner].add(new)
        self._on_made(owner, new)


_launch: Launch | None = None


def launch(settings: Sequence[Setting]) -> Launch:
    """Let these settings hold in this process from now on."""
    global _launch  # noqa: PLW0603 (one program in one process)
    _launch = Launch(settings)
    return _launch


def launched(owner: str) -> Callable[[C], C]:
    """A decorator for the constructor of a class: `shoal run` gives it what the program leaves out."""

    def decorate(construct: C) -> C:
        signature = inspect.signature(construct)

        @functools.wraps(construct)
        def filled(self: _Living, /, *args: Any, **kwargs: Any) -> None:
            current = _launch
            if current is None or not current.is_here:
                construct(self, *args, **kwargs)
                return
            try:
                bound = signature.bind(self, *args, **kwargs)
            except TypeError:
                construct(self, *args, **kwargs)  # which raises it again, as it does without `shoal run`
                raise
            current.fill(owner, bound.arguments)
            construct(*bound.args, **bound.kwargs)
            current.has_made(owner, self)

        return cast("C", filled)

    return decorate
