"""Peer ids, addresses, invites and `initial_peers`: what is printed can be read back, and nothing else can."""

from __future__ import annotations

import base64
import string
import zlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.base.peer import Address, Invite, PeerID, parse_peers
from shoal.errors import ConfigError

PEER = PeerID(bytes(range(32)))
OTHER = PeerID(b"\xff" * 32)
HERE = Address("192.0.2.7", 4000, PEER)
THERE = Address("2001:db8::1", 65535, OTHER)

raw_ids = st.binary(min_size=32, max_size=32)
labels = st.text(string.ascii_lowercase + string.digits, min_size=1, max_size=20)
names = st.lists(labels, min_size=1, max_size=4).map(".".join).filter(lambda name: not name[-1].isdigit())
hosts = st.one_of(st.ip_addresses().map(str), names)
addresses = st.builds(Address, hosts, st.integers(1, 65535), raw_ids.map(PeerID))


class TestPeerID:
    @given(raw_ids)
    def test_is_read_back_from_its_text(self, raw: bytes) -> None:
        """52 small letters and digits, without padding."""
        peer = PeerID(raw)
        text = str(peer)
        assert len(text) == 52
        assert set(text) <= set(string.ascii_lowercase + "234567")
        assert PeerID.parse(text) == peer
        assert PeerID.parse(text).to_bytes() == raw
        assert text.startswith(peer.short())
        assert text in repr(peer)
        assert PeerID.from_base58(text) == peer

    def test_has_the_text_methods_of_hivemind(self) -> None:
        """Under all their names the one text that `str` gives."""
        assert {PEER.to_base58(), PEER.to_string(), PEER.pretty(), f"{PEER:52}"} == {str(PEER)}

    def test_is_a_value(self) -> None:
        """It is its bytes: those are equal to it, hash alike, and sort alike."""
        assert PeerID(bytes(32)) == PeerID(bytes(32))
        assert {PeerID(bytes(32)), PeerID(bytes(32))} == {PeerID(bytes(32))}
        assert PeerID(bytes(32)) != PEER
        assert PEER.to_bytes() == PEER
        assert type(PEER.to_bytes()) is bytes
        assert sorted([OTHER, PEER]) == [PEER, OTHER]

    @pytest.mark.parametrize("raw", [b"", bytes(31), bytes(33), bytearray(32), "a" * 32, None])
    def test_takes_32_bytes_only(self, raw: Any) -> None:
        """Anything else is a `ConfigError`."""
        with pytest.raises(ConfigError, match="32 bytes"):
            PeerID(raw)

    def test_refuses_a_text_that_means_the_same_but_is_not_the_printed_one(self) -> None:
        """One peer, one text: no capitals, no padding, no other spare bits at the end."""
        text = str(PEER)
        spare = text[:-1] + string.ascii_lowercase[(string.ascii_lowercase.index(text[-1]) + 1)]
        for wrong in (text.upper(), text + "=", text + "====", " " + text, text[:-1], text + "a", spare):
            with pytest.raises(ConfigError, match="not a peer id"):
                PeerID.parse(wrong)

    @given(st.text())
    def test_refuses_any_other_text_as_a_config_error(self, text: str) -> None:
        """Whatever is pasted."""
        with pytest.raises(ConfigError):
            PeerID.parse(text)


