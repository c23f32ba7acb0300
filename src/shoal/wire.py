"""Every message of the protocol, and its version: the one place that has all messages between peers.

Messages are msgspec structs, encoded as MessagePack arrays with a tag in front. Fields may be added at the end with a
default without a new protocol version; anything else is a new version. Tensor bytes are never inside a message: a
message announces a payload, which follows it raw (see `shoal.rpc`).

Two kinds of message start something:

- a `Request[Reply]` is sent by `Endpoint.call` and answered by exactly one reply;
- an `Opening[Up, Down]` is sent by `Endpoint.open` and gives a stream, on which the opener sends `Up` messages and the
  acceptor sends `Down` messages, in order, until each has said END.

`docs/protocol.md` shows the same as tables.
"""

from __future__ import annotations

from datetime import datetime
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Generic, NoReturn, TypeVar, cast, get_args

import msgspec

from shoal.errors import ConfigError
from shoal.locks import SafeLock
from shoal.peer import Address, PeerID

__all__ = [
    "MAX_EPOCH",
    "MAX_SAMPLES",
    "PROTOCOL_VERSION",
    "PROTOCOL_VERSIONS",
    "Contact",
    "Message",
    "Opening",
    "Request",
    "decode",
    "decode_plain",
    "encode",
    "encode_plain",
]

PROTOCOL_VERSION = 2
"""The version spoken by this code."""

PROTOCOL_VERSIONS = (2, 2)
"""The lowest and the highest version that this code can speak; negotiated when a connection is made."""

R = TypeVar("R")
Up = TypeVar("Up")
Down = TypeVar("Down")
M = TypeVar("M")

Digest = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
"""32 bytes: SHA-256 of states, BLAKE3 of chunks."""

CheckDigest = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
"""16 bytes: BLAKE3 of parameters."""

MAX_EPOCH, MAX_SAMPLES = 2 * 10**7, 1 << 62
"""No peer of a run has taken more swarm steps, or counts more samples: a peer that says so is wrong."""

PartDigest = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
"""16 bytes: GMAC of an encoded average, keyed by the round."""

RoundID = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
"""Names one averaging round; drawn at random by the leader of the group."""


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all messages. The tag is the class name."""

    @property
    def scope(self) -> str:
        """Which of several handlers of this type on one endpoint is meant; empty if there is only one."""
        return ""


class Request(Message, Generic[R], frozen=True):
    """A message that is answered by one `R`."""


class Opening(Message, Generic[Up, Down], frozen=True):
    """A message that opens a stream: the opener then sends `Up`, the acceptor `Down`."""

    bulk: ClassVar[bool] = False
    """Whether megabytes go on it."""


# ----------------------------------------------------------------------------------------------------------- encoding


def _encode_hook(value: object) -> object:
    if isinstance(value, PeerID):
        return value.raw
    raise NotImplementedError(f"cannot send {type(value).__name__}")


# The same few peers are named over and over; equal ids are then also the same object, which makes dictionaries faster.
_peer_id = lru_cache(maxsize=1 << 14)(PeerID)


def _decode_hook(kind: type[Any], value: object) -> object:
    # An Address needs no hook: it travels as a map of its fields, and checks itself when it is made.
    if kind is PeerID and isinstance(value, bytes):
        return _peer_id(value)
    raise ConfigError(f"expected {kind.__name__}, got {type(value).__name__}")


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_hook)


_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}
_one_at_a_time = SafeLock()


def _decoder(kind: type[Any]) -> msgspec.msgpack.Decoder[Any]:
    if (decoder := _decoders.get(kind)) is None:
        # msgspec looks at a type when it is first read; two threads that do so at once crash the process (0.22).
        with _one_at_a_time:
            decoder = _decoders[kind] = msgspec.msgpack.Decoder(kind, dec_hook=_decode_hook)
    return decoder


def encode(message: object) -> bytes:
    """The bytes of a message."""
    return _encoder.encode(message)


def decode(data: bytes | bytearray | memoryview | msgspec.Raw, kind: type[M]) -> M:
    """Read a message of type `kind` (a struct, or a union of structs).

    Raises:
        msgspec.MsgspecError: the bytes are not MessagePack, or not such a message; says where.
    """
    return cast(M, read(_decoder(kind), data))


def _no_extensions(code: int, _data: memoryview) -> NoReturn:
    raise msgspec.ValidationError(f"MessagePack extension {code}")


_scalar = msgspec.msgpack.Decoder(ext_hook=_no_extensions)
_list = msgspec.msgpack.Decoder(list[msgspec.Raw])


def encode_plain(value: object) -> bytes:
    """Plain values of a user, as `decode_plain` reads them; numbers of numpy and torch (no arrays) become Python's.

    Raises:
        ValueError: something in it is no plain value; says what.
    """
    try:
        packed = _plain_encoder.encode(value)
        decode_plain(packed)  # a value that others could not read is the caller's mistake, and raised here
    except (TypeError, ValueError, RuntimeError, OverflowError, msgspec.MsgspecError) as error:
        raise ValueError(f"{error} (use numbers, text, bytes, lists and dictionaries)") from error
    return packed


def _as_number(value: Any) -> object:
    """A number of numpy or torch, which have the method `item`, as Python's own."""
    if getattr(value, "shape", None) != ():
        raise TypeError(f"a {type(value).__name__} is no plain value")
    number = value.item()
    if type(number) is type(value):  # longer than any of Python's
        raise TypeError(f"a {type(value).__name__} is longer than a number can be")
    return number


