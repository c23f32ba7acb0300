"""Which readers of a donor have to leave when others wait."""

from __future__ import annotations

import pytest

from shoal.base.peer import PeerID
from shoal.state.wire.readers import Reader, Readers

KIB = 1 << 10


class Donor:
    """The readers of a donor, with a clock, and what each has taken."""

    def __init__(self) -> None:
        self.readers, self.now = Readers(), 0.0
        self.taken: list[float] = []
        self.left: list[int] = []
        self.all: list[Reader] = []

    def add(self, site: str) -> None:
        """One more, with the next number."""
        number = len(self.all)
        self.taken.append(0.0)
        leave = self.left.append
        reader = Reader(PeerID(bytes(32)), site, lambda: int(self.taken[number]), lambda: leave(number), self.now)
        self.all.append(reader)
        self.readers.add(reader)

    def end(self, number: int) -> None:
        """It has got all that it wanted."""
        self.readers.remove(self.all[number], self.now)

    def wait(self, seconds: float, *paces: float) -> list[int]:
        """The donor waits for all readers, which take so many bytes a second; then others wait. Who has left so far?"""
        began = self.now
        self.now = began + seconds
        for number, pace in enumerate(paces):
            times = iter((began, self.now))
            with self.all[number].awaited(lambda times=times: next(times)):  # type: ignore[misc]
                self.taken[number] += pace * seconds
        self.readers.make_way(self.now)
        return self.left


def test_a_reader_is_left_if_it_takes_less_than_a_quarter_of_its_share() -> None:
    """Once there was time to tell: 5 s."""
    donor = Donor()
    donor.add("a")
    donor.add("b")
    assert donor.wait(4.9, 1 * KIB, 40 * KIB) == []
    assert donor.wait(0.2, 1 * KIB, 40 * KIB) == [0]
    assert donor.wait(5.0, 0.0, 31 * KIB) == [0, 1]
    assert donor.wait(5.0, 0.0, 0.0) == [0, 1]  # once


def test_the_readers_of_one_site_have_one_share() -> None:
    """A stranger gains nothing by many keys, and takes nothing from those elsewhere."""
    donor = Donor()
    for site in ("a", "a", "a", "a", "b"):
        donor.add(site)
    assert donor.wait(5.0, *[9 * KIB] * 4, 31 * KIB) == [4]
    assert donor.wait(5.0, *[7 * KIB] * 4, 33 * KIB) == [4, 0, 1, 2, 3]


def test_what_the_donor_can_send_is_what_it_has_sent_of_late() -> None:
    """A stream of 4 MiB/s shows that it can; ten minutes later it may have a fuller line."""
    donor = Donor()
    donor.add("fast")
    donor.wait(10.0, 4096 * KIB)
    donor.end(0)
    donor.add("a")
    assert donor.wait(5.0, 0.0, 900 * KIB) == [1]
    donor.add("a")
    donor.now += 600.0
    assert donor.wait(5.0, 0.0, 0.0, 65 * KIB) == [1]


def test_time_in_which_the_reader_waits_for_the_donor_does_not_count() -> None:
    """An upload limit, or a round, is no fault of a reader."""
    donor = Donor()
    donor.add("a")
    donor.now += 60.0
    donor.readers.make_way(donor.now)
    assert not donor.left
    assert donor.wait(4.0, 0.0) == []


@pytest.mark.parametrize("waits", [False, True])
def test_a_wait_that_lasts_counts(waits: bool) -> None:
    """A reader that takes nothing of a piece is found while the donor waits."""
    donor = Donor()
    donor.add("a")
    with donor.all[0].awaited(lambda: 0.0):
        donor.readers.make_way(6.0 if waits else 4.0)
        assert donor.left == ([0] if waits else [])


def test_what_was_taken_at_first_is_no_credit_for_ever() -> None:
    """A burst fills buffers; a reader that then takes little is found at the second look."""
    donor = Donor()
    donor.add("a")
    assert donor.wait(5.0, 8192 * KIB) == []
    assert donor.wait(5.0, 2 * KIB) == [0]
