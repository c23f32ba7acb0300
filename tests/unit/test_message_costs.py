"""The largest cost on the loop of a message of any size: linear in its bytes, and never more than a moment.

Each case is a message at its bounds, or a small one that made others work, and the code that takes it in. Lines of
Python are counted, and memory, so that the result is the same on each machine: see `tests.cost`.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import re
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from shoal.averaging.allreduce.coordinator import Coordinator
from shoal.averaging.allreduce.member import MemberMachine
from shoal.averaging.allreduce.schema import most_tiles
from shoal.averaging.directory import _entries
from shoal.averaging.matchmaking.joins import check_last_answer
from shoal.base.clock import Env
from shoal.base.peer import Address, PeerID
from shoal.cli.status import summary_of, table_of
from shoal.dht import DhtSettings, ValueWithExpiration
from shoal.dht.crawl import Crawler, Findings
from shoal.dht.local import Local, Vault
from shoal.dht.neighbours import Neighbours
from shoal.dht.service import Service
from shoal.dht.storage import wire_bytes
from shoal.dht.validation import CompositeValidator, signed_record
from shoal.layout import alike, balance
from shoal.protocol import wire
from shoal.protocol.identity import Identity
from shoal.protocol.wire import (
    Assign,
    Ballast,
    Begin,
    Commit,
    Contact,
    DhtFind,
    DhtFindReply,
    DhtFound,
    DhtStore,
    Held,
    Member,
    NoWayIn,
    Place,
    Progress,
    Record,
    Report,
    Request,
    Standing,
    TellChains,
    TellProgress,
    Whereabouts,
    decode,
    decode_plain,
    encode,
)
from shoal.rpc.reachability import Reachability
from shoal.run.decide.agreement import Said, agree, checks_of
from shoal.run.decide.check import Check, judge
from shoal.run.view.progress import SwarmProgress
from shoal.run.watching import RunStatus, _decode
from shoal.train.options import Options
from tests.cost import Cost, cost_of, most_lines, most_of
from tests.unit.test_post import OTHER, Peer, progress

ROUND = b"r" * 16
GROUPS = [16, 1024]

LINES_ALONE = re.compile("of 16:|commit|words|checks")
"""In these cases Python makes all that takes memory, or a larger group takes more. To trace memory takes long."""

Case = tuple[bytes, Callable[[], object]]


def peer(number: int) -> PeerID:
    """Some peer."""
    return PeerID(number.to_bytes(4, "big") + bytes(28))


def member(number: int) -> Member:
    """A member that can be dialed."""
    return Member(Contact(peer(number), (Address("10.0.0.1", 4000, peer(number)),)), True, 1e6, b"\xc0")


def reducers(count: int) -> list[int]:
    """Of the most tiles that so many members can have."""
    return [tile % count for tile in range(most_tiles(count))]


def held(count: int) -> list[Held]:
    """All averages of such a round."""
    return [Held(tile, 0, b"\xff" * ((count + 7) // 8), 2.0, b"d" * 16) for tile in range(most_tiles(count))]


def coordinator(count: int, **options: Any) -> Coordinator:
    """Of such a round."""
    every = [True] * count
    return Coordinator(ROUND, reducers(count), every, every, 0, min_group_size=2, stall_s=5.0, now=0.0, **options)


def reports(count: int) -> Iterator[tuple[str, Case]]:
    """What a member may tell the coordinator."""
    all_held = Report(held(count), [], 1)
    yield "all", (encode(all_held), partial(coordinator(count).reported, 1, all_held, 1.0))
    lost = Report([], [each for each in range(count) if each != 1][: max(1, count // 2)], 1)
    yield "lost", (encode(lost), partial(coordinator(count).reported, 1, lost, 1.0))
    elsewhere = coordinator(count)
    elsewhere.reported(count - 1, all_held, 1.0)
    yield "lost, held elsewhere", (encode(lost), partial(elsewhere.reported, 1, lost, 2.0))
    known = coordinator(count)
    known.reported(1, lost, 1.0)
    yield "lost again", (encode(lost), partial(known.reported, 1, lost, 2.0))
    helpless = coordinator(count)
    for each in range(1, min(count, 32)):
        helpless.reported(each, Report([], [other for other in range(count) if other != each][: count - 2], 1), 1.0)
    one = Report(all_held.held[3:4], [], 1)
    yield "one, of 32 without sources", (encode(one), partial(helpless.reported, count - 1, one, 2.0))
    brief = coordinator(count, brief_s={1: 1.0})
    for each in range(2, min(count, 6)):
        brief.reported(each, all_held, 1.0)
    yield "nothing, beside brief members", (encode(Report()), partial(brief.reported, count - 1, Report(), 2.0))


def orders(count: int) -> Iterator[tuple[str, Case]]:
    """What the coordinator may tell a member."""
    members = [member(number) for number in range(count)]
    commit, all_again = Commit(ROUND, held(count)), Assign(list(range(most_tiles(count))), 1, 1)
    for name, order in (("commit", commit), ("assign", all_again), ("same", Assign([3] * most_tiles(count), 0, 0))):
        machine = MemberMachine(ROUND, 1, 0, members, reducers(count), silence_s=5.0, now=0.0)
        machine.start(0.0)
        yield name, (encode(order), partial(machine.obey, order, 1.0))


def words() -> Iterator[tuple[str, Case]]:
    """What members may say for all, as they join."""
    for name, options in {
        "groups": Options(1 << 16, {f"{number:x}": [[0] * 16] for number in range(256)}),
        "values": Options(3000, {"lr": [0] * 3000}),
    }.items():
        said = [
            Said(msgspec.structs.replace(options, values={**options.values, "z": [i]}), samples=1) for i in range(9)
        ]
        plain = {peer(number): msgspec.msgpack.decode(encode(each)) for number, each in enumerate(said)}
        work = partial(
            agree, plain, list(plain), weigh=lambda peers: dict.fromkeys(peers, 1), mine=options, last=options
        )
        yield name, (encode(said), work)
        yield f"checks of {name}", (encode(said), partial(checks_of, plain))


def arithmetic(number: int) -> Check:
    """Of a member that computes as nobody else does."""
    return Check(number.to_bytes(8, "big"), number.to_bytes(16, "big"), bytes(1024))


def judged(plain: dict[PeerID, Any]) -> object:
    """What follows from the checks of members of equal weight."""
    return judge(checks_of(plain), lambda peers: dict.fromkeys(peers, 1))


def checks() -> Iterator[tuple[str, Case]]:
    """Checks of the parameters by 900 members, in one `Begin`."""
    for name, kinds, members in (("one", 1, 300), ("two", 2, 300), ("900", 900, 900)):
        said = [
            encode(
                Said(
                    Options(1, {"lr": [0.1]}),
                    check=msgspec.structs.replace(arithmetic(i), arithmetic=b"%d" % (i % kinds)),
                )
            )
            for i in range(members)
        ]
        plain = {peer(i): msgspec.msgpack.decode(each) for i, each in enumerate(said)}
        yield name, (b"".join(said), partial(judged, plain))


def shares(widths: list[float]) -> object:
    """What the leader of a group with these bandwidths deals to its members."""
    return balance(10**8, alike(widths), [True] * len(widths), min_size=1000)


def others() -> Iterator[tuple[str, Case]]:
    """The rest: groups, progress."""
    members = [member(number) for number in range(1024)]
    widths = [10 ** (15 * number / 1024) for number in range(1024)]
    yield "1,024 bandwidths", (encode([member(0)] * 1024), partial(shares, widths))
    far = [msgspec.structs.replace(member(n), contact=contact(n)) for n in range(1024)]
    crowd = encode(Begin(ROUND, far, 0, [8] * 1024, 1 << 20))
    yield "a group that listens at 8,192 hosts", (crowd, partial(decode, crowd, Begin))
    found = encode(DhtFindReply([DhtFound([], [contact(32 * key + n) for n in range(20)]) for key in range(64)]))
    yield "nodes that listen at 10,240 hosts", (found, partial(decode, found, DhtFindReply))
    begin = Begin(ROUND, members, 0, [8] * 1024, 1 << 20)
    yield "begin", (encode(begin), partial(check_last_answer, begin, peer(0), members[5], 2))
    yield "reading it", (encode(begin), partial(decode, encode(begin), Begin))
    progress = Progress(Contact(peer(3)), 5, b"d" * 32, 100, 4, 1.0, 1.0, {"a": "b"})
    for name, first in (("known", 0), ("unknown", 5000)):
        swarm = SwarmProgress(peer(9999), {"a": "b"}, ttl_s=30.0)
        for number in range(4096):
            swarm.heard(msgspec.structs.replace(progress, contact=Contact(peer(number))), 1.0)
        told = TellProgress("run", progress, [Standing(peer(first + number), 5, 2.0) for number in range(4096)])
        yield f"{name} standings", (encode(told), partial(swarm.relayed, progress, told.others, 2.0))
    swarm = SwarmProgress(peer(9999), {"a": "b"}, ttl_s=30.0)
    wrong = msgspec.structs.replace(progress, settings={f"{number}": "x" * 500 for number in range(256)})
    yield "256 other settings", (encode(wrong), partial(swarm.heard, wrong, 1.0))


def on_a_loop(work: Callable[[], Coroutine[Any, Any, object]]) -> None:
    """As `asyncio.run`, which looks through the tasks of all loops at its end: other tests may have left thousands."""
    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(work())
    finally:
        loop.close()


class Served:
    """What parts of a peer answer, on an endpoint that does nothing else."""

    limits = SimpleNamespace(header_bytes=1 << 20)

    def __init__(self) -> None:
        self.handlers: dict[type, Callable[..., Any]] = {}
        self.contact = contact(0)

    def serve(self, kind: type, handler: Callable[..., Any]) -> None:
        self.handlers[kind] = handler

    def contact_of(self, asker: PeerID) -> Contact:
        return Contact(asker)

    def moved(self, listens: Contact) -> None:
        assert listens.addresses

    def on_route_shut(self, _callback: object) -> None:
        pass

    def answers(self, request: wire.Message) -> Case:
        """One of them answers this."""

        async def turns() -> None:
            answer = self.handlers[type(request)](peer(0), request)
            if inspect.isawaitable(answer):
                await answer

        return encode(request), partial(on_a_loop, turns)


def to_node() -> Iterator[tuple[str, Case]]:
    """What a DHT node is asked, and a peer is told of addresses."""
    served: Any = Served()
    vault = Vault(peer(9), DhtSettings(), CompositeValidator())
    neighbours = Neighbours(peer(9), bucket_size=16)
    for number in range(1, 300):
        neighbours.alive(contact(number), 1.0)
    Service(served, Local(peer(9), Env(), DhtSettings(), neighbours, vault))
    Reachability(served)
    yield "64 keys", served.answers(DhtFind([number.to_bytes(32, "big") for number in range(64)]))
    records = [Record(bytes(32), number.to_bytes(2, "big"), b"", 1e9, peer(0)) for number in range(256)]
    yield "256 records", served.answers(DhtStore(records, bytes(32)))
    yield "bytes without meaning", served.answers(Ballast(bytes(1 << 18)))
    yield "8 hosts", served.answers(Whereabouts(contact(0)))
    yield "8 hosts that lead nowhere", served.answers(NoWayIn(contact(0).addresses))


def places(count: int, words: int, *, same: bool = False) -> TellChains:
    """Of so many fragments, or so often of one, with so many words of others in each."""
    said = [Place(0 if same else number, 5, b"d" * 32, 100, 4) for number in range(count)]
    others = [Standing(peer(number), 5, 2.0) for number in range(words)]
    said = [msgspec.structs.replace(each, others=others) for each in said]
    return TellChains("run", progress(OTHER, 0, 1), said)


def of_chains() -> Iterator[tuple[str, Case]]:
    """What a peer with 64 fragments is told, each of which has enough, and knows 4,096 others."""
    for name, told in {
        "each of 64 fragments": places(64, 32),
        "one fragment, 64 times": places(64, 32, same=True),
        "one fragment, with all words": places(1, 2048),
        "all that fits into a frame": places(64, 300),
        "nothing": places(0, 0),
    }.items():
        asked = Peer(64)
        first, *rest = asked.known
        mine = progress(OTHER, 0, 1)
        for number in range(4096):
            where = Contact(peer(number), (Address("10.0.0.1", 4000, peer(number)),))
            first.heard(msgspec.structs.replace(mine, contact=where, digest=bytes(32)), 1.0)
        for number, known in enumerate(rest, 1):  # as if each had heard it
            known._known = {
                peer: word._replace(said=msgspec.structs.replace(word.said, digest=bytes([number]) * 32))
                for peer, word in first._known.items()
            }
        for gossip in asked.gossips:
            gossip.enough = True

        async def turn(asked: Peer = asked, told: TellChains = told) -> None:
            assert len(encode(asked.served[TellChains](OTHER, told))) < Served.limits.header_bytes

        yield name, (encode(told), partial(on_a_loop, turn))


def contact(number: int) -> Contact:
    """A peer that listens at 8 hosts, which are nobody else's."""
    hosts = [f"fd00::{number:x}:{each}" if each % 2 else f"10.{each}.{number >> 8}.{number & 255}" for each in range(8)]
    return Contact(peer(number), tuple(Address(host, 4000, peer(number)) for host in hosts))


