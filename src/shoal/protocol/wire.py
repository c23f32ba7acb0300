"""Every message of the protocol, and its version: the one place that has all messages between peers.

Messages are msgspec structs, encoded as MessagePack arrays with a tag in front. Fields may be added at the end with a
default without a new protocol version; anything else is a new version. Tensor bytes are never inside a message: a
message announces a payload, which follows it raw (see `shoal.rpc`).

Two kinds of message start something:

- a `Request[Reply]` is sent by `Endpoint.call` and answered by exactly one reply;
- an `Opening[Up, Down]` is sent by `Endpoint.open` and gives a stream, on which the opener sends `Up` messages and the
  acceptor sends `Down` messages, in order, until each has said END.

`docs/why/protocol.md` shows the same as tables, which `make tables` makes from the docstrings and types in this module.
Each comment line of dashes begins one of these tables.

Every number, text, list and map has a bound in its type, so the decoder refuses what no honest peer says: NaN and
infinity too, which are within no bounds. The bounds are absolute: what a message says of one round or one state is
checked by the code that knows it. Raw bodies and whole messages are bounded by their frame (`Limits.header_bytes`).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, Any, ClassVar, Generic, TypeVar, cast, get_args

import msgspec

from shoal.base.locks import SafeLock
from shoal.base.peer import Address, PeerID
from shoal.errors import ConfigError

__all__ = [
    "MAX_DURATION_S",
    "MAX_EPOCH",
    "MAX_FRAGMENTS",
    "MAX_GROUP_SIZE",
    "MAX_KINDS",
    "MAX_SAMPLES",
    "MAX_TILES",
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

PROTOCOL_VERSION = 4
"""The version spoken by this code."""

PROTOCOL_VERSIONS = (4, 4)
"""The lowest and the highest version that this code can speak; negotiated when a connection is made."""

R = TypeVar("R")
Up = TypeVar("Up")
Down = TypeVar("Down")
M = TypeVar("M")

Digest = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
"""32 bytes: SHA-256 of states, BLAKE3 of chunks."""

CheckDigest = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
"""16 bytes: BLAKE3 of parameters."""

Parameters = Annotated[bytes, msgspec.Meta(max_length=2048)]
"""What a peer holds, described as for a check (`run.decide.check.Check`), encoded."""

MAX_EPOCH, MAX_SAMPLES = 2 * 10**7, 1 << 62
"""No peer of a run has taken more swarm steps, or counts more samples: a peer that says so is wrong."""

LAST_EPOCH_TAKEN, MAX_SAMPLES_TAKEN = MAX_EPOCH // 2, MAX_SAMPLES // 2
"""A state beyond these is not taken over from others, so that a run has room for as many steps as it took to get here.
They are more than any run takes, and bounded: a peer that takes over a state steps a schedule up to its epoch."""

MAX_SAMPLES_OF_STEP = 1 << 36
"""In one batch or step: a round takes weights of 10^12 at most, and several batches may come together."""

MAX_TRAINED = 1 << 18
"""The most trained parameters of a run: a member says of each whether it had a gradient, and all words travel together.
"""

MAX_FRAGMENTS = 64
"""No model is merged in more fragments."""

Epoch = Annotated[int, msgspec.Meta(ge=0, le=MAX_EPOCH)]

Samples = Annotated[int, msgspec.Meta(ge=0, le=MAX_SAMPLES)]

MAX_GROUP_SIZE = 1024
"""No group is larger, whatever `target_group_size` says: this bounds `Begin`, and the contributors of an average."""

MAX_TILES = 1 << 13
"""With more tiles a commit would not fit in one message (`Limits.header_bytes`): choose a larger `part_size_bytes`."""

MemberIndex = Annotated[int, msgspec.Meta(ge=0, le=MAX_GROUP_SIZE - 1)]
"""A member of a group, by its place in `Begin`."""

TileNumber = Annotated[int, msgspec.Meta(ge=0, le=MAX_TILES - 1)]

Attempt = Annotated[int, msgspec.Meta(ge=0, le=MAX_GROUP_SIZE)]
"""There is at most one new attempt for each member that is lost."""

Weight = Annotated[float, msgspec.Meta(ge=0, le=1e16)]
"""Of one member, or of all members together."""

Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_SAMPLES)]
"""Bytes, elements, messages."""

Bandwidth = Annotated[float, msgspec.Meta(ge=0, le=1e18)]
"""Of something per second."""

MAX_DURATION_S = 1e9
"""Nobody waits longer: 30 years."""

Duration = Annotated[float, msgspec.Meta(ge=0, le=MAX_DURATION_S)]
"""Seconds."""

WallTime = Annotated[float, msgspec.Meta(ge=-1e11, le=1e11)]
"""Seconds since 1970; before that too, as clocks are set wrongly."""

Name = Annotated[str, msgspec.Meta(max_length=512)]
"""A name that users give or code has: of a run, an averager, a group, a message, a setting, a codec."""

Settings = Annotated[dict[Name, Name], msgspec.Meta(max_length=256)]

ShortText = Annotated[str, msgspec.Meta(max_length=200)]

TileDigest = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
"""16 bytes: BLAKE3 of an encoded average and of what is said of it, keyed by the round."""

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
        return bytes(value)
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


_LIST, _MAP, _SIZED, _EXTENSION = range(-1, -5, -1)


def _size_of(first: int) -> int:
    """The bytes of a MessagePack value that begins with this one; or the kind of a value where others tell its size."""
    if 0xA0 <= first < 0xC0:
        return 1 + (first & 0x1F)
    if 0x80 <= first < 0xA0:
        return _LIST if first & 0x10 else _MAP
    sizes = dict.fromkeys((0xCC, 0xD0), 2) | dict.fromkeys((0xCD, 0xD1), 3) | dict.fromkeys((0xCA, 0xCE, 0xD2), 5)
    kinds = dict.fromkeys((0xC4, 0xC5, 0xC6, 0xD9, 0xDA, 0xDB), _SIZED) | {0xDC: _LIST, 0xDD: _LIST}
    kinds |= {0xDE: _MAP, 0xDF: _MAP} | dict.fromkeys((0xC7, 0xC8, 0xC9, *range(0xD4, 0xD9)), _EXTENSION)
    return (sizes | dict.fromkeys((0xCB, 0xCF, 0xD3), 9) | kinds).get(first, 1)


_SIZES = [_size_of(first) for first in range(256)]
_WIDTHS = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4, 0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}
"""The bytes of the size that follows the first byte, if that one does not hold it."""

_DEEPEST = 256
"""So many lists and dictionaries lie within each other at most."""

_plain_decoder = msgspec.msgpack.Decoder()


def encode_plain(value: object) -> bytes:
    """Plain values of a user, as `decode_plain` reads them.

    Numbers of numpy and torch (no arrays) become Python's, and ids of peers become bytes.

    Raises:
        ValueError: something in it is no plain value; says what.
    """
    try:
        packed = _plain_encoder.encode(value)
        decode_plain(packed)  # a value that others could not read is the caller's mistake, and raised here
    except (TypeError, ValueError, RuntimeError, OverflowError, msgspec.MsgspecError) as error:
        raise ValueError(f"{error} (use numbers, text, bytes, lists and dictionaries)") from error
    return packed


def _as_plain(value: Any) -> object:
    """A number of numpy or torch, which have the method `item`, as Python's own; the bytes of a peer's id."""
    if isinstance(value, PeerID):
        return bytes(value)
    if getattr(value, "shape", None) != ():
        raise TypeError(f"a {type(value).__name__} is no plain value")
    number = value.item()
    if type(number) is type(value):  # longer than any of Python's
        raise TypeError(f"a {type(value).__name__} is longer than a number can be")
    return number


_plain_encoder = msgspec.msgpack.Encoder(enc_hook=_as_plain)


def decode_plain(data: bytes | memoryview) -> Any:
    """Read plain values that a peer's user gave: None, bool, numbers, text, bytes, lists, dictionaries.

    Lists and dictionaries lie within each other at most 256 deep. Keys of dictionaries must not be lists. Lists would
    become tuples, whose hashes anybody can make collide, so that a map of 64 KiB takes seconds. Python keeps the hashes
    of text and bytes secret.

    Raises:
        msgspec.MsgspecError: the bytes are not MessagePack of such values; says where.
    """
    packed = bytes(data)
    if len(packed) > 1:  # one byte holds no key and no extension
        _check_plain(packed)
    return read(_plain_decoder, packed)


def _check_plain(packed: bytes) -> None:
    """Look at the first byte of each value, once: msgspec would hash the keys before we see them.

    `left` values are still to come in the innermost list or map; in a map an even number before each key.
    """
    sizes, end, at, left, in_map, outer = _SIZES, len(packed), 0, 1, False, list[tuple[int, bool]]()
    while left or outer:
        if not left:
            left, in_map = outer.pop()
            continue
        if at >= end:
            raise msgspec.DecodeError("a value that ends too soon")
        size = sizes[first := packed[at]]
        left -= 1
        if size > 0:
            at += size
            continue
        if size == _EXTENSION:
            raise msgspec.ValidationError("a MessagePack extension, or a timestamp")
        start, at = at + 1, at + 1 + (width := _WIDTHS.get(first, 0))
        count = int.from_bytes(packed[start:at], "big") if width else first & 0x0F
        if size == _SIZED:
            at += count
            continue
        if in_map and left & 1:
            raise msgspec.ValidationError("a list or a dictionary as a key")
        if count:
            if len(outer) == _DEEPEST:
                raise msgspec.DecodeError("nested too deeply")
            outer.append((left, in_map))
            in_map = size == _MAP
            left = 2 * count if in_map else count


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
    """A peer, and where others can dial it. It stands inside other messages.

    Attributes:
        peer: the peer.
        addresses: where it can be dialed. A client, which only dials, has none.
    """

    peer: PeerID
    addresses: Annotated[tuple[Address, ...], msgspec.Meta(max_length=8)] = ()


# --------------------------------------------------------------------------------------------------- calls and streams


class Hello(Message, frozen=True):
    """The dialer of a call link sends it first; and that of a connection which the other side has asked for.

    Attributes:
        contact: the dialer, and where it listens itself.
        lends: the connection is for a stream that the other side opens (`LendConnection`), and no call link.
    """

    contact: Contact
    lends: bool = False


class Call(Message, frozen=True):
    """Either side of a link makes a request. It gets a `Reply`, a `Failure`, or nothing once its time is over.

    Attributes:
        id: names the call on this link.
        method: the tag of the request.
        timeout_s: how long the caller waits. No call is served for longer than 600 s.
        body: the request.
    """

    id: Count
    method: Name
    timeout_s: Duration
    body: msgspec.Raw


class Reply(Message, frozen=True):
    """The handler of a call has answered.

    Attributes:
        id: the call's.
        body: the reply.
    """

    id: Count
    body: msgspec.Raw


class Failure(Message, frozen=True):
    """A call could not be served, or the sender gives up a stream.

    Attributes:
        id: the call's; 0 on a stream.
        code: `refused`: the handler said no, or the peer shuts down. `busy`: a limit is reached. `unknown`: there is no
            such method, or none for this scope (averager prefix, run). `bad`: the body does not decode, or breaks the
            protocol. `internal`: the answering side has a fault.
        text: the reason, for a log.
    """

    id: Count
    code: ShortText
    text: Annotated[str, msgspec.Meta(max_length=1024)]


class Note(Message, frozen=True):
    """Either side of a link says something that needs no answer.

    Attributes:
        method: the tag of the message.
        body: the message.
    """

    method: Name
    body: msgspec.Raw


class Beat(Message, frozen=True):
    """Asks the other side of a link for a sign of life and for the network's time; answered by `BeatReply`.

    It is sent when the link begins, after silence, and once a minute.

    Attributes:
        time: the wall clock of the sender's machine, seconds.
        twin: the sender is connected with two processes that have the key of the peer that is asked.
    """

    time: WallTime
    twin: bool = False


class BeatReply(Message, frozen=True):
    """The sign of life, sent at once.

    Attributes:
        asked: the time in the `Beat`.
        time: the network's time as the answerer knows it, seconds; None while it does not know it: it is joining, or
            the clock of its machine has jumped forward.
        process: names the process that answers, among all that have its key.
    """

    asked: WallTime
    time: WallTime | None
    process: Annotated[bytes, msgspec.Meta(max_length=16)] = b""


class Bye(Message, frozen=True):
    """Either side of a link sends it last, before an orderly close.

    Attributes:
        leaving: the peer goes away. Otherwise the link was only idle.
    """

    leaving: bool


class Noted(Message, frozen=True):
    """Confirms that a message was heard."""


class DialedBack(Message, frozen=True):
    """The peer that was asked has tried to dial back.

    Attributes:
        reached: the asker answered there, and proved to be the peer that asked.
        host: the IP address at which the asker is seen.
    """

    reached: bool
    host: Annotated[str, msgspec.Meta(max_length=253)]


class DialBack(Request[DialedBack], frozen=True):
    """A peer asks whether others can dial it: at its start, or after a `NoWayIn`.

    Attributes:
        port: where the asker listens, at the address that the question comes from.
    """

    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]


class LendConnection(Request[Noted], frozen=True):
    """The sender wants to open a stream to the receiver: the receiver is to dial a connection for it.

    It only dials, or the sender dials it in vain.

    The receiver dials where the sender has said that it listens, and says there in its `Hello` that it lends the
    connection.
    """


class Ballast(Request[Noted], frozen=True):
    """`shoal doctor` measures how fast it can send to a peer.

    Attributes:
        data: bytes without meaning.
    """

    data: Annotated[bytes, msgspec.Meta(max_length=262144)]


class Whereabouts(Request[Noted], frozen=True):
    """The sender's addresses are no longer those of its `Hello`.

    Attributes:
        contact: where the sender listens from now on. Without addresses it only dials.
    """

    contact: Contact


class NoWayIn(Request[Noted], frozen=True):
    """The sender twice failed to dial the receiver, though it heard from it meanwhile.

    Attributes:
        addresses: the addresses at which the sender dialed the receiver.
    """

    addresses: Annotated[tuple[Address, ...], msgspec.Meta(max_length=8)]


class OpenStream(Message, frozen=True):
    """The opener sends it first on the connection of a stream. Messages of the stream follow, or a `Failure`.

    Attributes:
        method: the tag of the opening.
        body: the opening.
    """

    method: Name
    body: msgspec.Raw


# ---------------------------------------------------------------------------------------------------------------- dht

Key = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
"""The place of a record in the DHT: SHA-256 of the application's key."""


