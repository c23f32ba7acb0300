"""The right to write a record: signatures, entries that name a peer, schemas, and how validators compose."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from shoal.dht.routing import key_of
from shoal.dht.validation import (
    RECORD_CONTEXT,
    CompositeValidator,
    RecordRules,
    SchemaValidator,
    Subkey,
    decode_subkey,
    decode_value,
    encode_subkey,
    encode_value,
    named_peer,
    signed_record,
)
from shoal.errors import ConfigError
from shoal.protocol.identity import Identity
from shoal.protocol.wire import Record, decode, encode

ALICE = Identity.from_seed(bytes(32))
BOB = Identity.from_seed(bytes(31) + b"\x01")
KEY = key_of("key")
RULES = RecordRules()


def signed(identity: Identity = ALICE, subkey: Subkey | None = None, value: object = 1) -> Record:
    """A record as `store` makes it."""
    name = None if subkey is None else encode_subkey(subkey)
    return signed_record(identity, KEY, name, encode_value(value), 2000)


def changed(record: Record, **fields: Any) -> Record:
    """The same record with other fields, its signature kept."""
    return msgspec.structs.replace(record, **fields)


@pytest.mark.parametrize("subkey", [None, "text", b"bytes", 7, -1, 2**63, "", b"", ALICE.peer_id.to_bytes()])
def test_signed_record_is_accepted(subkey: Subkey | None) -> None:
    """As it was made, also after a journey over the wire."""
    record = signed(subkey=subkey)
    assert RULES.refuses(record) == ""
    assert RULES.refuses(decode(encode(record), Record)) == ""
    assert record.owner == ALICE.peer_id
    assert isinstance(record.expiration, float)


@pytest.mark.parametrize(
    "fields",
    [
        {"key": key_of("another key")},
        {"subkey": encode_subkey("other")},
        {"subkey": None},
        {"value": encode_value(2)},
        {"expiration": 2001.0},
        {"expiration": math.nextafter(2000.0, math.inf)},
        {"owner": BOB.peer_id},
        {"signature": b""},
        {"signature": bytes(64)},
        {"signature": b"short"},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_any_change_breaks_the_signature(fields: dict[str, Any]) -> None:
    """Nobody can move, alter or renew another's record: a replay with a later expiration is refused."""
    assert RULES.refuses(changed(signed(subkey="mine"), **fields)) == "wrong signature"


def test_signature_for_another_purpose_is_worth_nothing() -> None:
    """The same bytes signed for something else are not a record."""
    record = signed()
    body = encode((record.key, record.subkey, record.value, record.expiration))
    assert ALICE.sign(RECORD_CONTEXT, body) == record.signature
    assert RULES.refuses(changed(record, signature=ALICE.sign(b"handshake", body))) == "wrong signature"


def test_entry_that_names_a_peer_can_only_be_its_own() -> None:
    """Neither another peer nor nobody can write it."""
    mine = signed(ALICE, ALICE.peer_id.to_bytes())
    assert named_peer(mine) == ALICE.peer_id
    assert RULES.refuses(mine) == ""
    refusal = "the subkey names a peer that does not own the record"
    assert RULES.refuses(signed(BOB, ALICE.peer_id.to_bytes())) == refusal
    assert RULES.refuses(changed(mine, owner=None, signature=b"")) == refusal


def test_text_and_bytes_of_another_length_name_nobody() -> None:
    """The convention is 32 bytes, nothing else."""
    assert named_peer(signed(subkey=str(ALICE.peer_id))) is None
    assert named_peer(signed(subkey=ALICE.peer_id.to_bytes()[:31])) is None
    assert named_peer(signed()) is None


def test_unsigned_record_is_accepted_where_it_names_nobody() -> None:
    """But not with a signature that belongs to no one."""
    plain = Record(KEY, None, encode_value(1), 2000.0)
    assert RULES.refuses(plain) == ""
    assert RULES.refuses(changed(plain, signature=b"x")) == "signed, but without the peer that signed it"


@pytest.mark.parametrize(
    "raw",
    [
        b"\xc5\x00\x20" + ALICE.peer_id.to_bytes(),  # 32 bytes in a longer encoding: the same name, another entry
        b"\xcc\x07",  # 7 in two bytes
        b"\xd9\x01a",
        b"\xc3",  # True
        b"\x91\x01",
        b"\xcb" + bytes(8),  # 0.0
        b"",
        b"\xc1",
        b"\x01\x01",
        b"\xa1\xff",
        b"\x91" * 256,
    ],
)
def test_subkey_in_any_but_its_shortest_encoding_is_refused(raw: bytes) -> None:
    """Else one could write beside an entry what reads as the entry itself."""
    with pytest.raises(ValueError, match=r"subkey|value"):
        decode_subkey(raw)
    assert RULES.refuses(Record(KEY, raw, encode_value(1), 2000.0)) != ""