_plain_encoder = msgspec.msgpack.Encoder(enc_hook=_as_number)


def decode_plain(data: bytes | memoryview) -> Any:
    """Read plain values that a peer's user gave: None, bool, numbers, text, bytes, lists, dictionaries.

    Keys of dictionaries must not be lists. Lists would become tuples, whose hashes anybody can make collide, so that a
    map of 64 KiB takes seconds. Python keeps the hashes of text and bytes secret.

    Raises:
        msgspec.MsgspecError: the bytes are not MessagePack of such values; says where.
    """
    return _plain(memoryview(data))


def _plain(raw: memoryview) -> Any:
    first = raw[0] if len(raw) else 0xC1
    try:
        if first & 0xF0 == 0x90 or first in (0xDC, 0xDD):
            return [_plain(memoryview(each)) for each in read(_list, raw)]
        if first & 0xF0 == 0x80 or first in (0xDE, 0xDF):
            return _dictionary(raw, first)
    except RecursionError as error:
        raise msgspec.DecodeError("nested too deeply") from error
    value = read(_scalar, raw)
    if isinstance(value, datetime):
        raise msgspec.ValidationError("a MessagePack timestamp")
    return value


def _dictionary(raw: memoryview, first: int) -> dict[Any, Any]:
    """A map is a list of its keys and values, but for its header; msgspec would hash the keys before we see them."""
    head = {0xDE: 3, 0xDF: 5}.get(first, 1)
    count = int.from_bytes(raw[1:head], "big") if head > 1 else first & 0x0F
    if count > len(raw):
        raise msgspec.DecodeError("a map that is longer than its bytes")
    flat = [_plain(memoryview(each)) for each in read(_list, b"\xdd" + (2 * count).to_bytes(4, "big") + raw[head:])]
    if any(isinstance(key, list | dict) for key in flat[::2]):
        raise msgspec.ValidationError("a list or a dictionary as a key")
    return dict(zip(flat[::2], flat[1::2], strict=True))


def read(decoder: msgspec.msgpack.Decoder[R], data: bytes | bytearray | memoryview | msgspec.Raw) -> R:
    """Decode bytes that may be hostile: every fault in them raises the same kind of error.

    Raises:
        msgspec.MsgspecError: the bytes are not MessagePack, or not of the decoder's type; says where.
    """
    try:
        return decoder.decode(data)
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError(f"text that is not UTF-8: {error.reason}") from error
    except RecursionError as error:
        raise msgspec.DecodeError("nested too deeply") from error


