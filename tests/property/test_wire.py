"""Every message of the protocol: what is encoded is decoded, and what is damaged is an error of one kind."""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
from typing import Any, Union

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.base.peer import Address, PeerID
from shoal.errors import ConfigError
from shoal.protocol import wire
from shoal.protocol.identity import Identity

PEER = Identity.from_seed(b"w" * 32).peer_id
ADDRESSES = (Address("10.1.2.3", 4000, PEER), Address("::1", 1, PEER), Address("peer.example", 65535, PEER))
CONTACT = wire.Contact(PEER, ADDRESSES)
RECORD = wire.Record(b"k" * 32, b"sub", b"value", 1.7e9, PEER, b"s" * 64)
MEMBER = wire.Member(CONTACT, True, 1.5e6, b"\xc0")
HELD = wire.Held(3, 1, b"\x07", 12.5, b"d" * 16)
COMMIT = wire.Commit(b"r" * 16, [HELD, HELD], b"s" * 64)
PROGRESS = wire.Progress(CONTACT, 3, b"d" * 32, 1024, 17, 12.5, 1.7e9, {"lr": "0.1"}, 100)
PLACE = wire.Place(3, 5, b"e" * 32, 1024, 750, 100, True, [wire.Standing(PEER, 17, 1.7e9)], b"\xc0")
TRACE_ENTRY = wire.TraceEntry(7, 0.5, "PeerLost", {"peer": str(PEER), "bytes_sent": 3, "left_out": ["a"], "wide": None})

MESSAGES: list[wire.Message] = [
    CONTACT,
    wire.Contact(PEER),
    wire.Hello(CONTACT),
    wire.Call(1, "DhtPing", 2.5, msgspec.Raw(wire.encode(wire.DhtPing()))),
    wire.Reply(2**62, msgspec.Raw(b"\xc0")),
    wire.Failure(0, "busy", "too many"),
    wire.Beat(1.7e9),
    wire.BeatReply(1.7e9, 1.7e9),
    wire.Note("DhtPing", msgspec.Raw(wire.encode(wire.DhtPing()))),
    wire.Bye(leaving=True),
    wire.Noted(),
    wire.DialedBack(True, "10.1.2.3"),
    wire.DialBack(4000),
    wire.LendConnection(),
    wire.Ballast(b"b" * 16),
    wire.Whereabouts(CONTACT),
    wire.NoWayIn(ADDRESSES),
    wire.OpenStream("Reduce", msgspec.Raw(b"\x90")),
    RECORD,
    wire.Record(b"k" * 32, None, b"", 0.0),
    wire.DhtPong(CONTACT),
    wire.DhtPing(),
    wire.DhtFound([RECORD], [CONTACT], more=True),
    wire.DhtFindReply([wire.DhtFound([], [])]),
    wire.DhtFind([b"k" * 32]),
    wire.DhtStoreReply(["", "no"]),
    wire.DhtStore([RECORD]),
    MEMBER,
    wire.JoinAccepted(),
    wire.JoinRefused("full", "eight already"),
    wire.JoinRedirected(CONTACT),
    wire.Begin(b"r" * 16, [MEMBER, MEMBER], 0, [5, 5], 1 << 20),
    HELD,
    wire.Report([HELD], [1], 12345),
    wire.Report(),
    wire.Report([HELD], signature=b"s" * 64),
    wire.Shown(2, wire.Report([HELD], signature=b"s" * 64)),
    wire.Assign([1, 2], 1, 0),
    wire.Gone(2),
    COMMIT,
    wire.Abort(b"r" * 16, "nobody left"),
    wire.Leave(),
    wire.Join("run_grad.0b01", b"schema", {"a": "b"}, 1.7e9, MEMBER),
    wire.PartData(1, 0, 2.0),
    wire.PartRequest(1, 0),
    wire.PartAverage(HELD),
    wire.PartAbsent(1, 0),
    wire.CommitDigest(b"d" * 32, b"s" * 64),
    wire.Reduce(b"r" * 16),
    wire.Verdict(COMMIT, may_learn=True),
    wire.Verdict(None, may_learn=False),
    wire.AskVerdict(b"r" * 16),
    PROGRESS,
    wire.Standing(PEER, 17, 1.7e9),
    wire.TellProgress("run", PROGRESS, [wire.Standing(PEER, 17, 1.7e9)]),
    wire.ProgressTold(PROGRESS),
    PLACE,
    wire.TellChains("run", PROGRESS, [PLACE, PLACE]),
    wire.ChainsTold(PROGRESS, [PLACE]),
    wire.Trainers([CONTACT]),
    wire.WhoTrains("run"),
    wire.ManifestReply(
        b"s" * 16,
        3,
        b"\xc0",
        [([2, 3], "float32", "none", 24)],
        b"x\x9cc```\x00\x00\x00\x04\x00\x01",
        1 << 20,
        [b"h" * 32],
        [0],
    ),
    wire.ManifestPending(busy=True),
    wire.GetManifest("run"),
    wire.Chunk(3, 65536),
    wire.FetchChunks("run", b"s" * 16, [0, 5]),
    wire.MoreChunks([7, 9]),
    wire.StepsFrom(3, b"d" * 32, 1024),
    wire.StepTaken(3, b"d" * 32, 1024, b"\xc0", COMMIT, [5, 5], 1 << 20, b"", 0, False, 40),
    wire.WantStep(b"d" * 32),
    wire.StepBytes(b"d" * 32, 65536),
    wire.StepGone(b"d" * 32),
    wire.FollowSteps("run"),
    TRACE_ENTRY,
    wire.Trace(PEER, 4711, 1.7e9, 2.5, [TRACE_ENTRY, TRACE_ENTRY]),
    wire.GetTrace(5),
]

