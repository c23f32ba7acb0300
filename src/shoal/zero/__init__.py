"""ZeRO, the zero redundancy optimizer: what training keeps is partitioned instead of repeated.

`laws` says what each stage costs, in memory and in bytes sent, and `estimate` the same for a real model. Names are
loaded on first use: the laws, and with them the command line, do without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shoal.zero.estimate import estimate
    from shoal.zero.laws import ENGINES, Cost, Engine, Precision, costs
else:
    _HOMES = {
        "ENGINES": "laws",
        "Cost": "laws",
        "Engine": "laws",
        "Precision": "laws",
        "costs": "laws",
        "estimate": "estimate",
    }

    # Hidden from type checkers: with it they would take any misspelt name for an object.
    def __getattr__(name):
        from importlib import import_module

        if name not in _HOMES:
            raise AttributeError(f"module 'shoal.zero' has no attribute {name!r}")
        value = getattr(import_module(f"shoal.zero.{_HOMES[name]}"), name)
        globals()[name] = value
        return value

    def __dir__():
        return sorted({*globals(), *_HOMES})


__all__ = ["ENGINES", "Cost", "Engine", "Precision", "costs", "estimate"]
