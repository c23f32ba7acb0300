"""Arguments that are True or False. It does without torch, as a peer without tensors does."""

from __future__ import annotations

from shoal.errors import ConfigError

__all__ = ["flag"]


def flag(name: str, value: object) -> bool:
    """True or False, also as numpy's or as 1 or 0.

    Raises:
        ConfigError: it is anything else. A text such as "no" would count as True.
    """
    if value not in (True, False):
        raise ConfigError(f"{name} must be True or False, got {value!r:.80}")
    return bool(value)
