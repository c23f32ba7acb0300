"""Known peers in a file: who is started again finds its swarm, though all that it was given is gone."""

from __future__ import annotations

from pathlib import Path

import pytest

import shoal
from shoal.base.peer import Address
from shoal.events import Event, Warned


def test_a_restarted_peer_finds_its_swarm_by_the_file(tmp_path: Path) -> None:
    """Its first peer is gone for good; the other one, which it met later, lets it in."""
    file = tmp_path / "peers"
    with shoal.DHT(start=True) as other:
        with shoal.DHT([other.invite()], start=True) as first:
            entry = first.invite()
            with shoal.DHT([entry], start=True, peers_file=file):
                pass
        kept = {Address.parse(line).peer_id for line in file.read_text().splitlines()}
        assert kept == {other.peer_id, first.peer_id}
        with shoal.DHT([entry], start=True, peers_file=file) as again:
            assert again.store("key", 1, shoal.get_dht_time() + 60)
            found = other.get("key", latest=True)
            assert found is not None
            assert found.value == 1


def test_nobody_in_the_file_answers(tmp_path: Path) -> None:
    """The peer begins alone, with a warning; lines that cannot be read are passed over."""
    file = tmp_path / "peers"
    with shoal.DHT(start=True) as gone:
        address = gone.get_visible_maddrs()[0]
    file.write_text(f"no address\n{address}\n/ip4/1.2.3\n")
    said: list[Event] = []
    dht = shoal.DHT(peers_file=file, startup_timeout=1.0)
    dht.events.subscribe(said.append)
    with dht:
        dht.run_in_background()
        (warning,) = [event for event in said if isinstance(event, Warned)]
        assert "keeps trying to reach them" in warning.message
    assert str(address) in file.read_text()


def test_a_file_that_cannot_be_kept_is_a_configuration_error(tmp_path: Path) -> None:
    """Before anything is started, and the argument is named."""
    with pytest.raises(shoal.ConfigError, match=r"peers_file=.*there is no folder"):
        shoal.DHT(peers_file=tmp_path / "nowhere" / "peers")
    with pytest.raises(shoal.ConfigError, match=r"peers_file=.*cannot be read"):
        shoal.DHT(peers_file=tmp_path, start=True)


def test_a_file_of_something_else_is_not_written_over(tmp_path: Path) -> None:
    """A list of peers replaced whatever the file held, a minute later."""
    for name, content in {"notes": b"buy milk\n", "picture": bytes(range(256))}.items():
        file = tmp_path / name
        file.write_bytes(content)
        with pytest.raises(shoal.ConfigError, match=r"peers_file=.*something else.*name another file"):
            shoal.DHT(peers_file=file)
        assert file.read_bytes() == content
    (tmp_path / "empty").touch()
    shoal.DHT(peers_file=tmp_path / "empty")