class Record(Message, frozen=True):
    """One value, or one entry of a dictionary, in the DHT. It stands inside `DhtStore` and `DhtFound`.

    Attributes:
        key: SHA-256 of the application's key.
        subkey: names an entry of a dictionary: MessagePack text, bytes or an integer. None for a plain value.
        value: MessagePack.
        expiration: wall clock, seconds.
        owner: the peer that signed the record, if one did.
        signature: the owner's, over (key, subkey, value, expiration): see `shoal.dht.validation`.
    """

    key: Key
    subkey: Annotated[bytes, msgspec.Meta(max_length=256)] | None
    value: Annotated[bytes, msgspec.Meta(max_length=65536)]
    expiration: WallTime
    owner: PeerID | None = None
    signature: Annotated[bytes, msgspec.Meta(max_length=64)] = b""


class DhtPong(Message, frozen=True):
    """The node that was asked lives.

    Attributes:
        contact: the answerer's.
    """

    contact: Contact


class DhtPing(Request[DhtPong], frozen=True):
    """A node that joins, or that misses another one, asks whether a DHT node is there and where it listens."""


class DhtFound(Message, frozen=True):
    """The answer for one key, inside `DhtFindReply`.

    Attributes:
        records: all records that are held here for the key.
        nearest: the nearest nodes that are known here.
        more: the answer for this key did not fit and is empty: ask for the key again. Never true for all keys.
    """

    records: Annotated[list[Record], msgspec.Meta(max_length=16384)]
    nearest: Annotated[list[Contact], msgspec.Meta(max_length=32)]
    more: bool = False


