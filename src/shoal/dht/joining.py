"""Getting into a network through its initial peers.

All of them are tried at once, each again and again with growing pauses until the time is up: peers that were started
together find each other in whatever order they come up. The first answer is enough to go on; a peer that refuses
(another protocol version, another identity) is not asked again. An impatient node gives up sooner if nothing but
refusals comes: the machines at all addresses say, more than once and for two seconds, that no program listens there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from shoal.base.clock import Backoff
from shoal.base.peer import Address, PeerID
from shoal.dht.crawl import Caller
from shoal.errors import PeerError, PeerRefused, PeerUnreachable
from shoal.protocol.wire import Contact, DhtPing
from shoal.rpc import Endpoint
from shoal.rpc.dial_limits import NotDialed
from shoal.transport.sockets import is_loopback, is_private

if TYPE_CHECKING:
    import random

__all__ = ["Knocking", "contacts_of", "is_here"]

_REFUSALS, _REFUSED_S, _SAID_NO = 2, 2.0, "refused: "
_SAME_PORT_S = 2.0


class Knocking:
    """One try to get in.

    Args:
        contacts: the initial peers, at least one.
        caller: makes the calls.
        rng: jitter of the pauses.
        look_around: makes this node and its neighbours known to each other, once a peer has answered.
        patient: False gives up once no program has listened at any address for a while.
    """

    def __init__(
        self,
        contacts: Sequence[Contact],
        caller: Caller,
        rng: random.Random,
        look_around: Callable[[], Awaitable[None]],
        *,
        patient: bool = True,
    ) -> None:
        self._contacts, self._caller, self._rng, self._look_around = contacts, caller, rng, look_around
        self._patient, self._began = patient, asyncio.get_running_loop().time()
        self._refusals = {contact.peer: 0 for contact in contacts}  # in a row
        self._answered: dict[PeerID, None] = {}
        self._reasons: dict[PeerID, str] = {}
        self._settled = asyncio.Event()
        self._knocking = len(contacts)

    async def join(self, timeout_s: float) -> None:
        """Knock until a peer answers and the neighbourhood is known, or the time is up, or all peers have refused."""
        knocks = [self._caller.tasks.spawn(self._knock(contact)) for contact in self._contacts]
        for knock in knocks:
            knock.add_done_callback(self._ended)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._settled.wait()
                    if self._answered:
                        await self._look_around()
        finally:
            for knock in knocks:
                knock.cancel()

    def _ended(self, _: asyncio.Task[None]) -> None:
        self._knocking -= 1
        if not self._knocking:
            self._settled.set()

    def check(self) -> None:
        """Raise if nobody answered.

        Raises:
            PeerUnreachable: names every address and the error there.
        """
        if not self._answered:
            tried = "; ".join(
                f"{address} ({self._reasons.get(contact.peer, 'no answer')})"
                for contact in self._contacts
                for address in contact.addresses
            )
            hosts = [address.host for contact in self._contacts for address in contact.addresses]
            nobody = all(
                self._refusals[contact.peer] and not self._reasons[contact.peer].startswith(_SAID_NO)
                for contact in self._contacts
            )
            raise PeerUnreachable(f"no initial peer answered: {tried}{_hint(hosts, nobody_listens=nobody)}")

    async def _knock(self, contact: Contact) -> None:
        """Ping an initial peer until it answers, or says no."""
        backoff = Backoff(self._rng, first_s=0.2, max_s=2.0)
        while contact.peer not in self._answered:
            try:
                await self._caller.call(contact, DhtPing())
            except PeerRefused as error:
                self._reasons[contact.peer] = f"{_SAID_NO}{error.message}"
                self._refusals[contact.peer] = _REFUSALS
                return
            except PeerError as error:
                self._reasons[contact.peer] = error.message
                refused = isinstance(error, PeerUnreachable) and error.nobody_listens
                self._refusals[contact.peer] = self._refusals[contact.peer] + 1 if refused else 0
                if self._in_vain():
                    self._settled.set()
                    return
                await asyncio.sleep(backoff.next_s())
            else:
                first = not self._answered
                self._answered[contact.peer] = None
                self._settled.set()
                if not first:
                    await self._look_around()  # it may know a part of the network that the first does not

    def _in_vain(self) -> bool:
        refused_s = asyncio.get_running_loop().time() - self._began
        return not self._patient and refused_s >= _REFUSED_S and min(self._refusals.values()) >= _REFUSALS


def _hint(hosts: Sequence[str], *, nobody_listens: bool = False) -> str:
    """What hosts that nobody answered at say themselves of where they lead.

    Args:
        hosts: that were tried.
        nobody_listens: whether all of these machines said that no program listens there.
    """
    if nobody_listens and not all(map(is_loopback, hosts)):
        return (
            ". No program listens there: that peer has ended, or has another port now. Take the invite of one that runs"
        )
    if all(map(is_loopback, hosts)):
        return (
            f". {hosts[0]} is this machine itself. If that peer runs here, look whether it has ended. If it runs on "
            "another one, it lets only its own machine in: "
            "start it anew with host_maddrs='/ip4/0.0.0.0/tcp/0' (on the command line --host 0.0.0.0), and use the "
            "invite that it prints then"
        )
    if all(map(is_private, hosts)):
        return (
            f". {hosts[0]} is known within its private network only. On that network, look whether the peer still "
            "runs, and whether a firewall there lets its port in; from elsewhere peers meet through one that all can "
            "reach, such as `shoal dht` on a machine with a public address"
        )
    return ""


async def is_here(endpoint: Endpoint, own: Sequence[Address], *, timeout_s: float) -> bool:
    """Whether addresses of this peer's identity lead to this program, and not to another one that has its key file.

    With the port that this program listens at, an address may be a name of this machine that it does not know. If
    somebody proves the identity there, and no connection comes in here, it is another program.
    """
    places = endpoint.listens_at
    if any(address in places for address in own):
        return True
    alike = [address for address in own if any(address.port == place.port for place in places)]
    began = asyncio.get_running_loop().time()
    for address in alike:
        with suppress(NotDialed):
            if await endpoint.dials.gets_in(address, timeout_s=min(timeout_s, _SAME_PORT_S)):
                return any(came.peer == endpoint.peer_id for came in endpoint.arrivals.since(began))
    return bool(alike)


def contacts_of(addresses: Iterable[Address], *, without: PeerID) -> list[Contact]:
    """One contact per peer, with all its addresses."""
    peers: dict[PeerID, dict[Address, None]] = {}
    for address in addresses:
        if address.peer_id != without:
            peers.setdefault(address.peer_id, {})[address] = None
    return [Contact(peer, tuple(known)[:8]) for peer, known in peers.items()]