def _type_arguments(kind: type[Any], base: type[Any]) -> tuple[Any, ...]:
    for parent in getattr(kind, "__orig_bases__", ()):
        if getattr(parent, "__origin__", None) is base:
            return get_args(parent)
    raise TypeError(f"{kind.__name__} has no type of answer: derive it from {base.__name__}[...]")


@lru_cache(maxsize=256)
def reply_type(request: type[Request[R]]) -> type[R]:
    """The type of the reply to a request of this type."""
    return cast("type[R]", _type_arguments(request, Request)[0])


def stream_types(opening: type[Opening[Up, Down]]) -> tuple[type[Up], type[Down]]:
    """The types of the messages that opener and acceptor send on a stream of this type."""
    up, down = _type_arguments(opening, Opening)
    return up, down


# ------------------------------------------------------------------------------------------------------------- shared


class Contact(Message, frozen=True):
    """A peer and where it can be dialed; no addresses for a peer that only dials (client mode)."""

    peer: PeerID
    addresses: Annotated[tuple[Address, ...], msgspec.Meta(max_length=8)] = ()


# ---------------------------------------------------------------------------------------------------- rpc (both levels)


class Hello(Message, frozen=True):
    """First frame on a connection that carries calls: the peer that dials, and where it listens itself."""

    contact: Contact


class Call(Message, frozen=True):
    """Asks for one reply within `timeout_s` seconds. `method` is the tag of the request in `body`."""

    id: int
    method: str
    timeout_s: float
    body: msgspec.Raw


class Reply(Message, frozen=True):
    """Answers the call with this id."""

    id: int
    body: msgspec.Raw


class Failure(Message, frozen=True):
    """Answers a call, or ends a stream, that could not be served.

    `code`: `refused` (the handler said no), `busy` (a limit), `unknown` (no such method), `bad` (not decodable) or
    `internal` (the handler failed). `id` is the call's id, 0 on a stream.
    """

    id: int
    code: str
    text: Annotated[str, msgspec.Meta(max_length=1024)]


class Note(Message, frozen=True):
    """Says something that needs no answer. `method` is the tag of the message in `body`."""

    method: str
    body: msgspec.Raw


class Beat(Message, frozen=True):
    """Asks for a sign of life, and for the network's time. `time` is the clock of the sender's machine, seconds."""

    time: float


class BeatReply(Message, frozen=True):
    """The sign of life: the asker's time given back, and the network's; not a number where that is not known yet."""

    asked: float
    time: float


class Bye(Message, frozen=True):
    """Last frame before an orderly close. `leaving`: the peer is going away; else the connection was only idle."""

    leaving: bool


class Noted(Message, frozen=True):
    """Confirms that a message was heard."""


class DialedBack(Message, frozen=True):
    """The result of a `DialBack`: whether the asker was reached, and at which of its addresses (an IP address)."""

    reached: bool
    host: Annotated[str, msgspec.Meta(max_length=253)]


class DialBack(Request[DialedBack], frozen=True):
    """Dial me at the address that this question comes from, and this port: can others reach me there?"""

    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]


class Ballast(Request[Noted], frozen=True):
    """Bytes without meaning: the sender measures how long they take to reach you."""

    data: Annotated[bytes, msgspec.Meta(max_length=262144)]


class Whereabouts(Request[Noted], frozen=True):
    """I listen here from now on, no longer at the addresses that I named before; nowhere, if there is no address."""

    contact: Contact


class NoWayIn(Request[Noted], frozen=True):
    """I cannot connect to you at these addresses of yours, though you live."""

    addresses: Annotated[tuple[Address, ...], msgspec.Meta(max_length=8)]


class OpenStream(Message, frozen=True):
    """Begins a stream on a connection of its own. `method` is the tag of the opening message in `body`."""

    method: str
    body: msgspec.Raw