class DhtFindReply(Message, frozen=True):
    """The answers of the node that was asked.

    Attributes:
        found: one answer for each key, in the order of the keys.
    """

    found: Annotated[list[DhtFound], msgspec.Meta(max_length=64)]


class DhtFind(Request[DhtFindReply], frozen=True):
    """A node asks for records and nearest nodes, in each step of a lookup.

    Attributes:
        keys: the keys that are looked up.
        values: records are wanted, too. Otherwise only nodes are.
        of_peers: of the records only those are wanted that peers wrote under their own ids, of at most 8 KiB.
    """

    keys: Annotated[list[Key], msgspec.Meta(max_length=64)]
    values: bool = True
    of_peers: bool = False


class DhtStoreReply(Message, frozen=True):
    """The node that was asked has taken the records, or some of them. A client refuses the call.

    Attributes:
        refused: for each record: empty if it is held now, else the reason why not.
        records: all records that are held for the key `DhtStore.find`.
    """

    refused: Annotated[list[Annotated[str, msgspec.Meta(max_length=1024)]], msgspec.Meta(max_length=256)]
    records: Annotated[list[Record], msgspec.Meta(max_length=16384)] = []


class DhtStore(Request[DhtStoreReply], frozen=True):
    """A node stores or renews records, hands them to a node that should hold them, or exchanges declarations.

    Attributes:
        records: the records that are to be held until they expire.
        find: once the records are held, return what is held for this key.
        of_peers: see `DhtFind`.
    """

    records: Annotated[list[Record], msgspec.Meta(max_length=256)]
    find: Key | None = None
    of_peers: bool = False


