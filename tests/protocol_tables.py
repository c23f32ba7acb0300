"""Fills the tables of `docs/why/protocol.md` and `docs/reference/arguments.md` from the code: ``make tables``.

A table stands between the lines ``<!-- generated: KIND NAME -->`` and ``<!-- end -->``. Its texts stand in the code:

============================  =================================================================================
kind and name                 the table
============================  =================================================================================
``messages MODULE [GROUP]``   each message of the module, or of the part of it below the comment ``# --- GROUP``: its
                              docstring, and its fields with their types and the texts of ``Attributes:``
``settings CLASS [MAKER]``    the fields of a class, with their defaults and the texts of ``Attributes:``; and the
                              arguments of the class MAKER that set them, as its ``__init__`` says
``arguments NAME``            the arguments of a class or function, with their defaults and the texts of ``Args:``
``docstring NAME``            its docstring, as it is
``members ENUM``              the members of an enum, with their docstrings
``constants``                 the constants that the table names already, with their values and docstrings: to add
                              one, add a row with its name
``transitions MODULE.NAME``   a mapping of (phase, event, next phase) to when a machine goes that way
``text MODULE.NAME``          the Markdown that this function returns
============================  =================================================================================
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import inspect
import re
import textwrap
import types
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import msgspec

from shoal.averaging.timeouts import TIMEOUTS
from shoal.base.peer import Address, PeerID
from shoal.protocol import wire

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "why" / "protocol.md"
ARGUMENTS = ROOT / "docs" / "reference" / "arguments.md"

_BLOCK = re.compile(r"<!-- generated: (\w+) ?(.*?) -->\n(.*?)<!-- end -->\n", re.DOTALL)
_CONSTANT = re.compile(r"^\| `([\w.]+)` \|", re.MULTILINE)
_SIZES = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
_WORDS: dict[Any, str] = {None: "none", True: "true", False: "false", msgspec.NODEFAULT: "required", "": "empty"}
_NAMES = {PeerID: "peer id", Address: "address", bytes: "bytes", str: "text", msgspec.Raw: "raw"}

Rows = Iterator[tuple[str, ...]]


def filled(page: str) -> str:
    """The page with every table made anew.

    Raises:
        KeyError, AttributeError, ImportError: a kind of table, code, or its docstring does not exist.
    """

    def block(found: re.Match[str]) -> str:
        kind, name, old = found.groups()
        if kind == "text":
            made = named(name)().rstrip("\n") + "\n"
        elif kind == "docstring":
            made = inspect.cleandoc(named(name).__doc__) + "\n"
        elif kind == "constants":
            made = table(constants(_CONSTANT.findall(old)))
        else:
            made = table(KINDS[kind](*name.split(" ", 1)))
        head = found[0].partition("\n")[0]
        return f"{head}\n\n{made}\n<!-- end -->\n"

    return _BLOCK.sub(block, page)


def table(rows: Iterable[tuple[str, ...]]) -> str:
    """A table of markdown; the first row is its head."""
    head, *body = rows
    lines = [head, ("---",) * len(head), *body]
    return "".join(f"| {' | '.join(cells)} |\n".replace("|  |", "| |").replace("|  |", "| |") for cells in lines)


# ------------------------------------------------------------------------------------------------------ kinds of table


def messages(module: str, group: str = "") -> Rows:
    """Every message of the module or of one part of it, in order."""
    yield "message", "field", "type", "meaning"
    for kind in structs(module, group):
        text, fields = documented(kind)
        yield f"`{kind.__struct_config__.tag}`", "", _role(kind), text
        hints = get_type_hints(kind, include_extras=True)
        for field in msgspec.structs.fields(kind):
            default = f"; default {_default(field.name, field)}" if _has_default(field) else ""
            yield "", f"`{field.name}`", type_text(hints[field.name]) + default, fields[field.name]


def settings(name: str, maker: str = "") -> Rows:
    """Every field of a class, in order; and the arguments of `maker` from which it makes the field."""
    kind = named(name)
    fields = msgspec.structs.fields(kind) if issubclass(kind, msgspec.Struct) else dataclasses.fields(kind)
    texts = {name: text for base in reversed(kind.__mro__) for name, text in documented(base)[1].items()}
    arguments = setters(kind, named(maker)) if maker else None
    yield "name", "default", *(["set by"] if arguments is not None else []), "meaning"
    for field in fields:
        by = [] if arguments is None else [", ".join(f"`{each}`" for each in arguments.get(field.name, ()))]
        yield f"`{field.name}`", _default(field.name, field), *by, texts[field.name]


def arguments(name: str) -> Rows:
    """Every argument of a class or function, in order."""
    made = named(name)
    texts = {one: text for names, text in _section(made, "Args").items() for one in re.split(", ", names)}
    yield "argument", "default", "meaning"
    for argument in inspect.signature(made).parameters.values():
        if argument.kind in {argument.VAR_KEYWORD, argument.VAR_POSITIONAL}:
            continue
        default = "" if argument.default is argument.empty else _written(argument.default)
        yield f"`{argument.name}`", default, texts[argument.name]


def members(name: str) -> Rows:
    """Every member of an enum, in order; with its value, if that is a number that goes on the wire."""
    kind: type[Enum] = named(name)
    numbers = issubclass(kind, int)
    texts = dict(attribute_docstrings(ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]))
    yield ("name", "number", "meaning") if numbers else ("name", "meaning")
    for member in kind:
        number = (str(member.value),) if numbers else ()
        yield f"`{member.name}`", *number, texts[member.name]


def constants(names: Iterable[str]) -> Rows:
    """Constants by name."""
    yield "name", "value", "meaning"
    for name in names:
        module, _, constant = name.rpartition(".")
        texts = dict(attribute_docstrings(ast.parse(inspect.getsource(importlib.import_module(module)))))
        yield f"`{name}`", quantity(constant, named(name)), texts[constant]


def transitions(name: str) -> Rows:
    """The changes of a machine's phase: a mapping of (phase, event, next phase) to when it happens."""
    yield "phase", "event", "next phase", "when"
    for (before, event, after), when in named(name).items():
        yield before.name, f"`{event}`", after.name, when


