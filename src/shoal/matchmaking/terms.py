"""The terms of a search: its key, the values that must be equal in the group, the peer's word about itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from shoal.peer import PeerID
from shoal.wire import Join, JoinRefused, Member, encode

__all__ = ["Plan", "Terms"]

Plan = Callable[[Sequence[Member]], tuple[list[int], int]]
"""From a group's members, in order: how many elements each reduces, and the most bytes of one encoded part."""

_BEGIN_OVERHEAD_BYTES = 1 << 12
_SLICE_BYTES = 9
_SHOWN_CHARACTERS = 120
_TEXT_CHARACTERS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The terms of one search.

    Attributes:
        group_key: the key that is looked under.
        schema: describes our tensors.
        settings: named values that must be equal in the whole run.
        compare_schema: returns a sentence naming the first difference from another peer's schema, None if there is
            none.
        plan: divides the work of a group.
        member: this peer's word about itself, which all others will see.
        min_size: the smallest group that we take part in.
        request_timeout_s: how long another peer, or the directory, may take to answer.
    """

    group_key: str
    schema: bytes
    settings: Mapping[str, str]
    compare_schema: Callable[[bytes, PeerID], str | None]
    plan: Plan
    member: Member
    min_size: int
    request_timeout_s: float

    @property
    def me(self) -> PeerID:
        """The id of this peer."""
        return self.member.contact.peer

    def join(self, expiration: float) -> Join:
        """The `Join` message of this peer."""
        return Join(self.group_key, self.schema, dict(self.settings), expiration, self.member)

    def refusal(self, join: Join) -> JoinRefused | None:
        """The reason why the sender can never be in a group with us; None if it can."""
        text = self._settings_difference(join)
        if text is not None:
            return JoinRefused("settings", text[:_TEXT_CHARACTERS])
        if join.schema == self.schema:
            return None
        text = self.compare_schema(join.schema, join.member.contact.peer)
        return None if text is None else JoinRefused("schema", text[:_TEXT_CHARACTERS])

    def has_room(self, others: Iterable[Member], limit_bytes: int) -> bool:
        """Return whether a `Begin` that names us and these fits into one message."""
        nbytes = sum(len(encode(each)) + _SLICE_BYTES for each in (self.member, *others))
        return nbytes + _BEGIN_OVERHEAD_BYTES <= limit_bytes

    def _settings_difference(self, join: Join) -> str | None:
        for name in sorted({*self.settings, *join.settings}):
            here, there = self.settings.get(name), join.settings.get(name)
            if here != there:
                return (
                    f"setting {name[:_SHOWN_CHARACTERS]!r} differs: {_shown(here)} at peer {self.me.short()}, "
                    f"{_shown(there)} at peer {join.member.contact.peer.short()}"
                )
        return None


def _shown(value: str | None) -> str:
    return "not set" if value is None else repr(value[:_SHOWN_CHARACTERS])
