"""Which transitions of a state machine were taken, beside the table that names them all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import wraps
from types import TracebackType
from typing import Any, Self

Transition = tuple[Enum, str, Enum]


def by_method(machine: Any, method: str, *args: Any) -> str:
    """The method names the event; where it takes all events of a kind, the class of its argument does."""
    return type(args[0]).__name__ if method in ("obey", "handle") else method


class Recorder:
    """Notes the changes of phase of all machines of a class, while it is entered.

    Args:
        machine: the class; it has a property `phase`.
        methods: its methods that take events in.
        event: names the event of a call, before it is carried out: from the machine, the method and its arguments.
        also_same: whether each call is noted, also one after which the phase is the same.
    """

    def __init__(
        self,
        machine: type,
        methods: Sequence[str],
        *,
        event: Callable[..., str] = by_method,
        also_same: bool = False,
    ) -> None:
        self.machine, self.taken = machine, Counter[Transition]()
        self._methods = {name: getattr(machine, name) for name in methods}
        self._event, self._also_same = event, also_same

    def __enter__(self) -> Self:
        for name, method in self._methods.items():
            setattr(self.machine, name, self._noting(name, method))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for name, method in self._methods.items():
            setattr(self.machine, name, method)

    def _noting(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def noting(machine: Any, *args: Any, **kwargs: Any) -> Any:
            before, event = machine.phase, self._event(machine, name, *args)
            result = method(machine, *args, **kwargs)
            if self._also_same or machine.phase is not before:
                self.taken[before, event, machine.phase] += 1
            return result

        return noting

    def check(self, table: Mapping[Any, str]) -> None:
        """Print the table with how often each transition was taken. Fails if one was not, or is not in the table."""
        rows = {**dict.fromkeys(table, 0), **self.taken}
        print(f"{self.machine.__name__}: {len(self.taken)} of {len(table)} transitions visited")
        for (before, event, after), times in rows.items():
            print(f"  {before.name.lower():<10} {event:<16} {after.name.lower():<10} {times:>8,}")
        unknown, missed = set(self.taken) - set(table), set(table) - set(self.taken)
        assert not unknown, f"transitions that the table does not name: {unknown}"
        assert not missed, f"transitions that nothing visits: {missed}"