# --------------------------------------------------------------------------------------------------------------- dht

Key = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
"""The place of a record in the DHT: SHA-256 of the application's key."""


class Record(Message, frozen=True):
    """One value, or one entry of a dictionary, in the DHT.

    A record with an `owner` is signed by it over (key, subkey, value, expiration): see `shoal.dht.validation`.
    """

    key: Key
    subkey: Annotated[bytes, msgspec.Meta(max_length=256)] | None
    value: Annotated[bytes, msgspec.Meta(max_length=65536)]
    expiration: float
    owner: PeerID | None = None
    signature: Annotated[bytes, msgspec.Meta(max_length=64)] = b""


class DhtPong(Message, frozen=True):
    """Answers `DhtPing` with the contact of the answerer."""

    contact: Contact


class DhtPing(Request[DhtPong], frozen=True):
    """Is this a DHT node, and where does it listen?"""


class DhtFound(Message, frozen=True):
    """For one key: the records held here (all entries of a dictionary), and the nearest nodes known here.

    `more`: the answer did not fit in this reply, and is empty; ask for the key again. Never so for all keys.
    """

    records: list[Record]
    nearest: Annotated[list[Contact], msgspec.Meta(max_length=64)]
    more: bool = False


class DhtFindReply(Message, frozen=True):
    """Answers `DhtFind`, in the order of its keys."""

    found: Annotated[list[DhtFound], msgspec.Meta(max_length=64)]


class DhtFind(Request[DhtFindReply], frozen=True):
    """Records and nearest nodes for each key. `values=False` asks for nodes only."""

    keys: Annotated[list[Key], msgspec.Meta(max_length=64)]
    values: bool = True


class DhtStoreReply(Message, frozen=True):
    """For each record: empty if it is held now, else why not. `records`: all that is held for `DhtStore.find`."""

    refused: Annotated[list[str], msgspec.Meta(max_length=256)]
    records: list[Record] = []


class DhtStore(Request[DhtStoreReply], frozen=True):
    """Hold these records until they expire; after taking them, return the records of the key `find`, if it is set."""

    records: Annotated[list[Record], msgspec.Meta(max_length=256)]
    find: Key | None = None


# --------------------------------------------------------------------------------------------------------- matchmaking


class Member(Message, frozen=True):
    """One member of a group, as the leader tells all others.

    `bandwidth` is in bytes/s, None where the peer did not say; `reduces` is False for a client or a peer with
    bandwidth 0; `gathered` is the peer's own MessagePack value for all others. `contributes` is False for an auxiliary
    peer, which reduces for the others: it has no values to average and wants no averages. `reference` names the last
    average that this peer holds, by its round; empty if none, or if the averager codes nothing against it.
    """

    contact: Contact
    reduces: bool
    bandwidth: float | None
    gathered: Annotated[bytes, msgspec.Meta(max_length=65536)]
    contributes: bool = True
    reference: Annotated[bytes, msgspec.Meta(max_length=16)] = b""


class JoinAccepted(Message, frozen=True):
    """You are in; wait for `Begin` on this stream."""


class JoinRefused(Message, frozen=True):
    """You are not in; `text` names why.

    Codes: `full`, `replaced` (you have asked again): you may ask again in a while; `not-looking`, `started`: too late;
    `too-few`, `no-reducer`: the leader gave up; `later`: you are earlier than I, and I ask you; `schema`, `settings`:
    we can never be in one group.
    """

    code: str
    text: Annotated[str, msgspec.Meta(max_length=1024)]


class JoinRedirected(Message, frozen=True):
    """Ask this peer instead: I follow it."""

    leader: Contact


class Begin(Message, frozen=True):
    """The group is formed. `slices[i]` elements of the flat vector, in order, are reduced by member i.

    `coordinator` is the index of the member whose `Commit` decides; the leader names itself.
    """

    round_id: RoundID
    members: Annotated[list[Member], msgspec.Meta(max_length=256)]
    coordinator: int
    slices: Annotated[list[int], msgspec.Meta(max_length=256)]
    part_bytes: int


