"""A peer finds out that nothing of what it computes counts."""

from __future__ import annotations

from shoal.run.view.contribution import Contribution, Dropped


def test_a_peer_whose_batches_take_longer_than_an_epoch_is_told_once_with_numbers() -> None:
    """It contributed 0 of 6,400 samples, without a word."""
    contribution, told = Contribution(), []
    for epoch in range(1, 41):
        batches = int(epoch / 1.2)
        why = contribution.state_changed(
            epoch, contributed=0, processed=8 * batches, batches=batches, held=0, now=10.0 * epoch
        )
        told += [why] if why else []
    assert len(told) == 1
    assert "a batch takes it 10.0 s, and an epoch of the swarm 10.0 s" in told[0]  # batches are counted when done
    assert "smaller batches, or raise target_batch_size" in told[0]
    assert (contribution.contributed, contribution.dropped) == (0, 8 * 33)


def test_a_peer_of_whose_samples_few_count_is_told_once_with_numbers() -> None:
    """48 of 240 counted, as now and then a batch began just after a step; only a peer without any was told."""
    contribution, told = Contribution(), []
    counted = 0
    for epoch in range(1, 101):
        if epoch % 5 == 0:
            counted += 8
        why = contribution.state_changed(
            epoch, contributed=counted, processed=8 * epoch, batches=epoch, held=0, now=10.0 * epoch
        )
        told += [why] if why else []
    assert len(told) == 1
    assert "only 48 of the 240 samples that this peer computed in the last 30 epochs count" in told[0]
    assert "a batch takes it 10.0 s, and an epoch of the swarm 10.0 s, so its state is mostly over" in told[0]


def test_a_peer_whose_samples_begin_to_be_lost_is_told() -> None:
    """The run is long: what counted before does not hide it."""
    contribution, told = Contribution(), []
    counted = 0
    for epoch in range(1, 200):
        if epoch < 100 or epoch % 5 == 0:
            counted += 8
        why = contribution.state_changed(
            epoch, contributed=counted, processed=8 * epoch, batches=epoch, held=0, now=10.0 * epoch
        )
        told += [f"{epoch}: {why}"] if why else []
    assert len(told) == 1
    assert int(told[0].split(":")[0]) < 100 + 2 * 30


def test_a_peer_that_contributes_now_and_then_is_not_told() -> None:
    """What was not in a step is counted as dropped; what is accumulated is not yet."""
    contribution = Contribution()
    counted = 0
    for epoch in range(1, 41):
        if epoch % 4 == 0:
            counted += 8
        assert (
            contribution.state_changed(
                epoch, contributed=counted, processed=8 * epoch, batches=epoch, held=8, now=10.0 * epoch
            )
            is None
        )
    assert (contribution.contributed, contribution.dropped) == (80, 8 * 40 - 80 - 8)


def test_a_peer_that_rounds_leave_out_is_not_told_that_its_batches_are_long() -> None:
    """One that could open no more files was told so, with batches of 1.1 s and epochs of 5.5 s."""
    contribution, told = Contribution(), []
    for epoch in range(1, 21):
        batches = 5 * epoch
        why = contribution.state_changed(
            epoch, contributed=0, processed=8 * batches, batches=batches, held=0, now=5.5 * epoch
        )
        told += [why] if why else []
    assert len(told) == 1
    assert "a batch takes it 1.1 s, and an epoch of the swarm 5.5 s" in told[0]
    assert "the rounds go on without it. `shoal debug dump PID`" in told[0]
    assert "smaller batches" not in told[0]


def test_epochs_of_milliseconds_are_told_in_milliseconds() -> None:
    """A warning said "a batch takes it 0.0 s, and an epoch of the swarm 0.0 s"."""
    contribution, told = Contribution(), []
    for epoch in range(1, 2001):
        batches = epoch // 2
        why = contribution.state_changed(
            epoch, contributed=0, processed=8 * batches, batches=batches, held=0, now=0.0032 * epoch
        )
        told += [why] if why else []
    assert len(told) == 1
    assert "a batch takes it 6.3 ms, and an epoch of the swarm 3.2 ms" in told[0]


def test_a_newcomer_in_fast_epochs_is_not_told_at_once() -> None:
    """With epochs of 0.11 s it was told after half a second, while it got ready to take part."""
    contribution = Contribution()
    counted = 0
    for epoch in range(1, 101):
        if epoch > 20:
            counted += 8
        assert (
            contribution.state_changed(
                epoch, contributed=counted, processed=8 * epoch, batches=epoch, held=0, now=0.11 * epoch
            )
            is None
        )


def test_a_newcomer_that_came_over_many_epochs_at_once_is_not_told() -> None:
    """It has computed next to nothing yet."""
    contribution = Contribution()
    assert contribution.state_changed(0, contributed=0, processed=8, batches=1, held=0, now=0.0) is None
    assert contribution.state_changed(50, contributed=0, processed=8, batches=1, held=0, now=60.0) is None


def test_a_peer_that_was_stopped_is_not_told() -> None:
    """It was told that its batches take too long, after some seconds of SIGSTOP between them."""
    contribution = Contribution()
    counted = 0
    for number in range(12):  # each time it wakes, it has missed 30 epochs; what it computed before was in vain
        epoch, done = 40 * number, 8 * number
        for epochs, batches in ((0, 0), (30, 4), (31, 5), (32, 6)):
            now = float(epoch + epochs)
            count = done + batches
            why = contribution.state_changed(
                epoch + epochs, contributed=counted, processed=8 * count, batches=count, held=0, now=now
            )
            assert why is None
        counted += 8