KINDS: list[type[wire.Message]] = sorted({type(message) for message in MESSAGES}, key=lambda kind: kind.__name__)


def decode_or_refuse(data: bytes, kind: Any) -> object:
    """A message, or None for the one kind of error that there is."""
    try:
        return wire.decode(data, kind)
    except msgspec.MsgspecError:
        return None


def _defined() -> set[type]:
    kinds = {value for value in vars(wire).values() if isinstance(value, type) and issubclass(value, wire.Message)}
    return kinds - {wire.Message, wire.Request, wire.Opening}


def test_every_message_is_here() -> None:
    """A message that is added to the protocol gets an example above, and so all tests below."""
    assert _defined() == set(KINDS)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_messages_come_back_equal(message: wire.Message) -> None:
    """Encoded and decoded: equal, of the same type; also from a buffer that is not bytes."""
    data = wire.encode(message)
    for buffer in (data, bytearray(data), memoryview(data)):
        back = wire.decode(buffer, type(message))
        assert type(back) is type(message)
        assert wire.encode(back) == data


def test_tags_are_names_and_differ() -> None:
    """The tag is the class name, so a union of any messages can be told apart."""
    tags = [kind.__struct_config__.tag for kind in KINDS]
    assert tags == [kind.__name__ for kind in KINDS]
    union: Any = Union[tuple(KINDS)]  # noqa: UP007 (made at run time)
    for message in MESSAGES:
        assert type(wire.decode(wire.encode(message), union)) is type(message)


def test_a_message_of_a_newer_peer_may_have_more_fields() -> None:
    """Fields at the end that are not known here are passed over; missing ones with a default get it."""
    values = msgspec.msgpack.decode(wire.encode(wire.Beat(1.5)))
    assert wire.decode(msgspec.msgpack.encode([*values, "new", {"a": 1}]), wire.Beat) == wire.Beat(1.5)
    assert wire.decode(msgspec.msgpack.encode(["Chunk", 7]), wire.Chunk) == wire.Chunk(7, 0)
    with pytest.raises(msgspec.ValidationError):
        wire.decode(msgspec.msgpack.encode(["Chunk"]), wire.Chunk)


def test_equal_peer_ids_are_one_object() -> None:
    """The same few peers are named over and over."""
    first, second = (wire.decode(wire.encode(CONTACT), wire.Contact) for _ in range(2))
    assert first.peer is second.peer
    assert first.addresses[0].peer_id is first.peer


def test_only_what_has_a_form_is_encoded() -> None:
    """Something else in a message is a mistake of this program."""
    with pytest.raises(NotImplementedError, match="object"):
        wire.encode([object()])


def test_requests_and_openings_say_what_answers_them() -> None:
    """And one that does not is found out when it is used."""

    class Silent(wire.Request, frozen=True):  # type: ignore[type-arg]
        """Says nothing."""

    assert wire.reply_type(wire.DhtPing) is wire.DhtPong
    assert wire.stream_types(wire.FetchChunks) == (wire.MoreChunks, wire.Chunk)
    with pytest.raises(TypeError, match="Silent"):
        wire.reply_type(Silent)


def test_scopes_are_prefix_and_run() -> None:
    """Which of several averagers, donors or runs of one endpoint is meant."""
    assert wire.Join("run_grad.0b01@x", b"", {}, 0.0, MEMBER).scope == "run_grad"
    assert wire.GetManifest("run").scope == wire.FetchChunks("run", b"s" * 16, []).scope == "run"
    assert wire.TellProgress("run", PROGRESS).scope == "run"
    assert wire.WhoTrains("run").scope == "run"
    assert wire.DhtPing().scope == ""


# -------------------------------------------------------------------------------------------------------------- damage


def _contact_of(peer: object, addresses: list[object]) -> bytes:
    return msgspec.msgpack.encode(["Contact", peer, addresses])


