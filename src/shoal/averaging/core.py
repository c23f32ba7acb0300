"""The tiles that all averagers of one process share: endpoint, DHT node, table of rounds. Does not need torch."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from shoal.base.clock import Env, SharedClock
from shoal.base.peer import Address, PeerID
from shoal.dht import DhtNode, DhtSettings, RecordValidator
from shoal.events import Joined
from shoal.protocol.identity import Identity
from shoal.rpc import Endpoint, Limits, Reachability
from shoal.transport.base import Transport
from shoal.transport.sockets import is_loopback

if TYPE_CHECKING:
    from shoal.averaging.allreduce.table import RoundTable
    from shoal.state.wire import Pacer

__all__ = ["PeerCore"]


@dataclass(slots=True)
class PeerCore:
    """One peer: its identity and its connections. Make it with `start`.

    Attributes:
        identity: its key.
        env: clock, chance, executor, events.
        endpoint: calls and streams.
        node: the DHT.
        reachability: whether others can dial it, as far as they were asked.
        state_upload_limit: bytes per second that all states together are sent at; None: no fixed limit.
        invited_to: the runs that its invites name.
        begins_here: whether it has no initial peer on another machine.
        leavers: functions that are called before this peer leaves on purpose, each with the seconds that it may take.
    """

    identity: Identity
    env: Env
    endpoint: Endpoint
    node: DhtNode
    reachability: Reachability
    state_upload_limit: float | None = None
    invited_to: frozenset[str] = frozenset()
    begins_here: bool = field(default=True, init=False)
    leavers: list[Callable[[float], Coroutine[Any, Any, None]]] = field(default_factory=list, init=False)
    _rounds: RoundTable | None = field(default=None, init=False)
    _pacer: Pacer | None = field(default=None, init=False)

    @classmethod
    async def start(  # noqa: PLR0913 (the last eleven by name)
        cls,
        identity: Identity,
        transport: Transport,
        env: Env,
        initial_peers: Iterable[Address] = (),
        *,
        kept: Iterable[Address] = (),
        client_mode: bool | None = False,
        limits: Limits | None = None,
        dht_settings: DhtSettings | None = None,
        validators: Iterable[RecordValidator] = (),
        state_upload_limit: float | None = None,
        timeout_s: float | None = None,
        must_join: bool = True,
        patient: bool = True,
        invited_to: frozenset[str] = frozenset(),
    ) -> PeerCore:
        """Listen, and join the network of the initial peers.

        Args:
            identity: the key of this peer; the transport must use the same.
            transport: the transport; this object closes it.
            env: clock, chance, executor, events.
            initial_peers: addresses at which to join the network; without any, a new network begins.
            kept: further addresses to join at, of peers that this one met in an earlier life.
            client_mode: True: never listen. False: listen, and announce where. None: listen, ask the others whether
                they can dial this peer, and announce nothing if they cannot; if all initial peers are on this machine,
                as False.
            limits: the limits of the endpoint.
            dht_settings: the settings of the DHT node.
            validators: rules for records, beside signatures.
            state_upload_limit: bytes per second, see the attributes.
            timeout_s: the longest time for joining.
            must_join: False begins a new network if no initial peer answers.
            patient: False gives up within about three seconds if no program listens at any initial peer's addresses.
            invited_to: the runs that its invites name.

        Raises:
            ConfigError: the address cannot be listened on.
            PeerUnreachable: no initial peer answered.
        """
        given, kept = list(initial_peers), list(kept)
        initial_peers = [*given, *kept]
        clock = SharedClock(env.clock, settled=not initial_peers)
        env = replace(env, clock=clock)
        endpoint, node = Endpoint(transport, env, limits=limits), None
        try:
            endpoint.trust.give(address.peer_id for address in given)
            endpoint.trust.remember(address.peer_id for address in kept)
            await endpoint.start(listen=not client_mode)
            node = DhtNode(endpoint, env, identity, settings=dht_settings, validators=validators)
            core = cls(identity, env, endpoint, node, Reachability(endpoint), state_upload_limit, invited_to)
            core.begins_here = all(is_loopback(address.host) for address in initial_peers)
            asks = client_mode is None and not core.begins_here
            if asks:
                endpoint.withhold()
            await node.bootstrap(initial_peers, timeout_s=timeout_s, required=must_join, patient=patient)
            clock.settled = True
            if asks and (await core.reachability.find_out()).can_be_reached:
                await node.look_around()
            core.tell_joined()
            core.reachability.watch(node.look_around, core.tell_joined)
        except BaseException:
            if node is not None:
                await node.close()
            await endpoint.close()
            raise
        return core

    @property
    def peer_id(self) -> PeerID:
        """The id of this peer."""
        return self.identity.peer_id

    @property
    def client_mode(self) -> bool:
        """Whether this peer only dials: it never listens, or nobody can connect to it."""
        return not self.endpoint.contact.addresses

    def tell_joined(self) -> None:
        """Emit `Joined`, with the addresses of this peer and whether only this machine can reach them."""
        addresses = self.endpoint.contact.addresses
        self.env.events.emit(
            Joined(
                peers=self.node.neighbours,
                addresses=tuple(address.where for address in addresses),
                only_here=bool(addresses) and all(is_loopback(address.host) for address in addresses),
            )
        )

    def rounds(self) -> RoundTable:
        """The table of rounds of this endpoint; made when it is first asked for (it needs torch)."""
        if self._rounds is None:
            from shoal.averaging.allreduce.table import RoundTable  # noqa: PLC0415 (a peer without tensors does without torch)

            self._rounds = RoundTable(self.endpoint, self.identity)
        return self._rounds

    def pacer(self) -> Pacer:
        """The pacer of all states that are sent from here; made when it is first asked for (it needs torch).

        Raises:
            ConfigError: `state_upload_limit` is too low.
        """
        if self._pacer is None:
            from shoal.state.wire import Pacer  # noqa: PLC0415 (as above)

            self._pacer = Pacer(self.state_upload_limit)
        return self._pacer

    async def close(self) -> None:
        """Leave the network. Safe to call twice."""
        await self.reachability.close()
        await self.node.close()
        await self.endpoint.close()