class Held(Message, frozen=True):
    """I hold the average of this part and attempt; `digest` is of its encoded bytes.

    It is made of the values of `contributors` (bit i = member i), whose weights are `weight` in all.
    """

    part: int
    attempt: int
    contributors: Annotated[bytes, msgspec.Meta(max_length=32)]
    weight: float
    digest: PartDigest


class Report(Message, frozen=True):
    """Member to coordinator: parts newly held, members that I cannot get parts from, bytes moved so far in this round.

    Sent when there is news, and about once a second without: growing `moved_bytes` show that a slow member is at work.
    """

    held: list[Held] = []
    lost: list[int] = []
    moved_bytes: int = 0


class Assign(Message, frozen=True):
    """Coordinator to member: from now on, get these parts from member `reducer`, under `attempt`.

    A higher attempt than before: older bytes of the part are void and contributions are sent again, to `reducer`.
    The same attempt: `reducer` holds the average already; ask it.
    """

    parts: list[int]
    attempt: int
    reducer: int


class Commit(Message, frozen=True):
    """The coordinator's verdict: the round succeeds, with exactly these averages, one entry per part in order."""

    round_id: RoundID
    parts: list[Held]


class Abort(Message, frozen=True):
    """The coordinator's verdict: the round fails."""

    round_id: RoundID
    reason: Annotated[str, msgspec.Meta(max_length=1024)]


class Gone(Message, frozen=True):
    """Coordinator to member: the connection with this member is lost. Do not wait for its contributions."""

    member: int


class Leave(Message, frozen=True):
    """Follower to leader: count me out; or member to coordinator: I gave up this round."""


class Join(
    Opening[Report | Leave, JoinAccepted | JoinRefused | JoinRedirected | Begin | Assign | Gone | Commit | Abort],
    frozen=True,
):
    """Follower asks leader to be in its next group. After `Begin` the same stream carries the round's control.

    Sent to a peer that is later in order (a nudge) it is refused, and makes the sender known there.

    `group` is the group key; `schema` describes the tensors (see `shoal.allreduce.partition`); `settings` are named
    values that must be equal in the whole run; `expiration` (wall clock, seconds) is when the follower's own window
    ends.
    """

    group: str
    schema: bytes
    settings: dict[str, str]
    expiration: float
    member: Member

    @property
    def scope(self) -> str:
        """The averager's prefix: the group key without its bits."""
        return self.group.rpartition(".0b")[0]


# ----------------------------------------------------------------------------------------------------------- all-reduce


class PartData(Message, frozen=True):
    """Payload follows: my values of this part, encoded, to be counted with `weight`."""

    part: int
    attempt: int
    weight: float


class PartRequest(Message, frozen=True):
    """Send me the average of this part of this attempt when you have it."""

    part: int
    attempt: int


class PartAverage(Message, frozen=True):
    """Payload follows: the average of this part, encoded once for everyone."""

    held: Held


class PartAbsent(Message, frozen=True):
    """I do not have the average that you asked for, and shall not make it."""

    part: int
    attempt: int


class Reduce(Opening[PartData | PartRequest, PartAverage | PartAbsent], frozen=True):
    """A member's stream to the reducer of a slice: contributions up, averages down."""

    bulk: ClassVar[bool] = True

    round_id: RoundID


class Verdict(Message, frozen=True):
    """The state of a round here: its commit if I have it; else whether I may still learn it from the coordinator."""

    commit: Commit | None
    may_learn: bool


class AskVerdict(Request[Verdict], frozen=True):
    """Member to member, when the coordinator is lost: do you have the verdict?"""

    round_id: RoundID


# ------------------------------------------------------------------------------------------------------------- progress