_address = {"host": "10.0.0.1", "port": 1, "peer_id": PEER.to_bytes()}


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"", wire.Beat),
        (b"\xc1", wire.Beat),
        (wire.encode(wire.Beat(1.0)) + b"\x00", wire.Beat),
        (_contact_of(b"short", []), wire.Contact),
        (_contact_of("text", []), wire.Contact),
        (_contact_of(7, []), wire.Contact),
        (_contact_of(PEER.to_bytes(), ["/ip4/10.0.0.1/tcp/1/p2p/x"]), wire.Contact),
        (_contact_of(PEER.to_bytes(), [_address] * 9), wire.Contact),
        (_contact_of(PEER.to_bytes(), [{**_address, "port": 0}]), wire.Contact),
        (_contact_of(PEER.to_bytes(), [{**_address, "port": 1 << 60}]), wire.Contact),
        (_contact_of(PEER.to_bytes(), [{**_address, "port": "1"}]), wire.Contact),
        (_contact_of(PEER.to_bytes(), [{**_address, "host": "a b"}]), wire.Contact),
        (_contact_of(PEER.to_bytes(), [{**_address, "host": "x" * 300}]), wire.Contact),
        (_contact_of(PEER.to_bytes(), [{**_address, "host": ""}]), wire.Contact),
        (_contact_of(PEER.to_bytes(), [{**_address, "peer_id": b"?"}]), wire.Contact),
        (_contact_of(PEER.to_bytes(), [{"host": "10.0.0.1"}]), wire.Contact),
        (b"\x93\xa5Abort\xc4\x10" + b"r" * 16 + b"\xa2\xff\xfe", wire.Abort),
        (b"\x93\xa5Ab\xffrt\xc4\x10" + b"r" * 16 + b"\xa1x", wire.Abort),
        (b"\x93\xaaOpenStream\xa1x" + b"\x91" * 1_000_000, wire.OpenStream),
        (b"\x93\xa4Beat\x01" + b"\x81\x01" * 500_000, wire.Beat),
        (b"\x92\xa4Beat\xd4\x01\x01", wire.Beat),
        (b"\x92\xa4Beat\xd6\xff\x00\x00\x00\x01", wire.Beat),
        (msgspec.msgpack.encode(["Progress", *msgspec.structs.astuple(PROGRESS)[1:]][:4]), wire.Progress),
    ],
)
def test_particular_damage_is_refused(data: bytes, kind: type[wire.Message]) -> None:
    """Wrong ids and addresses, text that is not UTF-8, nesting without end, extension types: one kind of error."""
    with pytest.raises(msgspec.MsgspecError):
        wire.decode(data, kind)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x92\xc0",
        b"\xa1\xff",
        b"\x91" * 60_000 + b"\xc0",
        b"\xd4\x05x",
        b"\xd7\xff" + b"\xff" * 8,
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\x81\x91\x01\x02",
        b"\x91\x81\x80\x02",
        b"\xde\x00\x02\x01\x02\x03",
        b"\xd6\xff\x00\x00\x00\x01",
    ],
)
def test_values_that_cannot_be_read_are_one_kind_of_error(data: bytes) -> None:
    """What users give to each other is as hostile as messages: whoever reads it has one error to think of."""
    with pytest.raises(msgspec.MsgspecError):
        wire.decode_plain(data)


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(allow_nan=False),
    st.text(max_size=40),
    st.binary(max_size=40),
)
plain = st.recursive(
    scalars,
    lambda each: st.lists(each, max_size=20) | st.dictionaries(scalars, each, max_size=20),
    max_leaves=60,
)


@given(plain)
def test_plain_values_come_back_as_they_were(value: object) -> None:
    """Whatever is in whatever, with keys of any scalar."""
    assert wire.decode_plain(wire.encode(value)) == value


@pytest.mark.parametrize("count", [0, 1, 15, 16, 65_535, 65_536])
def test_dictionaries_of_any_size_come_back_as_they_were(count: int) -> None:
    """Their header has three forms."""
    value = dict.fromkeys(range(count))
    assert wire.decode_plain(wire.encode(value)) == value


def test_a_map_with_lists_as_keys_is_refused() -> None:
    """Lists as keys would be hashed as tuples, of which anybody can find many with one hash: they are refused."""
    pairs = b"".join(wire.encode([number, number]) + b"\xc0" for number in range(20_000))
    with pytest.raises(msgspec.ValidationError, match="as a key"):
        wire.decode_plain(b"\xdf" + (20_000).to_bytes(4, "big") + pairs)


@given(st.binary(max_size=200))
def test_any_bytes_are_plain_values_or_an_error(data: bytes) -> None:
    """Noise."""
    with contextlib.suppress(msgspec.MsgspecError):
        wire.decode_plain(data)


