"""The form of a record, the peers that may write it, and the other rules for it.

A record's value and subkey are MessagePack. A subkey is text, bytes or an integer, in its one shortest encoding, so
that two subkeys that read the same are the same entry.

**Signatures.** A record with an owner is signed by it over (key, subkey, value, expiration), for the purpose
`RECORD_CONTEXT`: nobody else can change any of these, nor renew the record. This node signs all that it writes.

**Entries that name a peer.** A subkey of exactly 32 *bytes* names the peer with these bytes as its id
(`subkey=peer_id`). Only that peer can write the entry. Other subkeys, and keys without subkeys, belong to
nobody: the writer with the later expiration wins.

**Validators** refuse a record by returning a text. Nodes ask them before they hold a record and before they believe one
that they were given. All validators must agree; only of schemas (`SchemaValidator`) one is enough. Nodes with
different validators live in one network: each keeps its own rules.

**Schemas.** A key whose type is `dict[K, V]` is a dictionary: its entries have subkeys of type K and values of type V,
and no plain value hides it. Any other type is that of a plain value. Types are met as they are: nothing is converted,
but a whole number is a `float` too.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral
from typing import Any, Protocol, get_args, get_origin, get_type_hints

import msgspec

from shoal.base.peer import PEER_ID_BYTES, PeerID
from shoal.base.warning_names import named
from shoal.dht.routing import key_of
from shoal.errors import ConfigError
from shoal.protocol.identity import Identity, verify
from shoal.protocol.wire import Record, decode_plain, encode, encode_plain

__all__ = [
    "MAX_SUBKEY_BYTES",
    "MAX_VALUE_BYTES",
    "RECORD_CONTEXT",
    "CompositeValidator",
    "RecordRules",
    "RecordValidator",
    "SchemaValidator",
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
            except BaseException as error:
                # A validator is the user's code. If it raises, the record from the network is at fault.
                _logger.warning(named("%s failed on a record"), type(validator).__name__, exc_info=error)
                return f"{type(validator).__name__} failed: {type(error).__name__}"
            if refusal:
                return refusal
        return ""


# ------------------------------------------------------------------------------------------------------------ schemas


class SchemaValidator:
    """Refuses records that do not fit the type of their key. With several schemas on a node, fitting one is enough.

    Args:
        schema: the type of each key: a mapping, or a class whose annotations are read. A type is anything that
            `msgspec` can convert to, such as `int`, `dict[str, Annotated[int, msgspec.Meta(ge=0)]]` or a
            `msgspec.Struct`. A pydantic model (of either version) judges by its own fields.
        allow_extra_keys: let keys pass that are in no schema. With several schemas it is enough that one lets them
            pass. False also refuses shoal's own records: averagers and optimizers of such a peer do not work.
        prefix: put before the name of each key, with `_`.

    Attributes:
        kinds: the checks of the allowed types for each key, by the key's hash.

    Raises:
        ConfigError: a type cannot be checked; names its key.
    """

    def __init__(
        self,
        schema: Mapping[Any, Any] | type,
        allow_extra_keys: bool = True,  # noqa: FBT002 (in hivemind's order)
        prefix: str | None = None,
    ) -> None:
        self.allow_extra_keys = allow_extra_keys
        self.kinds = {key_of(_prefixed(key, prefix)): [kind] for key, kind in _kinds_of(schema).items()}

    def union(self, other: SchemaValidator) -> SchemaValidator:
        """A schema that accepts all records that either of the two accepts."""
        both = SchemaValidator({}, self.allow_extra_keys or other.allow_extra_keys)
        for each in (self, other):
            for key, kinds in each.kinds.items():
                both.kinds.setdefault(key, []).extend(kinds)
        return both

    def refuses(self, record: Record) -> str:
        """Why the record is not accepted; empty if it is."""
        kinds = self.kinds.get(record.key)
        if kinds is None:
            return "" if self.allow_extra_keys else "its key is in no schema"
        misfits = [misfit(record) for misfit in kinds]
        return "" if "" in misfits else f"value does not fit its schema: {misfits[0]}"


Misfit = Callable[[Record], str]
"""The fault of a record under a key of some type; empty if there is none."""


def _typed(kind: Any) -> Misfit:
    """The check of a type that msgspec knows. Raises `TypeError` if it does not."""
    subkeys: msgspec.msgpack.Decoder[Any] | None = None
    if get_origin(kind) in (dict, Mapping) or kind in (dict, Mapping):
        of_subkey, kind = get_args(kind) or (Any, Any)
        subkeys = msgspec.msgpack.Decoder(of_subkey)
    values = msgspec.msgpack.Decoder(kind)

    def misfit(record: Record) -> str:
        if (wrong := _wrong_shape(record, dictionary=subkeys is not None)) != "":
            return wrong
        try:
            if subkeys is not None:
                subkeys.decode(record.subkey or b"")
            values.decode(record.value)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            return str(error)
        return ""

    return misfit


def _field(model: Any, name: str, kind: Any) -> Misfit:
    """The check of a field of a pydantic model. shoal does without pydantic: the model brings it along."""
    dictionary = get_origin(kind) in (dict, Mapping) or kind in (dict, Mapping)

    def misfit(record: Record) -> str:
        if (wrong := _wrong_shape(record, dictionary=dictionary)) != "":
            return wrong
        value = decode_value(record.value)
        if record.subkey is not None:
            value = {decode_subkey(record.subkey): value}
        try:
            if hasattr(model, "__pydantic_validator__"):
                draft = model.model_construct()
                model.__pydantic_validator__.validate_assignment(draft, name, value, strict=True)
                return ""
            parsed, errors = model.__fields__[name].validate(value, {}, loc=name)
        except (ValueError, TypeError, RecursionError) as error:  # pydantic's own are ValueErrors
            return str(error)
        if errors:
            return str(getattr(errors, "exc", errors))
        return "" if parsed == value else f"{value!r:.80} would have to be converted to {parsed!r:.80}"

    return misfit


def _wrong_shape(record: Record, *, dictionary: bool) -> str:
    if dictionary and record.subkey is None:
        return "its key is that of a dictionary: give a subkey"
    return "its key is that of a plain value: give no subkey" if not dictionary and record.subkey is not None else ""


def _kinds_of(schema: Mapping[Any, Any] | type) -> dict[str | bytes, Misfit]:
    if hasattr(schema, "__pydantic_validator__") or hasattr(schema, "parse_obj"):
        fields = getattr(schema, "__pydantic_fields__", None) or schema.__fields__  # type: ignore[union-attr]
        return {name: _field(schema, name, field.annotation) for name, field in fields.items()}
    hints: Mapping[Any, Any] = schema if isinstance(schema, Mapping) else get_type_hints(schema, include_extras=True)
    kinds: dict[str | bytes, Misfit] = {}
    for key, kind in hints.items():
        try:
            kinds[key] = _typed(kind)
        except TypeError as error:
            raise ConfigError(f"the schema's type for key {key!r} cannot be checked: {error}") from error
    return kinds


def _prefixed(key: str | bytes, prefix: str | None) -> str | bytes:
    if prefix is None:
        return key
    return f"{prefix}_{key}" if isinstance(key, str) else f"{prefix}_".encode() + key