@pytest.mark.parametrize("subkey", ["", "ключ", b"", bytes(32), 0, -1, 127, 128, -(2**63), 2**64 - 1])
def test_subkeys_come_back_as_they_were(subkey: Subkey) -> None:
    """With their type."""
    read = decode_subkey(encode_subkey(subkey))
    assert read == subkey
    assert type(read) is type(subkey)


@pytest.mark.parametrize("subkey", [True, 1.5, ("a",), 2**64, "x" * 300, "\ud800", None])
def test_impossible_subkeys_are_the_callers_mistake(subkey: Any) -> None:
    """Told before anything is sent."""
    with pytest.raises(ConfigError, match="subkey"):
        encode_subkey(subkey)


@pytest.mark.parametrize("value", [None, True, -5, 2.5, "text", b"bytes", [1, [2]], {"a": {"b": [None]}}])
def test_values_come_back_as_they_were(value: object) -> None:
    """All that MessagePack knows."""
    assert decode_value(encode_value(value)) == value


@pytest.mark.parametrize("value", [object(), 2**64, "x" * 65536, "\ud800", {1j}])
def test_impossible_values_are_the_callers_mistake(value: object) -> None:
    """Told before anything is sent."""
    with pytest.raises(ConfigError, match="value"):
        encode_value(value)


def test_numpy_scalars_are_refused_in_store() -> None:
    """Not any more: numbers of numpy and torch, alone or within, come back as Python's own; arrays do not."""
    for number in (np.float32(0.5), np.int64(-3), np.bool_(True), torch.tensor(0.25), np.str_("text")):
        for value in (number, [number], {"a": {"b": number}}):
            read = decode_value(encode_value(value))
            while isinstance(read, list | dict):
                read = next(iter(read.values() if isinstance(read, dict) else read))
            assert read == number
            assert type(read) in (float, int, bool, str)
    assert decode_value(encode_value({np.int64(3): 1})) == {3: 1}
    assert decode_subkey(encode_subkey(np.int64(3))) == 3  # type: ignore[arg-type]
    arrays: tuple[object, ...] = (np.zeros(1), torch.zeros(2), np.longdouble(1), torch.zeros((), device="meta"))
    for array in arrays:
        with pytest.raises(ConfigError, match="value cannot be stored"):
            encode_value(array)


def test_endless_value_is_the_callers_mistake() -> None:
    """A list that holds itself."""
    endless: list[object] = []
    endless.append(endless)
    with pytest.raises(ConfigError, match="value"):
        encode_value(endless)


@pytest.mark.parametrize("raw", [b"", b"\xc1", b"\x91", b"\x91" * 65536, b"\x01\x02"])
def test_values_that_nobody_could_read_are_refused(raw: bytes) -> None:
    """Not MessagePack, cut short, endlessly nested, or followed by more."""
    with pytest.raises(ValueError, match="undecodable"):
        decode_value(raw)
    assert RULES.refuses(Record(KEY, None, raw, 2000.0)) != ""


@pytest.mark.parametrize("expiration", [math.nan, math.inf, -math.inf])
def test_expirations_that_are_no_times_are_refused(expiration: float) -> None:
    """They would compare with nothing, or never end."""
    assert RULES.refuses(Record(KEY, None, encode_value(1), expiration)) == "expiration is not a number"


class Says:
    """A validator that always says the same, and counts how often it was asked."""

    def __init__(self, answer: str) -> None:
        self.answer, self.asked = answer, 0

    def refuses(self, record: Record) -> str:
        self.asked += 1
        return self.answer


def test_all_validators_have_to_agree_and_the_first_refusal_counts() -> None:
    """Later ones are not asked any more."""
    yes, no, never = Says(""), Says("no"), Says("never")
    rules = CompositeValidator([yes])
    assert rules.refuses(signed()) == ""
    rules.add(no, never)
    assert rules.refuses(signed()) == "no"
    assert (yes.asked, no.asked, never.asked) == (2, 1, 0)


def test_several_schema_validators_must_all_agree() -> None:
    """Not any more: one of them is enough. Other validators still have to agree."""
    rules = CompositeValidator([SchemaValidator({"key": int}), Says("")])
    rules.add(SchemaValidator({"key": str}))
    assert rules.refuses(signed(value=1)) == ""
    assert rules.refuses(signed(value="text")) == ""
    assert "schema" in rules.refuses(signed(value=b"bytes"))
    rules.add(Says("no"))
    assert rules.refuses(signed(value=1)) == "no"


def test_validator_that_fails_refuses_the_record() -> None:
    """What it choked on came from the network: no reason to fall over."""

    class Broken:
        def refuses(self, record: Record) -> str:
            raise KeyError(record.value)

    assert CompositeValidator([Broken()]).refuses(signed()) == "Broken failed: KeyError"
