"""Asking other peers: one stream each, from `Join` to the last answer.

Every answer becomes an event. A message that has no place in the exchange costs the other peer its role as our leader.
In every case the stream is finished in order if the other side finished it, and is left with `Leave` otherwise. Only a
stream whose `Begin` was taken stays open, for the round.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from shoal.clock import Env
from shoal.errors import PeerError, PeerProtocolError, PeerRefused
from shoal.events import PeerDropped
from shoal.matchmaking.group import WHERE, ControlStream, check_begin
from shoal.matchmaking.signals import (
    AskAccepted,
    AskLost,
    AskRedirected,
    AskRefused,
    BeginReceived,
    Event,
    Nudged,
)
from shoal.matchmaking.terms import Terms
from shoal.peer import PeerID
from shoal.rpc import Endpoint
from shoal.wire import Begin, Contact, JoinAccepted, JoinRedirected, JoinRefused

__all__ = ["Outbound"]

_CODE_CHARACTERS = 64


class Farewell(Protocol):
    """Ends a stream in order, in the background; `leave` says `Leave` first."""

    def __call__(self, stream: ControlStream, *, leave: bool) -> None: ...


class Outbound:
    """Asks and nudges for one search.

    Args:
        endpoint: opens streams.
        env: events.
        terms: the terms of the search.
        feed: takes the answers.
        take: takes a checked `Begin`, our index in it and its stream; returns whether it keeps the stream.
        farewell: ends streams.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        env: Env,
        terms: Terms,
        feed: Callable[[Event], None],
        take: Callable[[Begin, int, ControlStream], bool],
        farewell: Farewell,
    ) -> None:
        self._endpoint, self._env, self._terms = endpoint, env, terms
        self._feed, self._take, self._farewell = feed, take, farewell

    async def ask(self, contact: Contact, expiration: float) -> None:
        """Ask a peer to lead us, and stay with it for as long as it does; feeds `Ask…` events, and `BeginReceived`."""
        peer, timeout_s = contact.peer, self._terms.request_timeout_s
        stream: ControlStream | None = None
        answer: object = None
        keep = False
        try:
            async with asyncio.timeout(timeout_s):
                stream = await self._endpoint.open(contact, self._terms.join(expiration), timeout_s=timeout_s)
                answer = await _receive(stream)
            while isinstance(answer, JoinAccepted):
                self._feed(AskAccepted(peer))
                answer = await _receive(stream)
            last, keep = self._last(peer, answer, stream)
        except PeerRefused as refusal:
            last = AskRefused(peer, "not-looking", refusal.message)
        except PeerError as error:
            self._note(error, peer)
            last = AskLost(peer, error.message)
        except TimeoutError:
            last = AskLost(peer, f"no answer within {timeout_s:g} s")
        finally:
            if stream is not None and not keep:
                self._farewell(stream, leave=not isinstance(answer, JoinRefused | JoinRedirected))
        self._feed(last)

    def _last(self, peer: PeerID, answer: object, stream: ControlStream) -> tuple[Event, bool]:
        """The event that ends an ask, and whether the stream is kept."""
        match answer:
            case JoinRefused(code, text):
                return AskRefused(peer, code[:_CODE_CHARACTERS], text), False
            case JoinRedirected(leader):
                return AskRedirected(peer, leader), False
            case Begin():
                mine = check_begin(answer, mine=self._terms.member, leader=peer, min_size=self._terms.min_size)
                return BeginReceived(peer), self._take(answer, mine, stream)
            case _:
                raise PeerProtocolError(f"{type(answer).__name__} before Begin", peer)

    async def nudge(self, contact: Contact, expiration: float) -> None:
        """Make ourselves known to a later peer; feeds one `Nudged`."""
        peer, timeout_s = contact.peer, self._terms.request_timeout_s
        stream: ControlStream | None = None
        answer: object = None
        event = Nudged(peer, "lost")
        try:
            async with asyncio.timeout(timeout_s):
                stream = await self._endpoint.open(contact, self._terms.join(expiration), timeout_s=timeout_s)
                answer = await _receive(stream)
            match answer:
                case JoinRefused(code, text):
                    event = Nudged(peer, code[:_CODE_CHARACTERS], text)
                case JoinRedirected(leader):
                    event = Nudged(peer, "redirected", leader=leader)
        except PeerRefused:
            event = Nudged(peer, "not-looking")
        except PeerError as error:
            self._note(error, peer)
        except TimeoutError:
            pass  # lost
        finally:
            if stream is not None:
                self._farewell(stream, leave=not isinstance(answer, JoinRefused | JoinRedirected))
        self._feed(event)

    def _note(self, error: PeerError, peer: PeerID) -> None:
        if isinstance(error, PeerProtocolError):
            self._env.events.emit(PeerDropped(peer=peer, where=WHERE, reason=error.message))


async def _receive(stream: ControlStream) -> object:
    """The next message.

    Raises:
        PeerError: the stream ended, or carried something that it must not.
    """
    received = await stream.recv()
    if received is None:
        raise PeerProtocolError("the stream ended without an answer", stream.peer_id)
    message, payload_bytes = received
    if payload_bytes:
        stream.abort()
        raise PeerProtocolError("a payload where there is none", stream.peer_id)
    return message