KINDS = {kind.__name__: kind for kind in (messages, settings, arguments, members, transitions)}


# ---------------------------------------------------------------------------------------------------- reading the code


def named(name: str) -> Any:
    """What a module has under this name."""
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def structs(module: str, group: str = "") -> list[type[msgspec.Struct]]:
    """The messages of a module in order, or of the part of it below one comment that is a line."""
    found = importlib.import_module(module)
    source = inspect.getsource(found)
    if group:
        source = re.split(rf"^# -+ {group}$", source, flags=re.MULTILINE)[1]
        source = re.split(r"^# -+ ", source, flags=re.MULTILINE)[0]
    classes = [getattr(found, name) for name in re.findall(r"^class (\w+)\b", source, re.MULTILINE)]
    return [kind for kind in classes if issubclass(kind, msgspec.Struct) and kind.__struct_config__.tag]


def documented(kind: type[Any]) -> tuple[str, dict[str, str]]:
    """The docstring of a class in one line, and the texts of its `Attributes:`."""
    text, _, _ = inspect.cleandoc(kind.__doc__ or "").partition("\nAttributes:\n")
    return _line(text), _section(kind, "Attributes")


def _section(made: Any, head: str) -> dict[str, str]:
    """The texts of one section of a docstring, by name."""
    _, _, section = inspect.cleandoc(made.__doc__ or "").partition(f"\n{head}:\n")
    section = re.split(r"\n(?=\S)", section)[0]
    found = re.findall(r"^ {4}([\w, ]+): (.*(?:\n {5,}.*)*)", section, re.MULTILINE)
    return {name: _sentence(text) for name, text in found}


def _written(value: object) -> str:
    """A default as a program writes it; what made it, if it is no plain value."""
    if isinstance(value, functools.partial):
        given = ", ".join(f"{name}={one!r}" for name, one in value.keywords.items())
        return f"`partial({value.func.__name__}, {given})`"
    plain = isinstance(value, str | int | float | tuple | list | Mapping) or value is None
    return f"`{value!r}`" if plain else f"`{getattr(value, '__name__', type(value).__name__)}`"


def setters(kind: type[Any], maker: type[Any]) -> dict[str, list[str]]:
    """For each field of `kind`, the arguments in the expression from which the `__init__` of `maker` makes it.

    An argument of the field's own name counts too: it may have gone through an attribute.
    """
    body = ast.parse(textwrap.dedent(inspect.getsource(maker.__init__)))
    arguments = inspect.signature(maker.__init__).parameters.keys() - {"self", "dht"}
    for more in get_args(get_type_hints(maker.__init__).get("options")):  # of a dictionary with types
        arguments |= get_type_hints(more).keys()
    made: list[tuple[str, ast.expr]] = []
    for node in ast.walk(body):
        match node:
            case ast.Call(func=ast.Name(id=kind.__name__), keywords=keywords):
                made += [(each.arg, each.value) for each in keywords if each.arg]
            case ast.Dict(keys=keys, values=values):
                # The time limits, which come from a dictionary by the users' names.
                texts = [str(key.value) if isinstance(key, ast.Constant) else "" for key in keys]
                made += [(TIMEOUTS[text], value) for text, value in zip(texts, values, strict=True) if text in TIMEOUTS]
    found: dict[str, list[str]] = {}
    for field, value in made:
        nodes = list(ast.walk(value))
        if any(isinstance(node, ast.keyword) and node.arg is None for node in nodes):
            continue  # what is in `**options` is not seen here: the page tells it in words
        names = [field, *(node.id for node in nodes if isinstance(node, ast.Name))]
        names += [node.attr for node in nodes if isinstance(node, ast.Attribute)]
        if by := [name for name in dict.fromkeys(names) if name in arguments]:
            found[field] = by
    return found