class TestAddress:
    @given(addresses)
    def test_is_read_back_from_its_text(self, address: Address) -> None:
        """Host kind, host, port and peer id; no comma, no blank."""
        text = str(address)
        assert Address.parse(text) == address
        assert Address.parse(f"  {text}\n") == address
        assert "," not in text
        assert text.split("/")[1] == address.kind

    def test_looks_as_documented(self) -> None:
        """All three kinds of host."""
        assert str(HERE) == f"/ip4/192.0.2.7/tcp/4000/p2p/{PEER}"
        assert str(THERE) == f"/ip6/2001:db8::1/tcp/65535/p2p/{OTHER}"
        assert str(Address("peer.example.org", 1, PEER)) == f"/dns/peer.example.org/tcp/1/p2p/{PEER}"

    @pytest.mark.parametrize("name", ["dns4", "dns6"])
    def test_names_of_one_family_are_read(self, name: str) -> None:
        """Multiaddrs have such names; `/dns4/` was refused."""
        assert Address.parse(f"/{name}/a.org/tcp/1/p2p/{PEER}") == Address("a.org", 1, PEER)
        with pytest.raises(ConfigError, match="is ip4, not dns4"):
            Address.parse(f"/dns4/192.0.2.7/tcp/1/p2p/{PEER}")

    def test_is_short_in_messages(self) -> None:
        """A port of an IPv6 address was not told from its last digits."""
        assert (HERE.where, THERE.where) == ("192.0.2.7:4000", "[2001:db8::1]:65535")

    def test_its_pieces_are_had_by_name(self) -> None:
        """As from hivemind's addresses; all are text."""
        assert (HERE["ip4"], HERE["tcp"], HERE["p2p"]) == ("192.0.2.7", "4000", str(PEER))
        assert THERE["ip6"] == "2001:db8::1"
        assert [name in HERE for name in ("ip4", "ip6", "tcp", "udp", "p2p")] == [True, False, True, False, True]
        assert HERE.values() == ["192.0.2.7", "4000", str(PEER)]
        with pytest.raises(KeyError):
            HERE["udp"]

    @pytest.mark.parametrize(
        ("text", "named"),
        [
            ("", "not an address"),
            ("192.0.2.7:4000", "not an address"),
            (f"/ip4/192.0.2.7/udp/4000/p2p/{PEER}", "not an address"),
            (f"ip4/192.0.2.7/tcp/4000/p2p/{PEER}", "not an address"),
            (f"/ip4/192.0.2.7/tcp/4000/p2p/{PEER}/", "not an address"),
            ("/ip4/192.0.2.7/tcp/4000", "not an address"),
            (f"/ip5/192.0.2.7/tcp/4000/p2p/{PEER}", "ip5"),
            (f"/ip4/peer.example.org/tcp/4000/p2p/{PEER}", "peer.example.org"),
            (f"/dns/192.0.2.7/tcp/4000/p2p/{PEER}", "192.0.2.7"),
            (f"/ip6/192.0.2.7/tcp/4000/p2p/{PEER}", "192.0.2.7"),
            (f"/dns/a b/tcp/4000/p2p/{PEER}", "a b"),
            (f"/dns//tcp/4000/p2p/{PEER}", "host ''"),
            (f"/dns/a..b/tcp/4000/p2p/{PEER}", "host 'a..b'"),
            (f"/dns/.a/tcp/4000/p2p/{PEER}", "host '.a'"),
            (f"/dns/{64 * 'a'}.b/tcp/4000/p2p/{PEER}", "host 'aaa"),
            (f"/dns/a:b/tcp/4000/p2p/{PEER}", "a:b"),
            (f"/ip4/192.0.2.7/tcp/0/p2p/{PEER}", "port 0"),
            (f"/ip4/192.0.2.7/tcp/65536/p2p/{PEER}", "65536"),
            (f"/ip4/192.0.2.7/tcp/-1/p2p/{PEER}", "-1"),
            (f"/ip4/192.0.2.7/tcp/٤٠/p2p/{PEER}", "٤٠"),
            (f"/ip4/192.0.2.7/tcp/{'9' * 5000}/p2p/{PEER}", "99999"),
            ("/ip4/192.0.2.7/tcp/4000/p2p/me", "'me'"),
        ],
    )
    def test_says_which_piece_is_wrong(self, text: str, named: str) -> None:
        """The message names it."""
        with pytest.raises(ConfigError) as caught:
            Address.parse(text)
        assert named in str(caught.value)

    @given(st.lists(st.sampled_from(["", "ip4", "dns", "tcp", "p2p", "1.2.3.4", "80", str(PEER), "x"]), max_size=8))
    def test_raises_config_errors_only(self, pieces: list[str]) -> None:
        """Whatever is pasted."""
        try:
            address = Address.parse("/".join(pieces))
        except ConfigError:
            return
        assert str(address) == "/".join(pieces)


