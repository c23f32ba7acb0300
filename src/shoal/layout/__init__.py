"""The layout of values: named tensors are cut into tiles, and each tile has one owner.

`tiles` cuts, and says who owns what; `order` says in which order the values of a tensor are counted.
"""

from shoal.layout.order import Order, Scattered, flat, like, order_of, shaped
from shoal.layout.tiles import Tile, Tiling, assign, assign_whole, cut, divide_whole, tile_numel

__all__ = [
    "Order",
    "Scattered",
    "Tile",
    "Tiling",
    "assign",
    "assign_whole",
    "cut",
    "divide_whole",
    "flat",
    "like",
    "order_of",
    "shaped",
    "tile_numel",
]