# --------------------------------------------------------------------------------------------------------- matchmaking


class Member(Message, frozen=True):
    """One member of a group, inside `Join` and `Begin`.

    Attributes:
        contact: the peer, and where it can be dialed.
        reduces: it can average tiles. False for a client, and for bandwidth 0.
        bandwidth: bytes/s, as its user says or its line has carried; None if the peer knows none.
        gathered: the peer's own MessagePack value for all others.
        contributes: it has values. False for an auxiliary peer, which wants no averages either; then `reduces` is true.
        reference: the round whose average is the last that this peer holds: its values may be coded against that.
            Empty if it holds none, or if its averager codes nothing against averages.
    """

    contact: Contact
    reduces: bool
    bandwidth: Bandwidth | None
    gathered: Annotated[bytes, msgspec.Meta(max_length=65536)]
    contributes: bool = True
    reference: Annotated[bytes, msgspec.Meta(max_length=16)] = b""


class JoinAccepted(Message, frozen=True):
    """The leader takes the asker in. The asker waits for `Begin` on this stream."""


class JoinRefused(Message, frozen=True):
    """The leader does not take the asker in, or counts it out again. It ends the stream.

    Attributes:
        code: `full`, `replaced` (the asker has asked again): the asker may ask again in a while. `not-looking`,
            `started`: it is too late. `too-few`, `no-reducer`: the leader gave up. `later`: the asker comes earlier in
            the order, and the one that it asked asks it. `declined`: the asker comes earlier, and the one that it asked
            does not follow it. `schema`, `settings`: the two can never be in one group.
        text: the reason, for people.
    """

    code: ShortText
    text: Annotated[str, msgspec.Meta(max_length=1024)]


class JoinRedirected(Message, frozen=True):
    """The peer that was asked follows another one itself. It ends the stream.

    Attributes:
        leader: the peer to ask instead.
    """

    leader: Contact


class Begin(Message, frozen=True):
    """The leader starts the group: this is the same for all members.

    Attributes:
        round_id: drawn at random.
        members: all members, in an order that the leader drew.
        coordinator: the index of the member whose `Commit` decides: the leader.
        shares: how many elements of the flat vector each member reduces, in order.
        tile_bytes: the upper bound of a tile, as encoded: the leader's `part_size_bytes`, or less on slow lines.
    """

    round_id: RoundID
    members: Annotated[list[Member], msgspec.Meta(max_length=MAX_GROUP_SIZE)]
    coordinator: MemberIndex
    shares: Annotated[list[Count], msgspec.Meta(max_length=MAX_GROUP_SIZE)]
    tile_bytes: Count


