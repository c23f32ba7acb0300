"""ZeRO, the zero redundancy optimizer: what training keeps is partitioned instead of repeated.

`laws` says what each stage costs, in memory and in bytes sent. No module here is loaded before its names are used.
"""

from shoal.zero.laws import ENGINES, Cost, Engine, Precision, costs

__all__ = ["ENGINES", "Cost", "Engine", "Precision", "costs"]
