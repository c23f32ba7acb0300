"""`SchemaValidator`: values and entries, subkeys, prefixes, extra keys, several schemas, and pydantic's models."""

import sys
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
import pydantic
import pytest

from shoal.dht.routing import key_of
from shoal.dht.validation import SchemaValidator, Subkey, encode_subkey, encode_value
from shoal.errors import ConfigError
from shoal.protocol.wire import Record


def record(key: str | bytes, value: object, subkey: Subkey | None = None) -> Record:
    """One that nobody has signed."""
    return Record(key_of(key), None if subkey is None else encode_subkey(subkey), encode_value(value), 1.0)


class Progress(msgspec.Struct):
    """What a peer says of itself."""

    epoch: int
    samples: int


class Plain:
    """A schema as a class."""

    name: bytes
    batches: dict[bytes, Annotated[int, msgspec.Meta(ge=0)]]
    progress: Progress


def version_1() -> Any:
    """The same for pydantic 1, as hivemind's users have it."""
    if sys.version_info >= (3, 14):
        pytest.skip("pydantic has its version 1 for Python 3.13 at most")
    import pydantic.v1 as pydantic_1

    class Version1(pydantic_1.BaseModel):
        name: bytes
        batches: dict[bytes, pydantic_1.conint(strict=True, ge=0)]  # type: ignore[valid-type]
        progress: dict[str, pydantic_1.StrictInt]

    return Version1


class Version2(pydantic.BaseModel):
    """The same for pydantic 2."""

    name: bytes
    batches: dict[bytes, Annotated[int, pydantic.Field(ge=0)]]
    progress: dict[str, int]


MAPPING: dict[str, Any] = {
    "name": bytes,
    "batches": dict[bytes, Annotated[int, msgspec.Meta(ge=0)]],
    "progress": Progress,
}


@pytest.mark.parametrize(
    "schema", [lambda: MAPPING, lambda: Plain, version_1, lambda: Version2], ids=["mapping", "class", "v1", "v2"]
)
def test_values_and_entries_have_the_types_of_their_keys(schema: Callable[[], Any]) -> None:
    """However the schema is written: type, bounds, type of the subkey, and whether there is one."""
    rules = SchemaValidator(schema())
    for good in (
        record("name", b"bytes"),
        record("batches", 7, b"one"),
        record("batches", 0, b"two"),
        record("other", "anything"),
        record("other", "anything", "at all"),
    ):
        assert rules.refuses(good) == ""
    for bad in (
        record("name", 7),
        record("name", b"bytes", b"subkey"),
        record("batches", -7, b"one"),
        record("batches", b"seven", b"one"),
        record("batches", 7.0, b"one"),
        record("batches", 7, 7),
        record("batches", 7),
        record("batches", {b"one": 7}),
    ):
        assert rules.refuses(bad).startswith("value does not fit its schema: "), bad


def test_a_struct_is_a_plain_value() -> None:
    """Though it is written as a dictionary."""
    rules = SchemaValidator(MAPPING)
    assert rules.refuses(record("progress", {"epoch": 1, "samples": 2})) == ""
    assert "epoch" in rules.refuses(record("progress", {"epoch": "one", "samples": 2}))
    assert "give no subkey" in rules.refuses(record("progress", {"epoch": 1, "samples": 2}, "entry"))


def test_a_prefix_stands_before_every_key() -> None:
    """With `_`, before keys of text and of bytes; keys without it are extra keys."""
    rules = SchemaValidator({"count": int, b"raw": bytes}, prefix="run")
    assert rules.refuses(record("run_count", 1)) == rules.refuses(record(b"run_raw", b"")) == ""
    assert rules.refuses(record("count", "text")) == ""
    assert "schema" in rules.refuses(record("run_count", "text"))
    assert "schema" in rules.refuses(record(b"run_raw", "text"))


def test_extra_keys_are_let_in_or_not() -> None:
    """Of several schemas one that lets them in is enough."""
    strict = SchemaValidator({"count": int}, allow_extra_keys=False)
    assert strict.refuses(record("count", 1)) == ""
    assert strict.refuses(record("other", 1)) == "its key is in no schema"
    assert strict.union(SchemaValidator({"other": int}, False)).refuses(record("other", 1)) == ""
    assert strict.union(SchemaValidator({})).refuses(record("third", 1)) == ""


def test_several_schemas_of_one_key_accept_what_one_accepts() -> None:
    """The refusal tells what the first one says. The two that were united stay what they were."""
    one, other = SchemaValidator({"key": int}), SchemaValidator({"key": dict[str, int]})
    both = one.union(other)
    assert both.refuses(record("key", 1)) == both.refuses(record("key", 1, "entry")) == ""
    assert "Expected `int`" in both.refuses(record("key", "text"))
    assert one.refuses(record("key", 1, "entry")) != ""
    assert other.refuses(record("key", 1)) != ""


def test_a_dictionary_of_anything_is_one_still() -> None:
    """Without types there is only the rule that it has subkeys."""
    rules = SchemaValidator({"key": dict})
    assert rules.refuses(record("key", [1], "entry")) == ""
    assert rules.refuses(record("key", [1])) != ""


def test_a_type_that_cannot_be_checked_is_named() -> None:
    """With its key."""
    with pytest.raises(ConfigError, match="type for key 'key' cannot be checked"):
        SchemaValidator({"key": {1: 2}})