def test_states_that_are_loaded_at_one_epoch_are_no_epochs() -> None:
    """A loop that loads a state dict after each batch ended with a ZeroDivisionError, or went back in epochs."""
    contribution = Contribution()
    for number in range(1, 61):
        epoch = max(3, 20 - number)
        assert (
            contribution.state_changed(
                epoch, contributed=0, processed=number, batches=number, held=0, now=10.0 * number
            )
            is None
        )


def test_epochs_that_went_by_on_another_branch_are_none_of_the_count() -> None:
    """A peer that took over a state 81 epochs on was told of 81 epochs, each of 63 ms; they took 300 ms."""
    contribution, told = Contribution(), []
    counted = 0
    for number in range(1, 41):
        epoch, now = number + 81 * (number > 15), 0.3 * number
        if number <= 15:
            counted += 8
        why = contribution.state_changed(
            epoch, contributed=counted, processed=8 * number, batches=number, held=0, now=now
        )
        told += [why] if why else []
    assert len(told) == 1
    assert "in the last 17 epochs" in told[0]
    assert "a batch takes it 300 ms, and an epoch of the swarm 300 ms" in told[0]


def test_a_peer_that_drops_much_is_told_once_an_hour() -> None:
    """Only `status().dropped` said so. A tenth of an hour's samples, and what earlier hours had, are not told."""
    contribution, first, told = Contribution(), list[int](), list[Dropped]()
    counted = 0
    for minute in range(1, 241):
        counts = minute % 10 != 0 if 60 < minute <= 120 else minute % 5 != 0  # in the second hour one of ten is lost
        counted += 8 * counts
        contribution.state_changed(
            minute, contributed=counted, processed=8 * minute, batches=minute, held=0, now=60.0 * minute
        )
        if contribution.first_dropped(processed=8 * minute, batches=minute):
            first.append(minute)
        much = contribution.much_dropped(processed=8 * minute, now=60.0 * minute, over=minute == 240)
        told += [much] if much else []
    assert first == [15]  # the third batch
    assert [(each.samples, each.computed, each.seconds) for each in told] == [
        (8 * 12, 8 * 60, 3600.0),
        (8 * 12, 8 * 60, 3600.0),
        (8 * 12, 8 * 59, 3540.0),  # the run is over
    ]


def test_what_was_in_a_state_that_is_given_up_stays_contributed() -> None:
    """It does not: it is dropped, and such a change of the state is none of use."""
    contribution = Contribution()
    contribution.state_changed(1, contributed=8, processed=8, batches=1, held=0, now=1.0)
    contribution.state_changed(2, contributed=16, processed=24, batches=3, held=8, now=2.0)
    assert (contribution.contributed, contribution.dropped) == (16, 0)
    contribution.state_changed(3, contributed=8, processed=24, batches=3, held=0, now=3.0)
    assert (contribution.contributed, contribution.dropped) == (8, 16)


def test_a_batch_that_is_not_finite_is_neither_contributed_nor_dropped() -> None:
    """It was in neither. Now it is dropped, and no warning says that it came too late."""
    contribution = Contribution()
    for _ in range(100):
        contribution.leave_out(8)
    contribution.settle(16, 24, 8)
    assert (contribution.contributed, contribution.dropped) == (16, 800)
    assert not contribution.first_dropped(processed=24, batches=3)
    for now in (0.0, 4000.0):
        assert contribution.much_dropped(processed=24, now=now, over=False) is None


def test_what_was_cut_is_told_apart_from_what_came_too_late() -> None:
    """Of this hour alone: of ten batches each minute five are given at once, of which the round takes one."""
    contribution, told = Contribution(), list[Dropped]()
    for minute in range(1, 122):
        contribution.was_cut(32)
        contribution.state_changed(
            minute, contributed=8 * minute, processed=80 * minute, batches=10 * minute, held=0, now=60.0 * minute
        )
        much = contribution.much_dropped(processed=80 * minute, now=60.0 * minute, over=False)
        told += [much] if much else []
    assert told == [(72 * 60, 80 * 60, 3600.0, 32 * 60)] * 2


def test_a_peer_that_gave_up_a_branch_was_told_a_negative_number() -> None:
    """It said that "only -672 of the 224 samples" count: the window had begun with the samples of the branch."""
    contribution, told = Contribution(), []
    for epoch in range(1, 40):
        counted = 160 * epoch if epoch < 6 else 100
        why = contribution.state_changed(
            epoch, contributed=counted, processed=160 * epoch, batches=epoch, held=0, now=10.0 * epoch
        )
        told += [f"{epoch}: {why}"] if why else []
    assert len(told) == 1  # nothing counts from then on, which is still told
    assert told[0].startswith("11: none of the samples that this peer computed in the last 5 epochs count")


def test_a_peer_that_loses_all_to_one_that_steps_alone_is_told_who_that_is() -> None:
    """It was told to look at its own batches, its memory and its identity."""
    for by, alone in ((["first"] * 40, True), (["first", "second"] * 20, False), (["first", None] * 20, False)):
        contribution, told = Contribution(), []
        for epoch in range(1, 41):
            why = contribution.state_changed(
                epoch, contributed=0, processed=16 * epoch, batches=4 * epoch, held=0, now=2.0 * epoch, by=by[epoch - 1]
            )
            told += [why] if why else []
        assert len(told) == 1
        assert ("first took the last steps alone" in told[0]) == alone
        assert ("It does not hear what this peer says" in told[0]) == alone
        assert ("short enough" in told[0]) != alone
