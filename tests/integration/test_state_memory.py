"""What a download takes of memory, in processes of their own: one copy at the donor, one at the receiver."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

STATE_BYTES = 96 << 20
ROOM = 0.35
"""Of the state: buffers of three connections, threads, what the allocator keeps. A second copy would be 1."""

PEER = """
import asyncio, sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
import torch
from shoal.clock import Env, ThreadExecutor
from shoal.identity import Identity
from shoal.peer import Address
from shoal.rpc import Endpoint
from shoal.state import Donor, SharedState, StateDonor, download_state
from shoal.transport.tcp import TcpTransport
from shoal.wire import Contact

NUMEL = int(sys.argv[1]) // 4

def memory(field):
    return next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if field in line)

async def main(pool):
    torch.set_num_threads(1)
    endpoint = Endpoint(TcpTransport(Identity.ephemeral()), Env(executor=ThreadExecutor(pool)))
    await endpoint.start()
    if len(sys.argv) == 2:
        tensors = [torch.arange(NUMEL // 4, dtype=torch.float32) + i for i in range(4)]

        @asynccontextmanager
        async def hold():
            yield SharedState("state", tensors)

        StateDonor(endpoint, endpoint.env, "run", hold, lambda: 0)
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    print(endpoint.contact.addresses[0], flush=True)
    if len(sys.argv) == 2:
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    else:
        contacts = [Contact(a.peer_id, (a,)) for a in map(Address.parse, sys.argv[2:])]
        donors = [Donor(contact) for contact in contacts]
        state = await download_state(endpoint, endpoint.env, "run", donors, timeout_s=60)
        peak = memory("VmHWM")
        for i, tensor in enumerate(state.tensors):
            assert torch.equal(tensor, torch.arange(NUMEL // 4, dtype=torch.float32) + i)
        assert len(state.donors) == len(donors), state.donors
    print((memory("VmHWM") if len(sys.argv) == 2 else peak) - before, flush=True)
    await endpoint.close()

with ThreadPoolExecutor(4) as pool:
    asyncio.run(main(pool))
"""


def peer(*donors: str) -> subprocess.Popen[str]:
    """A donor, or a receiver from these."""
    command = [sys.executable, "-c", PEER, str(STATE_BYTES), *donors]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def line(process: subprocess.Popen[str]) -> str:
    """What it prints next."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read from Linux's /proc")
def test_a_download_from_three_donors_takes_one_copy_at_each_end() -> None:
    """96 MiB: beyond what it had, no process holds more than one copy, and little beside."""
    donors = [peer() for _ in range(3)]
    receiver: subprocess.Popen[str] | None = None
    try:
        receiver = peer(*(line(donor) for donor in donors))
        line(receiver)
        extra = [int(line(receiver))]
        for donor in donors:
            assert donor.stdin is not None
            donor.stdin.write("\n")
            donor.stdin.flush()
            extra.append(int(line(donor)))
        assert all(0.9 < kib * 1024 / STATE_BYTES < 1 + ROOM for kib in extra), extra
        assert [process.wait(30) for process in (receiver, *donors)] == [0] * 4
    finally:
        for process in filter(None, (receiver, *donors)):
            process.kill()
            process.communicate()