@functools.cache
def all_cases() -> list[Any]:
    """All of them, with their names: to make them takes seconds."""
    return list(_all_cases())


def _all_cases() -> Iterator[Any]:
    for count in GROUPS:
        for kind, made in (("report", reports), ("order", orders)):
            for name, case in made(count):
                yield pytest.param(case, id=f"{kind} of {count}: {name}")
    more = ("words", words()), ("checks", checks()), ("message", others()), ("node", to_node()), ("chains", of_chains())
    for kind, found in more:
        for name, case in found:
            yield pytest.param(case, id=f"{kind}: {name}")


def is_linear(cost: Cost, nbytes: int) -> bool:
    """Whether this is no more than a message of so many bytes may cost."""
    return cost.lines <= most_lines(nbytes) and cost.peak_bytes <= (2 << 20) + 20 * nbytes


def test_no_message_costs_more_than_a_moment_and_all_are_linear_in_their_bytes() -> None:
    """36 bytes of words took a second, 50 of a report 52 ms, and could be sent again and again."""
    wrong = []
    for param in all_cases():
        (data, work), name = param.values[0], param.id
        cost = cost_of(work, memory=not LINES_ALONE.search(name))
        if not is_linear(cost, len(data)):
            wrong.append((name, len(data), cost))
    assert not wrong, "\n".join(map(str, wrong))


