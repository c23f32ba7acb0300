"""The whole numbers among the extra tensors, as members of the last averaging say and take them."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from shoal.base.peer import PeerID
from shoal.run.states_average import Counts

LOW, HIGH = (PeerID(bytes([number]) * 32) for number in (1, 2))


def tensors(count: int, *, flag: bool) -> list[torch.Tensor]:
    """What a model may have beside its parameters."""
    return [torch.tensor(count), torch.zeros(3), torch.tensor([[flag], [not flag]]), torch.zeros(0, dtype=torch.int32)]


def test_values_travel_as_they_are() -> None:
    """Counts and flags, without the means; an empty tensor has none."""
    ours, theirs = tensors(3, flag=False), tensors(-5, flag=True)
    said = Counts(theirs).said()
    assert len(said) == 8 + 2
    Counts(ours).take(said)
    assert ours[0] == -5
    assert torch.equal(ours[2], theirs[2])
    Counts(ours).take(bytes(8) + b"\xff\x00")  # no flag that torch would write
    assert ours[2].flatten().tolist() == [True, False]
    assert bytes(ours[2].to(torch.uint8).flatten().tolist()) == b"\x01\x00"


def alike(peers: Collection[PeerID]) -> Mapping[PeerID, int]:
    """Nothing is known of anybody."""
    return dict.fromkeys(peers, 1)


def test_a_ground_id_chose_the_counts_of_all() -> None:
    """The lowest contributor did, whatever it had done. Those of most weight are taken that have as many as here."""
    counts = Counts(tensors(3, flag=False))
    low, high = b"l" * 10, b"h" * 10
    weigh = {LOW: 1, HIGH: 7}
    assert counts.chosen({HIGH: high, LOW: low}, {LOW, HIGH}, lambda _: weigh) == high
    assert counts.chosen({HIGH: high, LOW: low}, {LOW}, lambda _: weigh) == low
    assert counts.chosen({HIGH: high, LOW: low}, {LOW, HIGH}, alike) == low
    assert counts.chosen({HIGH: high, LOW: low[1:]}, {LOW, HIGH}, alike) == high
    assert counts.chosen({HIGH: None, LOW: 3}, {LOW, HIGH}, alike) is None


def test_too_many_are_left_out() -> None:
    """An index of many numbers would be sent to all members by each of them."""
    for found in ([torch.zeros(513, dtype=torch.int64)], [torch.zeros(3)], []):
        counts = Counts(found)
        assert not counts
        assert counts.said() == b""
        assert counts.chosen({LOW: b"", HIGH: bytes(8)}, {LOW, HIGH}, alike) is None
    assert Counts([torch.zeros(512, dtype=torch.int64)])