@pytest.mark.parametrize("kind", [wire.Assign, wire.Commit, wire.Join, wire.DhtFind, wire.ManifestReply])
@pytest.mark.parametrize("head", [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"])
def test_announced_lengths_take_no_memory(kind: type[wire.Message], head: bytes) -> None:
    """An array, map or byte string that claims four billion elements, in the place of each field."""
    example = next(message for message in MESSAGES if type(message) is kind)
    fields = [msgspec.msgpack.encode(value) for value in msgspec.msgpack.decode(wire.encode(example))]
    for place in range(1, len(fields)):
        data = bytes([0x90 + len(fields)]) + b"".join([*fields[:place], head, *fields[place:]])
        with pytest.raises(msgspec.MsgspecError):
            wire.decode(data, kind)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_mutated_bytes_are_a_message_or_an_error(kind: type[wire.Message]) -> None:
    """Bytes flipped, cut, doubled, swapped with other messages': never another exception."""
    rng = random.Random(kind.__name__)
    examples = [wire.encode(message) for message in MESSAGES if type(message) is kind]
    others = [wire.encode(message) for message in MESSAGES]
    understood = 0
    for _ in range(1000):
        data = _mutate(rng, bytearray(rng.choice(examples)), others)
        understood += decode_or_refuse(bytes(data), kind) is not None
    assert understood < 1000


_MARKS = (
    0x80,
    0x90,
    0xA0,
    0xC0,
    0xC1,
    0xC2,
    0xC4,
    0xC7,
    0xCA,
    0xCB,
    0xCF,
    0xD3,
    0xD6,
    0xD9,
    0xDC,
    0xDD,
    0xDE,
    0xDF,
    0xFF,
)


def _mutate(rng: random.Random, data: bytearray, others: list[bytes]) -> bytearray:
    for _ in range(rng.choice((1, 1, 2, 5))):
        place = rng.randrange(len(data) + 1)
        match rng.randrange(6):
            case 0 if data:
                data[place % len(data)] ^= 1 << rng.randrange(8)
            case 1 if data:
                data[place % len(data)] = rng.choice(_MARKS)
            case 2:
                del data[place : place + rng.randrange(1, 9)]
            case 3:
                data[place:place] = rng.randbytes(rng.randrange(1, 9))
            case 4:
                other = rng.choice(others)
                data[place:place] = other[rng.randrange(len(other)) :]
            case _:
                data = data[:place]
    return data


_values: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=40)
    | st.binary(max_size=40)
    | st.just(PEER.to_bytes())
    | st.just(b"d" * 32),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@given(st.sampled_from(KINDS), st.lists(_values, max_size=10))
def test_any_values_in_the_fields_are_a_message_or_an_error(kind: type[wire.Message], values: list[Any]) -> None:
    """The right tag, and anything behind it; what is accepted can be sent on."""
    data = msgspec.msgpack.encode([kind.__name__, *values])
    message = decode_or_refuse(data, kind)
    if message is not None:
        assert wire.decode(wire.encode(message), kind) is not None


@given(st.sampled_from(KINDS), st.binary(max_size=200))
def test_any_bytes_are_a_message_or_an_error(kind: type[wire.Message], data: bytes) -> None:
    """Noise."""
    decode_or_refuse(data, kind)


@given(st.binary(max_size=64))
def test_peer_ids_of_any_length_are_checked(raw: bytes) -> None:
    """Only 32 bytes are a peer id."""
    message = decode_or_refuse(_contact_of(raw, []), wire.Contact)
    if len(raw) == 32:
        assert message == wire.Contact(PeerID(raw))
    else:
        assert message is None
        with pytest.raises(ConfigError):
            PeerID(raw)


_TWO_THREADS = """
import sys, threading, msgspec
from shoal.protocol import wire

def fresh():
    inner = [msgspec.defstruct(f"Inner{i}", [(f"f{j}", int) for j in range(5)], array_like=True) for i in range(12)]
    return msgspec.defstruct("Outer", [(f"f{i}", each) for i, each in enumerate(inner)], array_like=True)

def read():
    for kind in kinds:
        together.wait()
        wire.decode(data, kind)

sys.setswitchinterval(1e-6)
kinds, data = [fresh() for _ in range(100)], msgspec.msgpack.encode([[1] * 5] * 12)
together = threading.Barrier(2)
threads = [threading.Thread(target=read) for _ in range(2)]
for each in threads:
    each.start()
for each in threads:
    each.join()
"""


def test_two_threads_that_read_a_type_for_the_first_time_crash_the_process() -> None:
    """A type is looked at when it is first read: two peers of one process did so at once (a segmentation fault)."""
    command = [sys.executable, "-c", _TWO_THREADS]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