def is_long(kind: Any) -> bool:
    """Whether values of this type, by its bounds, are longer than a name or a digest."""
    match kind:
        case msgspec.inspect.ListType() | msgspec.inspect.VarTupleType() | msgspec.inspect.DictType():
            return True
        case msgspec.inspect.StructType():
            return any(is_long(field.type) for field in kind.fields)
        case msgspec.inspect.UnionType():
            return any(map(is_long, kind.types))
        case msgspec.inspect.BytesType() | msgspec.inspect.StrType():
            return kind.max_length is None or kind.max_length > 512
    return False


def test_each_request_that_may_be_long_has_a_case() -> None:
    """`TellChains` came, and was in no table."""
    found = {each for each in vars(wire).values() if isinstance(each, type) and issubclass(each, Request)}
    long = {each.__name__ for each in found if is_long(msgspec.inspect.type_info(each))}
    assert {"TellProgress", "DhtStore"} <= long
    data = [param.values[0][0] for param in all_cases()]
    # The tag of a message comes first, behind the size of the list.
    assert not {name for name in long if not any(name.encode() in each[: len(name) + 8] for each in data)}


def nested(value: object, levels: int) -> object:
    """The value in so many lists."""
    for _ in range(levels):
        value = [value]
    return value


PLAIN = {
    "numbers": [0] * 8_000,
    "dictionaries": [{}] * 8_000,
    "lists": [[]] * 8_000,
    "lists with something": [[0]] * 4_000,
    "dictionaries with something": [{0: 0}] * 2_600,
    "texts": ["x" * 7] * 1_000,
    "deep": nested([0] * 8_000, 200),
    "deep lists": [nested(0, 5)] * 1_300,
}