class Held(Message, frozen=True):
    """An average that a member holds, inside `Report`, `Commit` and `PartAverage`.

    Attributes:
        tile: the tile's number.
        attempt: the attempt under which it was averaged: from 0 to the number of members.
        contributors: the members that count in it: bit i mod 8, lowest first, of byte i div 8 is member i. There are
            ceil(members / 8) bytes, and no bits beyond the members.
        weight: the sum of their weights: above 0, and at most members × 1e12; 0 if nobody counts. Any other weight
            breaks the protocol.
        digest: 16 bytes of BLAKE3 with a key, SHA-256(`shoal parts` + round id): over the encoded average, then over
            the contributors, and then over tile, attempt (4 bytes each), weight (8 bytes, IEEE 754) and the length of
            the contributors (4 bytes), all big-endian. 16 zero bytes if nobody counts.
    """

    tile: TileNumber
    attempt: Attempt
    contributors: Annotated[bytes, msgspec.Meta(max_length=MAX_GROUP_SIZE // 8)]
    weight: Weight
    digest: TileDigest


class Report(Message, frozen=True):
    """A member reports to the coordinator.

    It does so at once when it holds all averages or has lost a source, 0.05 s after other news (in a group of n members
    n / 10,000 s, if that is longer), and every `report_s`.

    Attributes:
        held: averages that are newly held.
        lost: members that this one cannot get averages from.
        moved_bytes: bytes sent and received in this round so far. They show that a slow member is at work.
        signature: in a group of three or more, if the member has made one of these averages itself: with the context
            `report`, over the BLAKE3 digests of the round's encoded `Begin` and of the encoded list `held`. Else empty.
    """

    held: Annotated[list[Held], msgspec.Meta(max_length=MAX_TILES)] = []
    lost: Annotated[list[MemberIndex], msgspec.Meta(max_length=MAX_GROUP_SIZE)] = []
    moved_bytes: Count = 0
    signature: Annotated[bytes, msgspec.Meta(max_length=64)] = b""


class Shown(Message, frozen=True):
    """The coordinator shows a member, before the commit, what a reducer has signed of its averages.

    It does so where the member has reported another average of one of these tiles.

    Attributes:
        member: the reducer.
        report: its report, as far as it is signed.
    """

    member: MemberIndex
    report: Report


class Assign(Message, frozen=True):
    """The coordinator names another reducer, or another source, of some tiles.

    Attributes:
        tiles: the tiles' numbers.
        attempt: if it is higher than before, older bytes of these tiles are void, and all send their values again. If
            it is the same, `reducer` holds the averages already: ask it.
        reducer: the member that averages the tiles, or has the averages, from now on.
    """

    tiles: Annotated[list[TileNumber], msgspec.Meta(max_length=MAX_TILES)]
    attempt: Attempt
    reducer: MemberIndex


class Commit(Message, frozen=True):
    """The coordinator's verdict that the round succeeds with exactly these averages.

    It goes to all members, also to those that were left out, once each member that counts holds each tile.

    Attributes:
        round_id: the round.
        tiles: one entry for each tile, in order.
        signature: the coordinator's, with the context `commit`, over the BLAKE3 digest of the round's encoded `Begin`
            and the digest of the commit as `CommitDigest` has it. Empty in a group of two, where a member has nobody to
            compare its commit with.
    """

    round_id: RoundID
    tiles: Annotated[list[Held], msgspec.Meta(max_length=MAX_TILES)]
    signature: Annotated[bytes, msgspec.Meta(max_length=64)] = b""

    @property
    def unsigned(self) -> Commit:
        """What it says. A coordinator can make several signatures of it, so none is part of a name or of a digest."""
        return Commit(self.round_id, self.tiles)


class Abort(Message, frozen=True):
    """The coordinator's verdict that the round fails. It goes to all members.

    Attributes:
        round_id: the round.
        reason: why it fails.
    """

    round_id: RoundID
    reason: Annotated[str, msgspec.Meta(max_length=1024)]


class Gone(Message, frozen=True):
    """The coordinator has lost its connection with a member: who has none with it either waits for it no longer.

    Attributes:
        member: the lost member.
    """

    member: MemberIndex


class Leave(Message, frozen=True):
    """A follower leaves its leader before `Begin`. In a round it tells the coordinator that the member gave up."""


class Join(
    Opening[
        Report | Leave, JoinAccepted | JoinRefused | JoinRedirected | Begin | Assign | Gone | Shown | Commit | Abort
    ],
    frozen=True,
):
    """A searching peer asks an earlier one to lead it. After `Begin` the same stream carries the round's control.

    A peer also sends it to a later peer, a *nudge*: it is refused there, but makes the sender known.

    Attributes:
        group: the group key: `PREFIX.0bBITS[@tag]`.
        schema: zlib of MessagePack: shape, dtype and codec of each tensor (`shoal.layout.TensorSpec`).
        settings: named values that must be equal in the whole run.
        expiration: when the asker's own window ends: wall clock, seconds.
        member: the asker.
    """

    group: Name
    schema: Annotated[bytes, msgspec.Meta(max_length=1 << 20)]
    settings: Settings
    expiration: WallTime
    member: Member

    @property
    def scope(self) -> str:
        """The averager's prefix: the group key without its bits."""
        return self.group.rpartition(".0b")[0]


# ----------------------------------------------------------------------------------------------------------- all-reduce


class PartData(Message, frozen=True):
    """A member sends the reducer its values of a tile. In time it gets a `PartAverage`.

    The payload is the encoded values; there is none if the weight is 0.

    Attributes:
        tile: the tile's number.
        attempt: the attempt that the values are for: from 0 to the number of members.
        weight: how much the values count: 0, or 1e-9 to 1e12.
    """

    tile: TileNumber
    attempt: Attempt
    weight: Weight


class PartRequest(Message, frozen=True):
    """A member asks a holder for an average: after an `Assign` of the same attempt, or after the commit.

    The answer is `PartAverage` or `PartAbsent`.

    Attributes:
        tile: the tile's number.
        attempt: this attempt or a later one will do.
    """

    tile: TileNumber
    attempt: Attempt


class PartAverage(Message, frozen=True):
    """The reducer has averaged a tile, or a holder was asked for it. The payload is the encoded average.

    Attributes:
        held: the average that the payload is.
    """

    held: Held


class PartAbsent(Message, frozen=True):
    """The member that was asked does not have the average, and will not make it.

    Attributes:
        tile: as in the question.
        attempt: as in the question.
    """

    tile: TileNumber
    attempt: Attempt


class CommitDigest(Message, frozen=True):
    """In a group of three or more a member ends its stream to a reducer with it, after a round that succeeded.

    A reducer whose commit is another one answers with its own digest: the two signatures prove that the coordinator has
    lied. A member that sends a wrong signature breaks the protocol.

    Attributes:
        digest: BLAKE3 of the encoded `Commit`, with an empty signature.
        signature: of the `Commit`.
    """

    digest: Digest
    signature: Annotated[bytes, msgspec.Meta(min_length=64, max_length=64)]


class Reduce(Opening[PartData | PartRequest | CommitDigest, PartAverage | PartAbsent | CommitDigest], frozen=True):
    """Each member opens it to each reducer when the round begins, and when another reducer or source is named.

    Attributes:
        round_id: the round.
        terms: 16 bytes of BLAKE3 of the `Begin` that the opener got. A member that got another one refuses the stream,
            and names the leader. Empty: not said.
    """

    bulk: ClassVar[bool] = True

    round_id: RoundID
    terms: Annotated[bytes, msgspec.Meta(max_length=16)] = b""


class Verdict(Message, frozen=True):
    """What the answerer knows of the verdict. It remembers its last 64 rounds.

    Attributes:
        commit: the commit, if the answerer has it.
        may_learn: whether the answerer may still get it from the coordinator.
    """

    commit: Commit | None
    may_learn: bool


class AskVerdict(Request[Verdict], frozen=True):
    """A member that lost the coordinator, and does not know the verdict, asks every other member for it.

    A member that the coordinator calls gone is asked, too, as a sign that it is there.

    Attributes:
        round_id: the round.
    """

    round_id: RoundID


# ------------------------------------------------------------------------------------------------------------- progress


class Progress(Message, frozen=True):
    """The progress of one peer of a run: in the DHT under `RUN_ID_progress`, and inside `TellProgress`.

    Attributes:
        contact: the peer that says it.
        epoch: swarm steps in its parameters.
        digest: names its state.
        branch_samples: samples that went into the state.
        done: how much of the next step: samples accumulated since; if peers merge, thousandths of the way to the next
            merge. `strategies.pace.Pace.counts_samples` says which.
        rate: samples per second.
        time: the wall clock of the peer's machine, which it never lets go back. It only orders the peer's own messages.
        settings: values that must be equal in the whole run.
        end_epoch: where the run ends, as this peer concludes; None: nowhere yet.
        left: the peer takes part no more.
        check: the last check of the parameters: its epoch, the digest of the peer's own parameters, and the digest of
            those that they were found equal to (to rounding, if arithmetic differs).
        alone: the peer is connected with nobody else of the run, or took its last step alone, and is not meant to. For
            `shoal status`.
        parameters: at the end of the run: what the peer holds, described as for a check (`run.decide.check.Check`).
            Empty: it makes no check. None: it does not say it yet.
    """

    contact: Contact
    epoch: Epoch
    digest: Digest
    branch_samples: Samples
    done: Samples
    rate: Bandwidth
    time: WallTime
    settings: Settings
    end_epoch: Epoch | None = None
    left: bool = False
    check: tuple[Epoch, CheckDigest, CheckDigest] | None = None
    alone: bool = False
    parameters: Parameters | None = None


class Standing(Message, frozen=True):
    """A peer's word about another peer at its own state, inside `TellProgress` and `ProgressTold`.

    Attributes:
        peer: the other peer.
        done: as the other one said it in its `Progress`.
        time: when the other one said so, by its own wall clock.
    """

    peer: PeerID
    done: Samples
    time: WallTime


class ProgressTold(Message, frozen=True):
    """The answerer's own progress, at once.

    Attributes:
        progress: the answerer's.
        others: as in `TellProgress`.
    """

    progress: Progress
    others: Annotated[list[Standing], msgspec.Meta(max_length=4096)] = []


class TellProgress(Request[ProgressTold], frozen=True):
    """A peer tells another of its progress when something changed, as a call or in a `Note`, which gets no answer.

    Attributes:
        run_id: the run.
        progress: the caller's.
        others: the other peers at the caller's state, if together they have the samples of the next step, or if the
            caller tells another keeper.
    """

    run_id: Name
    progress: Progress
    others: Annotated[list[Standing], msgspec.Meta(max_length=4096)] = []

    @property
    def scope(self) -> str:
        """The run."""
        return self.run_id


FragmentNumber = Annotated[int, msgspec.Meta(ge=0, le=MAX_FRAGMENTS - 1)]
"""A fragment of the model, by its place in the order of its tensors."""


class Place(Message, frozen=True):
    """A peer's place in the chain of one fragment of the model: what differs from `Progress` of another fragment.

    Attributes:
        fragment: which one.
        epoch: as in `Progress`.
        digest: as in `Progress`.
        branch_samples: as in `Progress`.
        done: as in `Progress`.
        end_epoch: as in `Progress`.
        left: as in `Progress`.
        others: as in `TellProgress`.
        parameters: as in `Progress`.
    """

    fragment: FragmentNumber
    epoch: Epoch
    digest: Digest
    branch_samples: Samples
    done: Samples
    end_epoch: Epoch | None = None
    left: bool = False
    others: Annotated[list[Standing], msgspec.Meta(max_length=4096)] = []
    parameters: Parameters | None = None


Places = Annotated[list[Place], msgspec.Meta(max_length=MAX_FRAGMENTS)]


class ChainsTold(Message, frozen=True):
    """The answerer's own progress in the fragments that it was told of.

    Attributes:
        progress: the answerer's.
        places: as in `TellChains`.
    """

    progress: Progress
    places: Places


class TellChains(Request[ChainsTold], frozen=True):
    """The same as `TellProgress`, of several fragments of the model at once.

    Attributes:
        run_id: of the first fragment.
        progress: the caller's, of whichever fragment: what holds for all of them counts.
        places: in each of the fragments.
    """

    run_id: Name
    progress: Progress
    places: Places

    @property
    def scope(self) -> str:
        """The run."""
        return self.run_id


class Trainers(Message, frozen=True):
    """Some peers of the run that the answerer knows.

    Attributes:
        contacts: at most 16, drawn at random from the peers that can be dialed.
    """

    contacts: Annotated[list[Contact], msgspec.Meta(max_length=64)]


class WhoTrains(Request[Trainers], frozen=True):
    """A peer asks which peers of the run the other one knows: the DHT hides that one, and perhaps these.

    Attributes:
        run_id: the run.
    """

    run_id: Name

    @property
    def scope(self) -> str:
        """The run."""
        return self.run_id


# ---------------------------------------------------------------------------------------------------------------- state


MAX_KINDS = 1 << 13
"""No state has tensors of more shapes, dtypes and codecs."""

Shape = Annotated[list[Count], msgspec.Meta(max_length=32)]
StateTensor = tuple[Shape, Name, Name, Count]
Chunks = Annotated[list[Count], msgspec.Meta(max_length=1 << 15)]


class ManifestReply(Message, frozen=True):
    """The offer of a donor: one consistent snapshot.

    Attributes:
        snapshot: names the snapshot at this donor.
        epoch: the state's.
        metadata: plain values, in MessagePack.
        kinds: (shape, dtype, codec, encoded bytes) of each kind of tensor.
        order: the kind of each tensor, by its number: 4 bytes each, little-endian, packed by zlib. The state is their
            encodings one after another. A tensor is encoded in tiles of 1,048,576 elements; the last one is shorter.
        chunk_bytes: the size of every chunk but the last: 1 KiB to 16 MiB.
        hashes: BLAKE3 of each chunk.
        infinite: the positions of tensors that hold infinities, ascending.
    """

    snapshot: RoundID
    epoch: Epoch
    metadata: Annotated[bytes, msgspec.Meta(max_length=1 << 20)]
    kinds: Annotated[list[StateTensor], msgspec.Meta(max_length=MAX_KINDS)]
    order: Annotated[bytes, msgspec.Meta(max_length=1 << 20)]
    chunk_bytes: Count
    hashes: Annotated[list[Digest], msgspec.Meta(max_length=1 << 15)]
    infinite: Annotated[list[Count], msgspec.Meta(max_length=1 << 17)] = []


class ManifestPending(Message, frozen=True):
    """The donor has no snapshot for the asker yet: ask again.

    Attributes:
        busy: others take the state, too many of them or an older one, or too many copies were made. Otherwise the
            snapshot is being made, for more than 2 s already.
    """

    busy: bool


class GetManifest(Request[ManifestReply | ManifestPending], frozen=True):
    """A receiver asks a donor to snapshot its state and describe it. A donor that shares none refuses.

    Attributes:
        prefix: names the state.
        epoch: a state of an earlier epoch is of no use. A donor that others keep from making a new snapshot says
            `busy`.
    """

    prefix: Name
    epoch: Epoch = 0

    @property
    def scope(self) -> str:
        """The donor's prefix."""
        return self.prefix


class Chunk(Message, frozen=True):
    """The donor sends a piece of a chunk, as the payload. Chunks come in the order in which they were asked for.

    A chunk may come in several pieces, in order: so a slow donor still shows that it lives.

    Attributes:
        index: the chunk's number.
        offset: where in the chunk this piece begins.
    """

    index: Count
    offset: Count = 0


class MoreChunks(Message, frozen=True):
    """The receiver asks for more chunks, after those asked for before, when half of these have come.

    Attributes:
        chunks: their numbers, none of them twice on one stream.
    """

    chunks: Chunks


class FetchChunks(Opening[MoreChunks, Chunk], frozen=True):
    """A receiver asks a donor for chunks: those that are missing, or are late from another donor.

    The receiver says END when it wants no more.

    Attributes:
        prefix: names the state.
        snapshot: the snapshot.
        chunks: the chunks' numbers, in the order in which they are to come, none of them twice.
    """

    bulk: ClassVar[bool] = True

    prefix: Name
    snapshot: RoundID
    chunks: Chunks

    @property
    def scope(self) -> str:
        """The donor's prefix."""
        return self.prefix


# ---------------------------------------------------------------------------------------------------------------- steps


class StepsFrom(Message, frozen=True):
    """A member names a state first of all, and tells every step from there on.

    It is the state before the member's last step, if it has that step still; else its own, once no step is about to be
    taken.

    Attributes:
        epoch: of the state.
        digest: of the state.
        samples: in the state.
    """

    epoch: Epoch
    digest: Digest
    samples: Samples


class StepTaken(Message, frozen=True):
    """A round of the member was committed, or the member steps alone: all that names and makes the next state.

    Attributes:
        epoch: of the state before.
        digest: of the state before.
        samples: in the state before.
        agreement: MessagePack: the options of the step (None: each peer's own), the bits of the parameters that nobody
            had a gradient of, and the contributors. Empty if states were averaged.
        commit: the round's; None for a step alone.
        shares: how many elements of the vector each member owned.
        tile_bytes: the upper bound of a tile, as encoded.
        alone: for a step alone: 16 random bytes and the peer's id.
        alone_samples: for a step alone: the samples that went into it.
        raw: the averages are sent as they are in memory. Otherwise they are the encoded tiles, one after another.
        nbytes: the size of the averages.
    """

    epoch: Epoch
    digest: Digest
    samples: Samples
    agreement: Annotated[bytes, msgspec.Meta(max_length=65536)]
    commit: Commit | None
    shares: Annotated[list[Count], msgspec.Meta(max_length=MAX_GROUP_SIZE)]
    tile_bytes: Count
    alone: Annotated[bytes, msgspec.Meta(max_length=64)]
    alone_samples: Samples
    raw: bool
    nbytes: Count


class WantStep(Message, frozen=True):
    """The peer that is behind asks for the averages of a step that it has from nobody else.

    Attributes:
        digest: of the state before the step.
    """

    digest: Digest


class StepBytes(Message, frozen=True):
    """The member sends averages of a step that it keeps, as the payload.

    Attributes:
        digest: of the state before the step.
        offset: where in the averages this piece begins.
    """

    digest: Digest
    offset: Count


class StepGone(Message, frozen=True):
    """The member does not keep the step any more.

    Attributes:
        digest: of the state before the step.
    """

    digest: Digest


class FollowSteps(Opening[WantStep, StepsFrom | StepTaken | StepBytes | StepGone], frozen=True):
    """A peer that is behind asks two members to tell it of every step, and to keep the averages a little longer.

    Attributes:
        run_id: the run.
    """

    bulk: ClassVar[bool] = True

    run_id: Name

    @property
    def scope(self) -> str:
        """The run."""
        return self.run_id


# ---------------------------------------------------------------------------------------------------------------- debug

PlainInteger = Annotated[int, msgspec.Meta(ge=-MAX_SAMPLES, le=MAX_SAMPLES)]
PlainNumber = Annotated[float, msgspec.Meta(ge=-1e300, le=1e300)]
ShortTexts = Annotated[list[ShortText], msgspec.Meta(max_length=16)]
PlainValue = bool | PlainInteger | PlainNumber | ShortText | ShortTexts | None


class TraceEntry(Message, frozen=True):
    """One event of a flight recorder (`shoal.rpc.recorder`), inside `Trace`.

    Attributes:
        number: counts all events of the peer, from 0.
        at_s: seconds since the recorder began.
        kind: the name of the event's class.
        fields: what the event says: peer ids in full, other bytes as hexadecimal digits.
    """

    number: Count
    at_s: Duration
    kind: ShortText
    fields: Annotated[dict[ShortText, PlainValue], msgspec.Meta(max_length=16)]


class Trace(Message, frozen=True):
    """The content of the answerer's flight recorder.

    Attributes:
        peer: the answerer.
        pid: its process; 0 if the asker is on another machine.
        began: when the recorder began: wall clock, seconds.
        now_s: seconds since then.
        entries: the last events, oldest first: as many as fit into 512 KiB.
    """

    peer: PeerID
    pid: Count
    began: WallTime
    now_s: Duration
    entries: Annotated[list[TraceEntry], msgspec.Meta(max_length=1000)]


class GetTrace(Request[Trace], frozen=True):
    """A user runs `shoal debug dump`. Within a second of another such call the answer is `busy`.

    Attributes:
        last: at most so many of the latest events.
    """

    last: Count = 1000
