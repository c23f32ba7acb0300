"""Saved tensors in files: every kind of tensor that autograd saves comes back as it was."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import shoal.zero
from shoal.errors import ConfigError
from tests.limits import files_up_to


def gradients(context: contextlib.AbstractContextManager[object]) -> list[torch.Tensor | None]:
    """Of operations that save views, masks, integers, empty, sparse, expanded, complex and narrow tensors."""
    torch.manual_seed(0)
    one, two, table = (torch.randn(5, 5, requires_grad=True) for _ in range(3))
    with context:
        found = [
            (one.t() @ two).relu(),
            torch.nn.functional.dropout(two, 0.5),
            torch.nn.functional.embedding(torch.tensor([1, 4, 1]), table).square(),
            table[:0] * table[:0],
            one.sum() * one.sum(),
            torch.where(one > 0, one * one, two),
            one.bfloat16() * two.bfloat16(),
            one[:, ::2] * one[:, ::2],
            one.expand(3, 5, 5) * two.expand(3, 5, 5),
            (torch.complex(one, two).conj() * torch.complex(two, one)).real,
            torch.sparse.mm(torch.eye(5).to_sparse(), table),
        ]
        loss = torch.stack([each.float().sum() for each in found]).sum()
    torch.autograd.backward(loss)
    return [one.grad, two.grad, table.grad]


def test_gradients_are_the_same(tmp_path: Path) -> None:
    """To the bit; and no file stays in the folder, not even while the tensors are there."""
    plain = gradients(contextlib.nullcontext())
    found = gradients(shoal.zero.save_on_disk(tmp_path))
    assert all(a is not None and b is not None and torch.equal(a, b) for a, b in zip(plain, found, strict=True))
    with shoal.zero.save_on_disk(str(tmp_path)):
        kept = torch.ones(3, requires_grad=True).exp()
    assert not list(tmp_path.iterdir())
    torch.autograd.backward(kept.sum())


MEMORY = """
import re, sys, torch, shoal.zero
def resident():
    return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) // 1024
hidden = torch.ones(4, 1 << 18, requires_grad=True)
before = resident()
with shoal.zero.save_on_disk(sys.argv[1]):
    for _ in range(20):
        hidden = hidden.tanh() * 1.01
print(resident() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks Linux for the memory of the process")
def test_memory_does_not_grow_with_what_is_saved(tmp_path: Path) -> None:
    """20 tensors of 4 MiB are saved; two are there at a time. glibc must be told to give freed memory back."""
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path)],
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"},
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert int(done.stdout) < 20


def test_a_disk_without_room(tmp_path: Path) -> None:
    """An error where the tensor is saved, not a signal where it is written."""
    large = torch.ones(1000, requires_grad=True)
    with pytest.raises(OSError, match="File too large"), files_up_to(1000), shoal.zero.save_on_disk(tmp_path):
        large.exp()
    assert not list(tmp_path.iterdir())


def test_no_folder(tmp_path: Path) -> None:
    """Said before anything is saved."""
    with pytest.raises(ConfigError, match="folder must be a folder that exists"):
        shoal.zero.save_on_disk(tmp_path / "missing")
