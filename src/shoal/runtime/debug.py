"""Tells others what happened here: the same user on this machine through a socket, other peers by a call.

- *This machine* (Linux): an abstract Unix socket, `@shoal/PID/PEERID`. It has no file, so nothing is left of it however
  the process ends. The kernel names the user that connects: only our own user and root get an answer.
- *Other peers*: the call `GetTrace`. Every peer that was invited into the network may ask. It is told peers, times and
  reasons, which its own events would tell it too, but no text of a warning. All other peers together get one answer a
  second.

`docs/why/decisions/0008-who-may-see-a-trace.md` has the reasons. Both run in the loop, which is free while a step waits
or the program computes.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import sys
from contextlib import suppress

from shoal.base.clock import seconds_text
from shoal.base.peer import PeerID
from shoal.errors import LocalError, PeerRefused
from shoal.events import Warned
from shoal.protocol.wire import GetTrace, Trace, decode, encode
from shoal.rpc import Endpoint
from shoal.rpc.recorder import FlightRecorder, for_strangers, within
from shoal.transport.sockets import accept, open_sockets

__all__ = ["DebugService", "read_local"]

_ANSWER_BYTES = 512 << 10
"""The longest answer to another machine. An answer to this machine may hold everything."""

_MAX_LOCAL_BYTES = 64 << 20
_PAUSE_S = 1.0
"""The shortest time between two answers to other machines."""

_SEND_S = 5.0
_CREDENTIALS = struct.Struct("3i")
_NAMES = "/proc/net/unix"


class DebugService:
    """Gives the recorder's content to everybody who may have it. Loop only.

    Args:
        recorder: the recorder of this peer.
        peer: this peer.
    """

    def __init__(self, recorder: FlightRecorder, peer: PeerID) -> None:
        self._recorder, self._peer = recorder, peer
        self._listening: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._sending: set[asyncio.Task[None]] = set()
        self._free_at = 0.0

    def listen(self) -> None:
        """Begin to answer this machine, if its system allows that."""
        if not sys.platform.startswith("linux"):
            return
        self._listening = listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        open_sockets.add(listening)  # closed in a forked child, so that its name ends with this process
        listening.setblocking(False)
        listening.bind(_name(os.getpid(), str(self._peer)))
        listening.listen(8)
        self._accepting = asyncio.get_running_loop().create_task(self._accept(listening))

    def serve(self, endpoint: Endpoint) -> None:
        """Begin to answer other peers."""
        endpoint.serve(GetTrace, self._answer)

    async def _answer(self, peer: PeerID, request: GetTrace) -> Trace:
        now = asyncio.get_running_loop().time()
        if now < self._free_at:
            raise PeerRefused("somebody has asked within the last second: ask again", peer, code="busy")
        self._free_at = now + _PAUSE_S
        return within(for_strangers(self._recorder.dump(request.last)), _ANSWER_BYTES)

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                asking, _ = await accept(listening)
            except OSError:  # out of descriptors: others will end
                await asyncio.sleep(_PAUSE_S)
                continue
            task = loop.create_task(self._tell(asking))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)

    async def _tell(self, asking: socket.socket) -> None:
        open_sockets.add(asking)
        with asking:
            asking.setblocking(False)
            if user_of(asking) in (os.getuid(), 0):
                with suppress(OSError, TimeoutError):  # the asker has gone
                    async with asyncio.timeout(_SEND_S):
                        await asyncio.get_running_loop().sock_sendall(asking, encode(self._recorder.dump()))

    async def close(self) -> None:
        """Stop answering. Safe to call twice."""
        tasks = [task for task in (self._accepting, *self._sending) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._listening is not None:
            self._listening.close()
        self._recorder.stop()


def warning_of(error: OSError) -> Warned:
    """The warning for the bus when this machine cannot be answered."""
    return Warned(where="debug", message=f"`shoal debug dump PID` will not work: {error.strerror or error}")


def user_of(connected: socket.socket) -> int:
    """The user at the other end of a Unix socket, by the word of the kernel."""
    raw = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user: int = _CREDENTIALS.unpack(raw)[1]
    return user


def _name(pid: int, peer: str) -> str:
    return f"\0shoal/{pid}/{peer}"


def read_local(pid: int, *, timeout_s: float = 5.0) -> list[Trace]:
    """The content of the recorders of a process on this machine, one for each of its peers.

    Args:
        pid: the process.
        timeout_s: the longest wait for each recorder, seconds.

    Raises:
        LocalError: this is not Linux; or no such process runs shoal, it is another user's, or it does not answer.
    """
    if not sys.platform.startswith("linux"):
        raise LocalError("a process can be asked by its number only on Linux: ask by an invite or an address instead")
    prefix = f"@shoal/{pid}/"
    with open(_NAMES, encoding="utf-8", errors="replace") as lines:  # noqa: PTH123 (a file of the kernel, line by line)
        found = {line.split()[-1] for line in lines if line.split()[-1].startswith(prefix)}
    if not found:
        raise LocalError(f"no process {pid} on this machine runs shoal: is the number right? (or ask by an invite)")
    return [_read_one(pid, name.removeprefix(prefix), timeout_s) for name in sorted(found)]


def _read_one(pid: int, peer: str, timeout_s: float) -> Trace:
    received = bytearray()
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
            asking.settimeout(timeout_s)
            asking.connect(_name(pid, peer))
            if user_of(asking) not in (os.getuid(), 0) and os.getuid() != 0:
                raise LocalError(f"process {pid} is another user's: an answer in its name is not believed")
            while piece := asking.recv(1 << 16):
                received += piece
                if len(received) > _MAX_LOCAL_BYTES:
                    raise LocalError(f"process {pid} answers without end: is it another program?")
    except TimeoutError:
        late = f"process {pid} does not answer within {seconds_text(timeout_s)}: it is stopped, or hangs"
        raise LocalError(late) from None
    except OSError as error:
        raise LocalError(f"process {pid} could not be asked: {error.strerror or error}") from error
    if not received:
        raise LocalError(f"process {pid} did not answer: it is another user's")
    return decode(received, Trace)
