"""Whether tensors share memory, against the sets of their addresses."""

from __future__ import annotations

from itertools import combinations

import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.compression.memory import overlaps, repeats_itself

DTYPES = (torch.uint8, torch.float16, torch.float32)


@st.composite
def views(draw: st.DrawFn, memory: torch.Tensor) -> torch.Tensor:
    """A view of some of the memory, with any strides."""
    flat = memory.view(draw(st.sampled_from(DTYPES)))
    dims = draw(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), max_size=3))
    reach = sum(max(size - 1, 0) * stride for size, stride in dims)
    start = draw(st.integers(0, flat.numel() - 1 - reach))
    return flat.as_strided([size for size, _ in dims], [stride for _, stride in dims], start)


def addresses(tensor: torch.Tensor) -> list[int]:
    """The addresses of all bytes of a tensor."""
    places = [0]
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        places = [place + stride * index for place in places for index in range(size)]
    start, width = tensor.data_ptr(), tensor.itemsize
    return [start + place * width + byte for place in places for byte in range(width)]


@given(st.data())
def test_tensors_share_memory_if_they_have_an_address_in_common(data: st.DataObject) -> None:
    """For views of any strides and dtypes; some may repeat themselves."""
    memory = torch.zeros(64, dtype=torch.uint8)
    tensors = [data.draw(views(memory)) for _ in range(data.draw(st.integers(1, 5)))]
    sets = [set(addresses(tensor)) for tensor in tensors]
    for tensor, found in zip(tensors, sets, strict=True):
        assert repeats_itself(tensor) == (len(found) < tensor.nbytes)
    pairs = {(one, other) for one, other in combinations(range(len(sets)), 2) if sets[one] & sets[other]}
    assert set(overlaps(tensors)) == pairs
