"""The largest cost on the loop of a message of any size: linear in its bytes, and never more than a moment.

Each case is a message at its bounds, or a small one that made others work, and the code that takes it in. Lines of
Python are counted, and memory, so that the result is the same on each machine: see `tests.cost`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec
import pytest

from shoal.allreduce.coordinator import Coordinator
from shoal.allreduce.member import MemberMachine
from shoal.allreduce.partition import most_parts
from shoal.dht import DhtSettings
from shoal.dht.local import Vault
from shoal.dht.storage import wire_bytes
from shoal.dht.validation import CompositeValidator
from shoal.matchmaking.joins import check_last_answer
from shoal.optim.agreement import Said, agree, checks_of
from shoal.optim.options import Options
from shoal.peer import Address, PeerID
from shoal.progress import SwarmProgress
from shoal.wire import (
    Assign,
    Begin,
    Commit,
    Contact,
    Held,
    Member,
    Progress,
    Record,
    Report,
    Standing,
    TellProgress,
    decode,
    decode_plain,
    encode,
)
from tests.cost import cost_of

ROUND = b"r" * 16
GROUPS = [16, 1024]

MOMENT = 700_000
"""Lines that take 20 ms on a machine of 2023."""

Case = tuple[bytes, Callable[[], object]]


def peer(number: int) -> PeerID:
    """Some peer."""
    return PeerID(number.to_bytes(4, "big") + bytes(28))


def member(number: int) -> Member:
    """A member that can be dialed."""
    return Member(Contact(peer(number), (Address("10.0.0.1", 4000, peer(number)),)), True, 1e6, b"\xc0")


def reducers(count: int) -> list[int]:
    """Of the most parts that so many members can have."""
    return [part % count for part in range(most_parts(count))]


def held(count: int) -> list[Held]:
    """All averages of such a round."""
    return [Held(part, 0, b"\xff" * ((count + 7) // 8), 2.0, b"d" * 16) for part in range(most_parts(count))]


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
    for each in range(1, min(count, 64)):
        helpless.reported(each, Report([], [other for other in range(count) if other != each][: count - 2], 1), 1.0)
    one = Report(all_held.held[3:4], [], 1)
    yield "one, of 64 without sources", (encode(one), partial(helpless.reported, count - 1, one, 2.0))
    brief = coordinator(count, brief_s={1: 1.0})
    for each in range(2, min(count, 18)):
        brief.reported(each, all_held, 1.0)
    yield "nothing, beside brief members", (encode(Report()), partial(brief.reported, count - 1, Report(), 2.0))


def orders(count: int) -> Iterator[tuple[str, Case]]:
    """What the coordinator may tell a member."""
    members = [member(number) for number in range(count)]
    commit, all_again = Commit(ROUND, held(count)), Assign(list(range(most_parts(count))), 1, 1)
    for name, order in (("commit", commit), ("assign", all_again), ("same", Assign([3] * most_parts(count), 0, 0))):
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


def others() -> Iterator[tuple[str, Case]]:
    """The rest: groups, progress."""
    members = [member(number) for number in range(1024)]
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


def all_cases() -> Iterator[Any]:
    """All of them, with their names."""
    for count in GROUPS:
        for kind, made in (("report", reports), ("order", orders)):
            for name, case in made(count):
                yield pytest.param(case, id=f"{kind} of {count}: {name}")
    for kind, found in (("words", words()), ("message", others())):
        for name, case in found:
            yield pytest.param(case, id=f"{kind}: {name}")


def test_no_message_costs_more_than_a_moment_and_all_are_linear_in_their_bytes() -> None:
    """36 bytes of words took a second, 50 of a report 52 ms, and could be sent again and again."""
    wrong = []
    for param in all_cases():
        (data, work), name = param.values[0], param.id
        cost = cost_of(work)
        if cost.lines > min(MOMENT, 100_000 + 30 * len(data)) or cost.peak_bytes > (2 << 20) + 20 * len(data):
            wrong.append((name, len(data), cost))
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.parametrize("value", [[0] * 65_000, [{}] * 65_000, [[]] * 65_000, [[0]] * 32_000, [{0: 0}] * 21_000])
def test_plain_values_take_a_few_lines_for_each_byte(value: Any) -> None:
    """More than 16 KiB of them are read in a thread, or in turns with the rest of the loop."""
    data = encode(value)
    assert decode_plain(data) == value
    assert cost_of(partial(decode_plain, data)).lines < 25 * len(data)


def test_a_key_of_the_dht_with_thousands_of_entries_is_not_looked_through_64_times() -> None:
    """2 KB of keys, all the same one, had 262,144 records looked at; what does not fit into the reply is not now."""
    vault = Vault(peer(0), DhtSettings(), CompositeValidator())
    records = [Record(b"k" * 32, encode(f"{number}"), b"\x01", 60.0) for number in range(4000)]
    for record in records:
        vault.held.put(record, peer(1), 1.0)
    assert vault.shown_bytes(b"k" * 32) == sum(map(wire_bytes, records))
    assert cost_of(partial(vault.shown_bytes, b"k" * 32)).lines < 20