@pytest.mark.parametrize("name", PLAIN)
def test_plain_values_take_a_few_lines_for_each_byte(name: str) -> None:
    """However deep: 64 KiB of them took 40 ms, in 250 lists 80. More than 8 KiB are read in a thread, or in turns."""
    data = encode(PLAIN[name])
    assert decode_plain(data) == PLAIN[name]
    assert cost_of(partial(decode_plain, data), memory=False).lines < 20 * len(data) + 100


def test_plain_values_within_each_other_have_an_end() -> None:
    """Each level of lists was looked through as a whole: 300 of them, 300 times."""
    assert decode_plain(encode(nested(0, 256))) == nested(0, 256)
    with pytest.raises(msgspec.DecodeError, match="nested too deeply"):
        decode_plain(encode(nested(0, 257)))


def test_a_key_of_the_dht_with_thousands_of_entries_is_not_looked_through_64_times() -> None:
    """2 KB of keys, all the same one, had 262,144 records looked at; what does not fit into the reply is not now."""
    vault = Vault(peer(0), DhtSettings(), CompositeValidator())
    records = [Record(b"k" * 32, encode(f"{number}"), b"\x01", 60.0) for number in range(4000)]
    for record in records:
        vault.held.put(record, peer(1), 1.0)
    assert vault.shown_bytes(b"k" * 32) == sum(map(wire_bytes, records))
    assert cost_of(partial(vault.shown_bytes, b"k" * 32)).lines < 20