Epoch = Annotated[int, msgspec.Meta(ge=0, le=MAX_EPOCH)]
Samples = Annotated[int, msgspec.Meta(ge=0, le=MAX_SAMPLES)]


class Progress(Message, frozen=True):
    """The progress of one peer of a run. Kept in the DHT under `RUN_ID_progress`, and sent to the others directly.

    `digest` names the peer's state and `branch_samples` counts the samples that went into it; `samples` counts those
    accumulated since, at `rate` samples per second. `time` is the peer's own wall clock and only orders its own
    messages. `settings` must be equal in the whole run; `end_epoch` is where the run ends, if that is settled. With
    `left` the peer says that it takes part no more. `check` is its last check of the parameters themselves: the epoch,
    the digest of its own parameters, and the digest of those that they were found equal to (to rounding, if arithmetic
    differs). `alone`: it is connected with nobody else of the run, or took its last step alone, and is not meant to.
    """

    contact: Contact
    epoch: Epoch
    digest: Digest
    branch_samples: Samples
    samples: Samples
    rate: float
    time: float
    settings: dict[str, str]
    end_epoch: Epoch | None = None
    left: bool = False
    check: tuple[Epoch, CheckDigest, CheckDigest] | None = None
    alone: bool = False


class Standing(Message, frozen=True):
    """A peer's word about another peer at its own state: the other's samples, and the time by the other's clock."""

    peer: PeerID
    samples: Annotated[int, msgspec.Meta(ge=0)]
    time: float


class ProgressTold(Message, frozen=True):
    """My progress; with the other peers at my state, if together we have the samples of the next step."""

    progress: Progress
    others: Annotated[list[Standing], msgspec.Meta(max_length=4096)] = []


class TellProgress(Request[ProgressTold], frozen=True):
    """My progress, and that of others as in `ProgressTold`; what is yours?"""

    run_id: str
    progress: Progress
    others: Annotated[list[Standing], msgspec.Meta(max_length=4096)] = []

    @property
    def scope(self) -> str:
        """The run."""
        return self.run_id


class Trainers(Message, frozen=True):
    """Some of the peers of the run that I know, drawn at random."""

    contacts: Annotated[list[Contact], msgspec.Meta(max_length=64)]


class WhoTrains(Request[Trainers], frozen=True):
    """Which peers of the run do you know? The DHT hides you from me, and perhaps them."""

    run_id: str

    @property
    def scope(self) -> str:
        """The run."""
        return self.run_id


# ---------------------------------------------------------------------------------------------------------------- state


class ManifestReply(Message, frozen=True):
    """The offer of a donor: one consistent snapshot.

    `tensors` is (shape, dtype name, codec name, encoded bytes) for each tensor; the state is their encodings one after
    another, cut to chunks of `chunk_bytes`; `hashes` are the chunks' BLAKE3. `metadata` is MessagePack. `infinite` are
    the positions of the tensors that hold infinities.
    """

    snapshot: RoundID
    epoch: int
    metadata: Annotated[bytes, msgspec.Meta(max_length=1 << 20)]
    tensors: list[tuple[list[int], str, str, int]]
    chunk_bytes: int
    hashes: list[Digest]
    infinite: list[int] = []


class ManifestPending(Message, frozen=True):
    """Not yet: ask again.

    `busy`: others take the state, too many or an older one, or too many copies were made; else it is being made.
    """

    busy: bool


class GetManifest(Request[ManifestReply | ManifestPending], frozen=True):
    """Snapshot your state under this prefix and describe it (refused if you share none).

    A state of an epoch before `epoch` is not wanted: a donor that others keep from making a new snapshot says `busy`.
    """

    prefix: str
    epoch: int = 0

    @property
    def scope(self) -> str:
        """The donor's prefix."""
        return self.prefix


class Chunk(Message, frozen=True):
    """Payload follows: bytes of this chunk of the snapshot, beginning at `offset` within it.

    A chunk may come in several pieces, in order: so a slow donor still shows that it lives.
    """

    index: int
    offset: int = 0