def attribute_docstrings(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Each name that is assigned in a module or class and has a docstring below it."""
    for here, after in pairwise(getattr(node, "body", [])):
        targets = here.targets if isinstance(here, ast.Assign) else [getattr(here, "target", None)]
        text = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else None
        for name in targets[0].elts if isinstance(targets[0], ast.Tuple) else targets:
            if isinstance(name, ast.Name) and isinstance(text, str):
                yield name.id, _line(text)


def _line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _sentence(text: str) -> str:
    """The text of a field as a cell: in one line, and without the full stop of a single sentence."""
    line = _line(text)
    return line[:-1] if line.endswith(".") and ". " not in line else line


# ------------------------------------------------------------------------------------------------- types and values


def _role(kind: type[msgspec.Struct]) -> str:
    """How a message is answered, if it begins something."""
    if issubclass(kind, wire.Request):
        return f"request, answered by {_tags(wire.reply_type(kind))}"
    if issubclass(kind, wire.Opening):
        up, down = wire.stream_types(kind)
        return f"opening; the opener then sends {_tags(up)}, the acceptor {_tags(down)}"
    return ""


def _tags(kind: Any) -> str:
    names = [f"`{one.__name__}`" for one in get_args(kind) or [kind]]
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def type_text(hint: Any) -> str:
    """A field's type in words, with the limits that the decoder checks."""
    limits = [part for part in getattr(hint, "__metadata__", ()) if isinstance(part, msgspec.Meta)]
    if not limits:
        return _plain_type(hint, "")
    (limit,), plain = limits, hint.__origin__
    if limit.min_length is not None and limit.min_length == limit.max_length:
        return f"{limit.max_length} {_plain_type(plain, '')}"
    if limit.max_length is not None:
        most = size(limit.max_length) if plain is bytes else f"{limit.max_length:,}"
        return _plain_type(plain, f" (at most {most}{' characters' if plain is str else ''})")
    assert limit.ge is not None
    assert limit.le is not None
    return _plain_type(plain, f" from {_number(limit.ge)} to {_number(limit.le)}")


def _plain_type(hint: Any, limit: str) -> str:
    origin, args = get_origin(hint), get_args(hint)
    if origin is types.UnionType or (args and type(None) in args):
        return " or ".join("none" if one is type(None) else type_text(one) for one in args)
    if origin is list or (origin is tuple and args[-1] is ...):
        return f"list{limit} of {type_text(args[0])}"
    if origin is tuple:
        return f"({', '.join(map(type_text, args))})"
    if origin is dict:
        return f"map{limit} of {type_text(args[0])} to {type_text(args[1])}"
    if isinstance(hint, type) and issubclass(hint, wire.Message):
        return f"`{hint.__name__}`"
    return f"{_NAMES.get(hint, hint.__name__)}{limit}"


def _has_default(field: Any) -> bool:
    return field.default is not msgspec.NODEFAULT or field.default_factory is not msgspec.NODEFAULT


def _default(name: str, field: Any) -> str:
    value = field.default
    if value is msgspec.NODEFAULT and field.default_factory is not msgspec.NODEFAULT:
        value = field.default_factory()
    if type(value) in (int, float):
        return quantity(name, value)
    if isinstance(value, bytes | tuple | list | Mapping) and not value:
        return "empty"
    return f"`{type(value).__name__}`" if isinstance(value, msgspec.Struct) else _WORDS[value]


def size(count: int) -> str:
    """A number of bytes in the largest unit that divides it."""
    return next((f"{count // unit} {name}" for unit, name in _SIZES if count >= unit and count % unit == 0), str(count))


def _number(value: float) -> str:
    if type(value) is int:
        size = abs(value)
        power = f"2^{size.bit_length() - 1}" if size > 1 << 40 and size & (size - 1) == 0 else f"{size:,}"
        return f"-{power}" if value < 0 else power
    return f"{value:g}"


def quantity(name: str, value: float) -> str:
    """A number with the unit that its name says: `bytes`, or `_s` at the end; `per_s` and `calls_s` are rates."""
    low = name.lower()
    text = size(int(value)) if "bytes" in low else _number(value)
    if not low.endswith("_s"):
        return text
    return f"{text}/s" if "calls" in low or "per_" in low else f"{text} s"


def main() -> None:
    """Write the pages anew."""
    for page in (PAGE, ARGUMENTS):
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