def test_an_answer_for_many_keys_is_checked_in_turns() -> None:
    """Each key had its own turns: 64 keys with 31 records each were checked in one."""
    owner = Identity.from_seed(b"o" * 32)
    keys = [number.to_bytes(32, "big") for number in range(64)]
    local = Local(
        peer(0),
        Env(),
        DhtSettings(),
        Neighbours(peer(0), bucket_size=16),
        Vault(peer(0), DhtSettings(), CompositeValidator()),
    )
    crawler, now = Crawler(None, local), local.env.clock.time()  # type: ignore[arg-type]
    findings = [Findings(key) for key in keys]
    given = [
        (each, signed_record(owner, each.key, encode(f"{number}"), encode([0] * 200), now + 60.0))
        for each in findings
        for number in range(4)
    ]
    assert most_of(crawler.take_records(owner.peer_id, given)).lines < 80_000
    assert sum(len(each.records) for each in findings) == 64 * 4


def test_what_peers_say_in_the_dht_is_read_in_turns() -> None:
    """4,096 keys are free: a look for a group, or for donors, took half a second."""
    entries = {
        peer(number).to_bytes(): ValueWithExpiration([[str(each) for each in contact(number).addresses], 5.0], 1e12)
        for number in range(40)
    }
    cost = most_of(_entries(ValueWithExpiration(entries, 1e12)))
    assert cost.lines < 60_000


def test_a_run_of_thousands_is_shown_in_time() -> None:
    """`shoal status` looked at all peers for each of them, and for each digest: with 4,096, which anybody can write."""
    said = [
        Progress(Contact(peer(n)), 5, b"d" * 32, 1, 4, 1.0, 1.0, {}, check=(3, peer(n)[:16], peer(n)[:16]))
        for n in range(300)
    ]
    data = [encode(each) for each in said]
    found = _decode(
        {each.contact.peer.to_bytes(): ValueWithExpiration(one, 1e12) for each, one in zip(said, data, strict=True)}
    )
    status = RunStatus("run", tuple(found), frozenset())
    assert len(found) == 300
    for work in (status.to_dict, partial(summary_of, status), partial(table_of, status)):
        assert cost_of(work, memory=False).lines < 5 * sum(map(len, data))
