"""One peer that asked us to lead it: its stream, from `Join` until it is refused, leaves, or its group is released."""

from __future__ import annotations

import asyncio

from shoal.errors import PeerError
from shoal.matchmaking.group import ControlStream
from shoal.wire import Begin, JoinAccepted, JoinRedirected, JoinRefused, Member

__all__ = ["Inbound"]

_Answer = JoinAccepted | JoinRefused | JoinRedirected | Begin


class Inbound:
    """Answers leave in the order in which they were posted; the stream is watched without taking from it.

    Args:
        stream: the accepted stream.
        member: the peer's word about itself.
        expiration: the end of its window, as it said (wall clock, seconds).

    Attributes:
        begun: done once `Begin` was sent, cancelled if it could not be.
    """

    def __init__(self, stream: ControlStream, member: Member, expiration: float) -> None:
        self.stream, self.member, self.expiration = stream, member, expiration
        self.begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._outbox: asyncio.Queue[_Answer | None] = asyncio.Queue()
        self._released = asyncio.Event()
        self._watcher: asyncio.Task[None] | None = None
        self._begins = self._over = False

    def post(self, answer: _Answer) -> None:
        """Send this after all messages that were posted before."""
        if not self._over:
            self._outbox.put_nowait(answer)

    def begin(self, begin: Begin) -> None:
        """Send `Begin`, and hand the stream over: from now on another object reads it."""
        self._begins = True
        self._unwatch()
        self.post(begin)

    def drop(self) -> None:
        """This stream no longer counts: its peer is gone, or has opened another."""
        self._outbox.put_nowait(None)

    def release(self) -> None:
        """The round is over: end the stream."""
        self._released.set()

    async def run(self) -> None:
        """Serve until the peer is refused, redirected or gone, or its group is released.

        Raises:
            PeerError: the stream is lost.
        """
        if not self._begins:  # the peer that fills the group is begun before we come here
            self._watcher = asyncio.get_running_loop().create_task(self._watch())
        try:
            while (answer := await self._outbox.get()) is not None:
                await self.stream.send(answer)
                if isinstance(answer, Begin):
                    self.begun.set_result(None)
                    await self._released.wait()
                    return
                if not isinstance(answer, JoinAccepted):
                    return
        finally:
            self._over = True
            self._unwatch()
            if not self.begun.done():
                self.begun.cancel()

    def _unwatch(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
            self._watcher = None  # its traceback knows us

    async def _watch(self) -> None:
        try:
            await self.stream.ready()
            received = await self.stream.recv()  # Leave, the end, or a message that has no place here
            if received is not None and received[1]:
                self.stream.abort()
        except PeerError:
            pass  # the peer is gone; nothing else matters here
        self.drop()
