"""The form of a record, the peers that may write it, and the other rules for it.

A record's value and subkey are MessagePack. A subkey is text, bytes or an integer, in its one shortest encoding, so
that two subkeys that read the same are the same entry.

**Signatures.** A record with an owner is signed by it over (key, subkey, value, expiration), for the purpose
`RECORD_CONTEXT`: nobody else can change any of these, nor renew the record. This node signs all that it writes.

**Entries that name a peer.** A subkey of exactly 32 *bytes* names the peer with these bytes as its id
(`subkey=peer_id.to_bytes()`). Only that peer can write the entry. Other subkeys, and keys without subkeys, belong to
nobody: the writer with the later expiration wins.

**Validators** refuse a record by returning a text. Nodes ask them before they hold a record and before they believe one
that they were given. All validators must agree; only of schemas (`shoal.dht.schema`) one is enough. Nodes with
different validators live in one network: each keeps its own rules.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from numbers import Integral
from typing import Any, Protocol

import msgspec

from shoal.errors import ConfigError
from shoal.identity import Identity, verify
from shoal.peer import PEER_ID_BYTES, PeerID
from shoal.wire import Record, decode_plain, encode, encode_plain

__all__ = [
    "MAX_SUBKEY_BYTES",
    "MAX_VALUE_BYTES",
    "RECORD_CONTEXT",
    "CompositeValidator",
    "RecordRules",
    "RecordValidator",
    "Subkey",
    "check_validators",
    "decode_subkey",
    "decode_value",
    "encode_subkey",
    "encode_value",
    "named_peer",
    "signed_record",
]

RECORD_CONTEXT = b"dht record"
"""The context of record signatures: a signature made for anything else is worth nothing here."""

MAX_VALUE_BYTES = 65536
MAX_SUBKEY_BYTES = 256

Subkey = str | bytes | int
"""The type of a subkey, the name of a dictionary's entry."""

_logger = logging.getLogger("shoal.dht")


# ------------------------------------------------------------------------------------------------ values and subkeys


def encode_value(value: object) -> bytes:
    """A value as it lies in a record.

    Raises:
        ConfigError: MessagePack cannot encode it, or it is longer than 64 KiB.
    """
    try:
        data = encode_plain(value)
    except ValueError as error:
        raise ConfigError(f"value cannot be stored in the DHT: {error}") from None
    if len(data) > MAX_VALUE_BYTES:
        raise ConfigError(f"value is {len(data)} bytes when encoded, a record holds {MAX_VALUE_BYTES}: store less")
    return data


def decode_value(data: bytes) -> Any:
    """The value of a record.

    Raises:
        ValueError: it is not MessagePack.
    """
    try:
        return decode_plain(data)
    except (ValueError, TypeError, msgspec.MsgspecError) as error:
        raise ValueError(f"undecodable value: {error}") from None


def encode_subkey(subkey: Subkey) -> bytes:
    """A subkey as it lies in a record.

    Raises:
        ConfigError: it is not text, bytes or a 64-bit integer, or is too long.
    """
    if isinstance(subkey, bool) or not isinstance(subkey, str | bytes | Integral):
        raise ConfigError(f"subkey must be str, bytes or int, got {type(subkey).__name__}")
    try:
        data = encode_plain(subkey)
    except ValueError as error:
        raise ConfigError(f"subkey {subkey!r:.80} cannot be encoded: {error}") from None
    if len(data) > MAX_SUBKEY_BYTES:
        raise ConfigError(f"subkey is {len(data)} bytes when encoded, the most is {MAX_SUBKEY_BYTES}")
    return data


def decode_subkey(data: bytes) -> Subkey:
    """Read a subkey back.

    Raises:
        ValueError: it is not a subkey in its shortest encoding.
    """
    subkey = decode_value(data)
    if isinstance(subkey, bool) or not isinstance(subkey, str | bytes | int) or msgspec.msgpack.encode(subkey) != data:
        raise ValueError("subkey is not text, bytes or an integer in its shortest encoding")
    return subkey


def named_peer(record: Record) -> PeerID | None:
    """The peer that the record's subkey names, and that must own it; None if it names none.

    Raises:
        ValueError: the subkey is malformed.
    """
    subkey = decode_subkey(record.subkey) if record.subkey is not None else None
    return PeerID(subkey) if isinstance(subkey, bytes) and len(subkey) == PEER_ID_BYTES else None


# --------------------------------------------------------------------------------------------------------- signatures


def _signed_bytes(key: bytes, subkey: bytes | None, value: bytes, expiration: float) -> bytes:
    return encode((key, subkey, value, expiration))


def signed_record(identity: Identity, key: bytes, subkey: bytes | None, value: bytes, expiration: float) -> Record:
    """A record owned and signed by `identity`. All but `expiration` as they are on the wire."""
    expiration = float(expiration)
    signature = identity.sign(RECORD_CONTEXT, _signed_bytes(key, subkey, value, expiration))
    return Record(key, subkey, value, expiration, identity.peer_id, signature)


# --------------------------------------------------------------------------------------------------------- validators


class RecordValidator(Protocol):
    """Decides whether this node accepts a record."""

    def refuses(self, record: Record) -> str:
        """Why the record is not accepted, in a phrase that its sender is told; empty if it is accepted."""
        ...


def check_validators(validators: Iterable[RecordValidator] | None) -> tuple[RecordValidator, ...]:
    """The validators that a user gives; raises `ConfigError` for one that would accept everything unasked."""
    if not isinstance(validators, Iterable | None):
        raise ConfigError(f"record_validators must be a list of validators, got {validators!r:.80}")
    given = tuple(validators or ())
    for each in given:
        if getattr(type(each), "refuses", RecordValidator.refuses) is RecordValidator.refuses:
            raise ConfigError(f"record validator {type(each).__name__} must have a method refuses(record) -> str")
    return given


class RecordRules:
    """The rules of every node: a record can be read, and no peer writes in another's name."""

    def refuses(self, record: Record) -> str:
        if not math.isfinite(record.expiration):
            return "expiration is not a number"
        try:
            decode_value(record.value)
            named = named_peer(record)
        except ValueError as error:
            return str(error)
        if named is not None and record.owner != named:
            return "the subkey names a peer that does not own the record"
        if record.owner is None:
            return "signed, but without the peer that signed it" if record.signature else ""
        signed = _signed_bytes(record.key, record.subkey, record.value, record.expiration)
        return "" if verify(record.owner, RECORD_CONTEXT, signed, record.signature) else "wrong signature"


class CompositeValidator:
    """Accepts a record that all its validators accept; they are asked in order, up to the first refusal.

    Validators of one kind that has a `union` (schemas) count as one: together they accept all records that one of them
    accepts.

    Args:
        validators: the first ones; `add` takes more.
    """

    def __init__(self, validators: Iterable[RecordValidator] = ()) -> None:
        self._validators: list[RecordValidator] = []
        self.add(*validators)

    def add(self, *validators: RecordValidator) -> None:
        """Ask these, too, from now on."""
        for new in validators:
            for place, old in enumerate(self._validators):
                if type(old) is type(new) and (union := getattr(old, "union", None)) is not None:
                    self._validators[place] = union(new)
                    break
            else:
                self._validators.append(new)

    def refuses(self, record: Record) -> str:
        for validator in self._validators:
            try:
                refusal = validator.refuses(record)
            except Exception as error:
                # A validator is the user's code. If it raises, the record from the network is at fault.
                _logger.warning("%s failed on a record", type(validator).__name__, exc_info=error)
                return f"{type(validator).__name__} failed: {type(error).__name__}"
            if refusal:
                return refusal
        return ""
