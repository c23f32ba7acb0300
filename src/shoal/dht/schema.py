"""Rules for the types of the records under a key.

A key whose type is `dict[K, V]` is a dictionary: its entries have subkeys of type K and values of type V, and no plain
value hides it. Any other type is that of a plain value. Types are met as they are: nothing is converted, but a whole
number is a `float` too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, get_args, get_origin, get_type_hints

import msgspec

from shoal.dht.routing import key_of
from shoal.dht.validation import decode_subkey, decode_value
from shoal.errors import ConfigError
from shoal.wire import Record

__all__ = ["SchemaValidator"]


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
    """For a type that msgspec knows. Raises `TypeError` if it does not."""
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
    """For a field of a pydantic model. shoal does without pydantic: the model brings it along."""
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
