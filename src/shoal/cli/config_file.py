"""`--config FILE`: the options of a command from a TOML file, by the names that they have on the command line.

The values become the defaults of the options, so the command line wins, and click checks both in one way.
"""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path
from typing import Any

import click

from shoal.errors import ConfigError

__all__ = ["config_option"]


def _read(context: click.Context, _: click.Parameter, file: Path | None) -> Path | None:
    """Make the file's values the defaults. Raises `ConfigError` that names what is wrong with it."""
    if file is None:
        return None
    try:
        text = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {file}: {error.strerror or error}") from error
    except ValueError as error:  # TOML, or UTF-8
        raise ConfigError(f"--config {file}: this is no TOML: {error}") from error
    options = {
        option.opts[0].removeprefix("--"): option
        for option in context.command.params
        if isinstance(option, click.Option) and option.name != "config" and option.opts[0].startswith("--")
    }
    defaults: dict[str, Any] = {}
    for key, value in text.items():
        name = key.replace("_", "-")
        if (option := options.get(name)) is None:
            near = difflib.get_close_matches(name, options, 1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(options))}"
            raise ConfigError(f"--config {file}: {key} is no option of `{context.command_path}`: {hint}")
        if option.name in defaults:
            raise ConfigError(f"--config {file}: {name} is given twice: remove one of the two")
        try:
            defaults[str(option.name)] = _checked(option, value, file.parent)
        except ConfigError as error:
            raise ConfigError(f"--config {file}: {name} {error}") from error
    context.default_map = defaults
    return file


def _checked(option: click.Option, value: object, folder: Path) -> object:
    """A value of the kind that the option takes: click would read the number 1.5 as 1, and a text as its letters."""
    if option.multiple:
        listed = value if isinstance(value, list) else [value]
        if not all(isinstance(each, str) for each in listed):
            raise ConfigError(f"must be a text or a list of texts, got {value!r:.80}")
        return listed
    kinds: tuple[type, ...]
    if option.is_flag:
        kinds, what = (bool,), "true or false"
    elif isinstance(option.type, click.IntRange):
        kinds, what = (int,), "a whole number"
    elif isinstance(option.type, click.FloatRange):
        kinds, what = (int, float), "a number"
    else:
        kinds, what = (str,), "a text in quotes"
    if not isinstance(value, kinds) or (isinstance(value, bool) and not option.is_flag):
        raise ConfigError(f"must be {what}, got {value!r:.80}")
    try:
        option.type_cast_value(click.Context(click.Command("")), value)
    except click.BadParameter as error:
        raise ConfigError(f"is wrong: {error.message}") from error
    return str(folder / Path(str(value)).expanduser()) if isinstance(option.type, click.Path) else value


config_option = click.option(
    "--config",
    type=click.Path(dir_okay=False, path_type=Path),
    is_eager=True,
    callback=_read,
    help="TOML file with any of these options, by the same names; those given here win.",
)
