"""What a download takes of memory, in processes of their own: one copy at the donor, one at the receiver."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import pytest

from tests.integration.workers import Talk

STATE_BYTES = 96 << 20
ROOM = 0.35
"""Of the state: buffers of three connections, threads, what the allocator keeps. A second copy would be 1."""

PEER = """
import asyncio, sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
import torch
from shoal.base.clock import Env, ThreadExecutor
from shoal.compression import codec_by_name
from shoal.protocol.identity import Identity
from shoal.base.peer import Address
from shoal.rpc import Endpoint
from shoal.state.wire import Donor, SharedState, ShareLimits, StateDonor, download_state
from shoal.transport.tcp import TcpTransport
from shoal.protocol.wire import Contact, GetManifest, ManifestPending

NUMEL, CODEC, DONORS = int(sys.argv[1]) // 4, codec_by_name(sys.argv[2]), sys.argv[3:]

def memory(field):
    return next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if field in line)

async def main(pool):
    torch.set_num_threads(1)
    endpoint = Endpoint(TcpTransport(Identity.ephemeral()), Env(executor=ThreadExecutor(pool)))
    await endpoint.start()
    if not DONORS:
        # One large tensor, that begins at an odd byte, is the hard case: nothing of it can be freed before the end.
        tensors = [torch.tensor([True]), torch.arange(NUMEL) % 2048 * 1.0]

        @asynccontextmanager
        async def hold():
            yield SharedState("state", tensors, [codec_by_name("none"), CODEC])

        # So slow that none of them can be done before another one has begun.
        StateDonor(endpoint, endpoint.env, "run", hold, lambda: 0, limits=ShareLimits(upload_bytes_per_s=50e6))
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    print(endpoint.contact.addresses[0], flush=True)
    if not DONORS:
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    else:
        contacts = [Contact(a.peer_id, (a,)) for a in map(Address.parse, DONORS)]
        donors = [Donor(contact) for contact in contacts]
        for contact in contacts:  # their copies are made, each in its own time
            while isinstance(await endpoint.call(contact, GetManifest("run"), timeout_s=60), ManifestPending):
                pass
        state = await download_state(endpoint, endpoint.env, "run", donors, timeout_s=60)
        peak = memory("VmHWM")
        assert torch.equal(state.tensors[1], torch.arange(NUMEL) % 2048 * 1.0)
        assert len(state.donors) == len(donors), state.donors
    print((peak if DONORS else memory("VmHWM")) - before, flush=True)
    await endpoint.close()

with ThreadPoolExecutor(4) as pool:
    asyncio.run(main(pool))
"""


def peer(codec: str, *donors: str) -> Talk:
    """A donor, or a receiver from these."""
    return Talk([sys.executable, "-c", PEER, str(STATE_BYTES), codec, *donors])


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read from Linux's /proc")
@pytest.mark.parametrize(("codec", "encoded"), [("none", 1.0), pytest.param("float16", 0.5, marks=pytest.mark.long)])
def test_a_download_from_three_donors_takes_one_copy_at_each_end(codec: str, encoded: float) -> None:
    """96 MiB: beyond what it had, a donor holds the encoding once, the receiver the state, and little beside."""
    with contextlib.ExitStack() as stack:
        donors = [stack.enter_context(peer(codec)) for _ in range(3)]
        receiver = stack.enter_context(peer(codec, *(donor.line().strip() for donor in donors)))
        receiver.line()
        received = int(receiver.line()) * 1024 / STATE_BYTES
        given = []
        for donor in donors:
            donor.write("")
            given.append(int(donor.line()) * 1024 / STATE_BYTES)
        assert 0.9 < received < 1 + ROOM, received
        assert all(0.9 * encoded < part < encoded + ROOM for part in given), given
        assert [process.wait() for process in (receiver, *donors)] == [0] * 4