class TestInvite:
    @given(st.lists(addresses, min_size=1, max_size=6).map(tuple), st.text(max_size=40))
    def test_is_read_back_from_its_text(self, where: tuple[Address, ...], run_id: str) -> None:
        """Addresses in order and the run; one word that can be sent by mail."""
        invite = Invite(where, run_id)
        text = str(invite)
        assert Invite.parse(f" {text}\n") == invite
        assert text.startswith("shoal:")
        assert set(text.removeprefix("shoal:")) <= set(string.ascii_letters + string.digits + "-_")

    def test_a_typing_error_never_leads_elsewhere(self) -> None:
        """Any one character changed, left out or doubled: refused, or (in spare bits at the end) the same invite."""
        invite = Invite((HERE, THERE), "albert")
        text = str(invite)
        changed = 0
        for place in range(len("shoal:"), len(text)):
            for typed in ("", "A", "z", "_", "!", text[place] * 2):
                wrong = text[:place] + typed + text[place + 1 :]
                try:
                    assert Invite.parse(wrong) == invite
                except ConfigError:
                    changed += 1
        assert changed > 5 * (len(text) - len("shoal:") - 2)

    @pytest.mark.parametrize("text", ["", "shoal", "SHOAL:abc", "mailto:abc", str(HERE)])
    def test_says_when_it_is_no_invite_at_all(self, text: str) -> None:
        """The beginning gives it away."""
        with pytest.raises(ConfigError, match="not an invite"):
            Invite.parse(text)

    @pytest.mark.parametrize("body", ["", "A", "AAAA", "AAAAAAAA", "=" * 8, "ü" * 8, "A" * 10_000])
    def test_refuses_a_damaged_body(self, body: str) -> None:
        """Short, long, not base64, wrong checksum."""
        with pytest.raises(ConfigError, match="damaged"):
            Invite.parse("shoal:" + body)

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ('"{}"', "'\"' stands before 'shoal:'"),
            ("use this: {}", "'use this: ' stands before 'shoal:'"),
            ('{}"', "it has '\"' in it"),
            ("{:.40} {}", "it has ' ' in it"),
            ("{:.40}\n{}", r"it has '\n' in it"),
            ("{:.40}", "a character is wrong, or its end is missing"),
            ("shoal:", "nothing follows 'shoal:'"),
            ("{}" + "A" * 9000, "it is longer than any invite"),
        ],
    )
    def test_invite_that_was_quoted_torn_or_cut_off(self, text: str, said: str) -> None:
        """The message says what is wrong and what to do, alone and among initial peers; all invites begin alike."""
        invite = str(Invite((HERE, THERE), "albert"))
        for read in (Invite.parse, parse_peers):
            with pytest.raises(ConfigError) as caught:
                read(text.format(invite, invite[40:]))
            assert f"invite is damaged, as {said}: copy it alone and whole" in str(caught.value)

    @pytest.mark.parametrize("run_id", [3, None, b"run", "r" * 241, "\udcff"])
    def test_invite_for_a_run_that_nobody_can_name(self, run_id: Any) -> None:
        """Refused when it is made, because nobody could read it, or train the run."""
        with pytest.raises(ConfigError, match="run_id"):
            Invite((HERE,), run_id)

    @pytest.mark.parametrize("where", [(), tuple(Address(f"{i:0>60}.org", 4, PeerID(bytes(32))) for i in range(9000))])
    def test_invite_that_nobody_could_read(self, where: tuple[Address, ...]) -> None:
        """Without addresses, or with too many."""
        with pytest.raises(ConfigError, match="addresses"):
            Invite(where)

    def pack(self, content: object) -> str:
        """An invite with any content and a right checksum."""
        packed = zlib.compress(msgspec.msgpack.encode(content))
        whole = packed + zlib.crc32(packed).to_bytes(4, "big")
        return "shoal:" + base64.urlsafe_b64encode(whole).decode().rstrip("=")

    def test_the_packing_of_these_tests_is_right(self) -> None:
        """Else the next tests would prove nothing."""
        assert Invite.parse(self.pack((1, [str(HERE)], "run"))) == Invite((HERE,), "run")

    @pytest.mark.parametrize(
        "content",
        [
            None,
            "text",
            (1, [], "run"),
            (1, ["not an address"], "run"),
            (1, [b"bytes"], "run"),
            (1, [str(HERE)]),
            (1, [str(HERE)] * 10_000, "run"),
            ("1", [str(HERE)], "run"),
        ],
    )
    def test_refuses_a_wrong_content_with_a_right_checksum(self, content: object) -> None:
        """Made on purpose: still a `ConfigError`, and nothing large is unpacked."""
        with pytest.raises(ConfigError):
            Invite.parse(self.pack(content))

    def test_tells_when_a_newer_shoal_made_it(self) -> None:
        """So that people upgrade instead of copying again."""
        with pytest.raises(ConfigError, match="newer"):
            Invite.parse(self.pack((2, [str(HERE)], "run")))

    @given(st.binary(max_size=200))
    def test_raises_config_errors_only(self, raw: bytes) -> None:
        """Whatever is pasted."""
        with pytest.raises(ConfigError):
            Invite.parse("shoal:" + base64.urlsafe_b64encode(raw).decode().rstrip("="))