class MoreChunks(Message, frozen=True):
    """Send these chunks too, after those asked for before."""

    chunks: list[int]


class FetchChunks(Opening[MoreChunks, Chunk], frozen=True):
    """Send these chunks of this snapshot, in this order, then those of `MoreChunks`. END when no more are wanted."""

    bulk: ClassVar[bool] = True

    prefix: str
    snapshot: RoundID
    chunks: list[int]

    @property
    def scope(self) -> str:
        """The donor's prefix."""
        return self.prefix


# ---------------------------------------------------------------------------------------------------------------- steps


class StepsFrom(Message, frozen=True):
    """I am at this state: epoch, digest, samples. You are told of every step that I take from here."""

    epoch: Annotated[int, msgspec.Meta(ge=0)]
    digest: Digest
    samples: Annotated[int, msgspec.Meta(ge=0)]


class StepTaken(Message, frozen=True):
    """A step from the state `epoch`, `digest`, `samples` to the next one: the data that name and make the next state.

    Of a round: its `commit`, and how its vector was cut to parts (`slices`, `part_bytes`). Of a step that a peer took
    alone: no commit, but `alone` and how many samples went into it. `agreement` (MessagePack) says how a step is taken;
    without one, states were averaged. `nbytes` is the size of the averages: the encoded parts one after another, or
    with `raw` the values themselves.
    """

    epoch: Annotated[int, msgspec.Meta(ge=0)]
    digest: Digest
    samples: Annotated[int, msgspec.Meta(ge=0)]
    agreement: Annotated[bytes, msgspec.Meta(max_length=65536)]
    commit: Commit | None
    slices: Annotated[list[int], msgspec.Meta(max_length=256)]
    part_bytes: int
    alone: Annotated[bytes, msgspec.Meta(max_length=64)]
    alone_samples: Annotated[int, msgspec.Meta(ge=0)]
    raw: bool
    nbytes: Annotated[int, msgspec.Meta(ge=0)]


class WantStep(Message, frozen=True):
    """Send me the averages of the step from the state of this digest."""

    digest: Digest


class StepBytes(Message, frozen=True):
    """Payload follows: averages of the step from the state of this digest, from this byte on."""

    digest: Digest
    offset: int


class StepGone(Message, frozen=True):
    """I do not keep the step from the state of this digest any more."""

    digest: Digest


class FollowSteps(Opening[WantStep, StepsFrom | StepTaken | StepBytes | StepGone], frozen=True):
    """Tell me of every step of this run, and keep its averages a little longer than you need them yourself."""

    bulk: ClassVar[bool] = True

    run_id: str

    @property
    def scope(self) -> str:
        """The run."""
        return self.run_id


# ---------------------------------------------------------------------------------------------------------------- debug

ShortText = Annotated[str, msgspec.Meta(max_length=200)]

PlainValue = bool | int | float | ShortText | Annotated[list[ShortText], msgspec.Meta(max_length=16)] | None


class TraceEntry(Message, frozen=True):
    """One event of a flight recorder (`shoal.recorder`).

    `number` counts all events of the peer from 0, `at_s` is seconds since its recorder began, `kind` the name of the
    event's class; in `fields` peer ids stand in full, other bytes as hexadecimal digits.
    """

    number: int
    at_s: float
    kind: ShortText
    fields: Annotated[dict[ShortText, PlainValue], msgspec.Meta(max_length=16)]


class Trace(Message, frozen=True):
    """The content of a flight recorder, oldest first. `began` is wall clock, seconds, `now_s` seconds since then."""

    peer: PeerID
    pid: int
    began: float
    now_s: float
    entries: Annotated[list[TraceEntry], msgspec.Meta(max_length=1000)]


class GetTrace(Request[Trace], frozen=True):
    """Send me your latest events, at most `last` of them."""

    last: Annotated[int, msgspec.Meta(ge=0)] = 1000
