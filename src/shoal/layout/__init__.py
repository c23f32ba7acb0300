"""The layout of values: named tensors are cut into tiles, and each tile has one owner.

`tiles` cuts, and says who owns what; `vector` does so for a list of tensors that are averaged as one; `balance` says
how much of it each owner is to have; `order` says in which order the values of a tensor are counted.
"""

from shoal.layout.balancing import alike, balance, cost, is_slower
from shoal.layout.order import Order, Scattered, flat, like, order_of, shaped
from shoal.layout.tiles import Tile, Tiling, assign, assign_whole, cut, divide_whole, tile_numel
from shoal.layout.vector import MAX_TENSORS, Segment, TensorSpec, VectorLayout

__all__ = [
    "MAX_TENSORS",
    "Order",
    "Scattered",
    "Segment",
    "TensorSpec",
    "Tile",
    "Tiling",
    "VectorLayout",
    "alike",
    "assign",
    "assign_whole",
    "balance",
    "cost",
    "cut",
    "divide_whole",
    "flat",
    "is_slower",
    "like",
    "order_of",
    "shaped",
    "tile_numel",
]