class TestParsePeers:
    def test_takes_texts_and_objects_in_order_and_each_once(self) -> None:
        """Addresses and invites mixed, as people have them."""
        third = Address("third.example.org", 3, PEER)
        invite = Invite((THERE, HERE), "run")
        assert parse_peers([str(HERE), invite, third, str(invite)]) == (HERE, THERE, third)
        assert parse_peers(iter([THERE])) == (THERE,)

    @pytest.mark.parametrize("nothing", [None, [], (), iter(())])
    def test_nothing_is_nobody(self, nothing: Any) -> None:
        """The first peer of a swarm."""
        assert parse_peers(nothing) == ()

    def test_a_single_one_needs_no_list(self) -> None:
        """A text is not taken for a sequence of letters."""
        assert parse_peers(HERE) == (HERE,)
        assert parse_peers(Invite((HERE, THERE))) == (HERE, THERE)
        assert parse_peers(str(HERE)) == (HERE,)
        assert parse_peers(str(Invite((HERE, THERE)))) == (HERE, THERE)

    @pytest.mark.parametrize(
        "useless",
        [
            f"/ip4/192.0.2.7/udp/4000/quic/p2p/{PEER}",
            f"/ip4/192.0.2.7/udp/4000/quic-v1/p2p/{PEER}",
            f"{HERE}/p2p-circuit/p2p/{OTHER}",
            "/ip4/192.0.2.7/tcp/4000/p2p/QmdaK4LUeQaKhqSFPRu9N7MvXUEWDxWwtCvPrS444tCgd1",
            str(Invite((HERE,)))[:-1],
        ],
    )
    def test_one_quic_address_among_initial_peers_fails_the_whole_list(self, useless: str) -> None:
        """Not any more: what cannot be used is skipped, and said; with nothing else it is an error."""
        skipped: list[str] = []
        assert parse_peers([useless, str(THERE)], skipped=skipped.append) == (THERE,)
        assert len(skipped) == 1
        with pytest.raises(ConfigError) as caught:
            parse_peers([useless])
        assert str(caught.value) == f"initial_peers: {skipped[0]}"
        with pytest.raises(ConfigError, match="none of the 2 initial_peers can be used; the first one: "):
            parse_peers([useless, useless], skipped=skipped.append)
        assert len(skipped) == 1

    def test_takes_address_objects_of_other_libraries(self) -> None:
        """Such as those of `multiaddr`: the address is their text."""

        class Multiaddr:
            def __str__(self) -> str:
                return str(HERE)

        assert parse_peers([Multiaddr()]) == (HERE,)

    @pytest.mark.parametrize("text", ["eNoNxdENhCAMANA4kPaooHM4ghgvAWKL", "192.0.2.7:4000", f'"{HERE}"'])
    def test_text_that_is_neither_invite_nor_address(self, text: str) -> None:
        """The message shows how both begin."""
        with pytest.raises(ConfigError) as caught:
            parse_peers(text)
        assert "neither an invite nor an address" in str(caught.value)
        assert "begins with 'shoal:', an address with '/ip4/', '/ip6/' or '/dns/'" in str(caught.value)

    @pytest.mark.parametrize("wrong", ["", "nobody", ["nobody"], [b"bytes"], [None], [HERE, 5], 5])
    def test_refuses_anything_else(self, wrong: Any) -> None:
        """With a `ConfigError`."""
        with pytest.raises(ConfigError):
            parse_peers(wrong)


def test_an_invite_that_a_notebook_shows_can_be_used() -> None:
    """A notebook shows the repr, which had no invite in it: its text is what is passed on."""
    one = Invite((Address("10.0.0.1", 4000, PeerID(bytes(32))),), "bees")
    assert repr(one) == f"Invite.parse({str(one)!r})"
    assert eval(repr(one)) == one
