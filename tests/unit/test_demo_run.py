"""The demo's pure parts: what is known of a run, what is done when, the JSON file, the sentences."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest

from shoal import events
from shoal.base.extras import install_command
from shoal.base.peer import PeerID
from shoal.demo import messages as say
from shoal.demo.plan import Director, GiveUp, Kill, Limits, SendHome, StartNewcomer, TellStop
from shoal.demo.result import conclusion, make_record, verdict, write_record
from shoal.demo.settings import DemoOptions, Training, warm_up
from shoal.demo.state import DemoState
from shoal.demo.supervisor import run_demo
from shoal.errors import ConfigError
from tests.unit.demo_kit import id_of, noted, stepped_into

STRANGER = PeerID.parse("stranger" + 44 * "a")
OPTIONS = DemoOptions(seconds=60, peers=3, seed=0, report=None)


Fact = Callable[[DemoState, float], None]
"""It becomes known to a state at a time."""


def said(name: str, report: say.Report) -> Fact:
    """A child reports something."""
    return lambda state, now_s: state.said(name, report, now_s)


def started(name: str, pid: int, *, newcomer: bool = False) -> Fact:
    """A peer was started."""
    return lambda state, now_s: state.started(name, pid, now_s, newcomer=newcomer)


def ended(name: str, returncode: int, last_words: str = "") -> Fact:
    """A peer is gone."""
    return lambda state, now_s: state.ended(name, returncode, last_words, now_s)


def killing(name: str) -> Fact:
    """A peer is killed."""
    return lambda state, now_s: state.killing(name, now_s)


def stop_announced(epoch: int) -> Fact:
    """The peers were told of the end."""
    return lambda state, now_s: state.stop_announced(epoch, now_s)


def over(*, baseline_complete: bool | None = None, reason: str = "completed") -> Fact:
    """The single process is done, and so is the run."""

    def end(state: DemoState, _: float) -> None:
        state.baseline_complete = baseline_complete
        state.over(reason)

    return end


READY = {
    name: say.Ready(peer_id=str(id_of(name)), run_id="demo-1-2", addresses=(f"at-{name}",), parameters=9)
    for name in ("oak", "elm", "fir", "yew")
}


def training(epoch: int = 0, rate: float = 10.0) -> say.Working:
    """A peer trains."""
    return say.Working(state="training", epoch=epoch, samples_per_s=rate)


def finished(epoch: int = 4, weights: str = "aa", loss: float = 4.0) -> say.Finished:
    """A peer stands at the last epoch."""
    return say.Finished(epoch=epoch, weights_sha256=weights, loss=loss)


def after(facts: Iterable[tuple[float, Fact]], state: DemoState | None = None) -> DemoState:
    """The state after facts at their times; the one that is given stays as it is."""
    state = deepcopy(state) or DemoState(seconds=60)
    for now_s, fact in facts:
        fact(state, now_s)
    return state


def three_training(epochs: int = 4, *, late_s: float = 0.0) -> DemoState:
    """Three peers that have trained for some epochs, one a second from second 10 on, or so much later."""
    state = after((0.1, started(name, 100 + index)) for index, name in enumerate(("oak", "elm", "fir")))
    state = after(
        [
            (8 + late_s, fact)
            for name in ("oak", "elm", "fir")
            for fact in (said(name, READY[name]), said(name, training()))
        ],
        state,
    )
    state = after([(9 + late_s, said("oak", say.HeldOutLoss(epoch=0, loss=7.6)))], state)
    return after([(9.0 + late_s + epoch, said("oak", stepped_into(epoch))) for epoch in range(1, epochs + 1)], state)


def done(**weights: str) -> DemoState:
    """Three peers that reached the last epoch with these weights, and left."""
    state = after([(14, stop_announced(4))], three_training())
    state = after([(15, said(name, finished(weights=value))) for name, value in weights.items()], state)
    return after([(16, DemoState.leaving), *((17, ended(name, 0)) for name in weights)], state)


# -------------------------------------------------------------------------------------------------------------- state


def test_run_trains_once_a_peer_trains() -> None:
    """The phase follows what the peers say."""
    state = after([(0, started("oak", 1)), (1, said("oak", say.Working(state="loading torch")))])
    assert state.phase == "starting"
    state = after([(2, said("oak", training()))], state)
    assert (state.phase, state.peers["oak"].training_since_s) == ("training", 2)
    assert after([(3, said("oak", training()))], state).peers["oak"].training_since_s == 2


def test_epoch_counts_once_at_its_first_report() -> None:
    """Others that reach the same epoch later add nothing."""
    state = after(
        [(11, said("elm", stepped_into(4))), (11, said("fir", stepped_into(5))), (12, said("elm", stepped_into(5)))],
        three_training(),
    )
    assert [view.epoch for view in state.epochs] == [1, 2, 3, 4, 5]
    assert state.epochs[-1].at_s == 11
    assert state.samples == 80
    assert state.peers["elm"].epoch == 5


def test_epoch_that_nobody_reported_counts_like_the_next_one() -> None:
    """Samples per epoch have no holes, and sum up to the samples."""
    state = after([(20, said("oak", stepped_into(7, 20))), (21, said("oak", stepped_into(8, 18)))], three_training())
    assert state.epoch_samples == (16, 16, 16, 16, 20, 20, 20, 18)
    assert state.samples == 4 * 16 + 3 * 20 + 18


def test_loss_of_an_epoch_counts_once_at_the_epochs_time() -> None:
    """Losses are in order of epochs, however late they come."""
    facts = [
        (14.0, said("fir", say.HeldOutLoss(epoch=4, loss=5.0))),
        (14.5, said("elm", say.HeldOutLoss(epoch=2, loss=6.0))),
    ]
    state = after([*facts, (15.0, said("oak", say.HeldOutLoss(epoch=4, loss=1.0)))], three_training())
    assert [(point.epoch, point.at_s, point.loss) for point in state.losses] == [
        (0, 9, 7.6),
        (2, 11, 6.0),
        (4, 13, 5.0),
    ]
    assert (state.loss_first, state.loss_last) == (7.6, 5.0)


def test_killed_peer_is_dead_at_once_and_says_no_more() -> None:
    """What was on its way when it was killed changes nothing."""
    state = after([(20, killing("fir"))], three_training())
    fir = state.peers["fir"]
    assert (fir.fate, fir.state, fir.alive, fir.lost) == ("killed", "DEAD", False, True)
    assert after([(20.1, said("fir", training(9))), (20.2, ended("fir", -9))], state) == state


def test_death_without_a_plan_is_told_with_signal_or_last_words() -> None:
    """The log says how a peer died."""
    state = after([(20, ended("fir", -15)), (21, ended("elm", 1, "MemoryError"))], three_training())
    assert [line.text for line in state.log[-2:]] == ["fir died (signal 15)", "elm died (exit code 1): MemoryError"]
    assert all(state.peers[name].lost for name in ("fir", "elm"))


def test_peer_that_leaves_is_not_lost() -> None:
    """Exit code 0 after the end was announced is leaving; before it, it is a loss."""
    assert after([(20, ended("fir", 0))], three_training()).peers["fir"].lost
    assert not after([(20, stop_announced(9)), (21, ended("fir", 0))], three_training()).peers["fir"].lost


def test_first_notice_of_a_death_and_the_next_epoch_are_told_once() -> None:
    """The log shows how soon the others noticed and went on."""
    gone = events.PeerLost(peer=id_of("fir"), reason="closed")
    facts: list[tuple[float, Fact]] = [(20.0, killing("fir")), (20.25, said("elm", gone)), (20.5, said("oak", gone))]
    state = after(
        [*facts, (21.0, said("oak", stepped_into(5))), (22.0, said("oak", stepped_into(6)))], three_training()
    )
    told = [line.text for line in state.log if "fir" in line.text and line.at_s > 20]
    assert told == [
        "elm noticed within 0.25 s that fir is gone",
        "epoch 5 done 1.0 s after the loss of fir: the others go on",
    ]


def test_connection_lost_to_a_living_peer_is_not_told() -> None:
    """Only the end of a peer is news."""
    state = three_training()
    assert after([(20, said("elm", events.PeerLost(peer=id_of("fir"), reason="x")))], state) == state


def test_newcomers_download_and_first_step_are_kept() -> None:
    """Donors are named; a download of somebody else is not the newcomer's."""
    fetched = events.StateDownloaded(
        prefix="p", donors=(id_of("elm"), STRANGER), bytes_received=4_330_000, duration_s=0.21
    )
    state = after([(25, said("oak", fetched))], three_training())
    assert state.download is None
    state = after(
        [(30, started("yew", 9, newcomer=True)), (31, said("yew", READY["yew"])), (32, said("yew", fetched))], state
    )
    assert state.download == fetched
    assert state.log[-1].text == "yew downloaded the state from elm and stranger: 4.3 MB in 0.21 s, verified"
    state = after([(33, said("yew", stepped_into(4))), (34, said("yew", stepped_into(5)))], state)
    assert sum("yew takes its first step" in line.text for line in state.log) == 1


def test_longest_stall_counts_from_the_first_epoch_to_now_while_training() -> None:
    """A swarm that stands still is seen at once; afterwards nothing grows any more."""
    state = three_training()
    assert state.max_stall_s(13.5) == 1.0
    assert state.max_stall_s(20.0) == 7.0
    assert after([(14, stop_announced(4))], state).max_stall_s(99.0) == 1.0
    assert after([(14, DemoState.leaving)], state).max_stall_s(99.0) == 1.0
    assert DemoState(seconds=60).max_stall_s(50.0) == 0.0


def test_shares_are_of_the_living() -> None:
    """They add up to one; the dead have none."""
    state = after([(14, said("oak", training(rate=30.0))), (15, killing("fir"))], three_training())
    assert [state.share(peer) for peer in state.peers.values()] == [0.75, 0.25, 0.0]


def test_log_is_bounded_and_counts_on() -> None:
    """A long run does not fill the memory."""
    state = after([(20.0, said("oak", noted(str(number)))) for number in range(600)], three_training())
    assert len(state.log) == 500
    assert state.logged == 600 + 6
    assert state.log[-1].text == "oak: test: 599"


# --------------------------------------------------------------------------------------------------------------- plan


def test_one_peer_is_killed_a_third_in_and_only_once() -> None:
    """The victim follows from the seed, and is never the first peer."""
    director = Director(OPTIONS, Limits())
    state = three_training()
    assert director.actions(state, 19.9) == []
    assert director.actions(state, 20.0) == [Kill("elm")]
    assert director.actions(state, 20.1) == []
    assert Director(replace(OPTIONS, seed=1), Limits()).actions(state, 20.0) == [Kill("fir")]


def test_nobody_is_killed_before_the_swarm_has_trained() -> None:
    """Neither before two epochs, nor while a peer is still loading, nor when it is nearly over."""
    assert Director(OPTIONS, Limits()).actions(three_training(epochs=1), 20.0) == []
    loading = after([(1, started("ash", 7))], three_training())
    assert Director(OPTIONS, Limits()).actions(loading, 20.0) == []
    assert Director(OPTIONS, Limits()).actions(loading, 30.1) == [Kill("elm")]
    assert Director(OPTIONS, Limits()).actions(three_training(), 52.0) == []


def test_nobody_is_killed_when_a_peer_has_died_already() -> None:
    """One loss is enough; the newcomer comes all the same."""
    director = Director(OPTIONS, Limits())
    state = after([(15, ended("elm", -9))], three_training())
    assert director.actions(state, 20.0) == []
    assert director.actions(state, 30.0) == [StartNewcomer()]


def test_newcomer_is_started_before_half_by_the_time_that_loading_takes() -> None:
    """The first peers needed 8 s, a tenth of the run is 6 s: so 6 s early, once."""
    director = Director(OPTIONS, Limits())
    state = three_training()
    assert director.actions(state, 20.0) == [Kill("elm")]
    assert director.actions(state, 23.9) == []
    assert director.actions(state, 24.0) == [StartNewcomer()]
    assert director.actions(state, 24.1) == []


def test_newcomer_waits_for_the_survivors_of_a_late_kill() -> None:
    """Two epochs lie between the kill and the newcomer."""
    director = Director(OPTIONS, Limits())
    state = three_training()
    assert director.actions(state, 29.5) == [Kill("elm")]
    assert director.actions(state, 31.4) == []
    assert director.actions(state, 31.5) == [StartNewcomer()]


def test_end_is_announced_at_the_time_and_lies_ahead() -> None:
    """Fast swarms get more epochs to hear of it."""
    director = Director(OPTIONS, Limits(margin_s=1.5))
    assert director.actions(three_training(), 60.0) == [TellStop(4 + 2)]
    fast = after([(14 + 0.1 * epoch, said("oak", stepped_into(epoch))) for epoch in range(5, 40)], three_training())
    assert Director(OPTIONS, Limits(margin_s=1.5)).actions(fast, 60.0) == [TellStop(39 + 15)]


def test_peers_go_home_when_all_that_live_have_finished() -> None:
    """The dead are not waited for; afterwards the director is silent."""
    director = Director(OPTIONS, Limits())
    state = after([(60, stop_announced(6)), (61, said("oak", finished(6)))], three_training())
    assert director.actions(state, 61.0) == []
    state = after([(62, said("elm", finished(6))), (63, ended("fir", -9))], state)
    assert director.actions(state, 63.0) == [SendHome()]
    assert director.actions(state, 64.0) == []


@pytest.mark.parametrize(
    ("state", "now_s", "reason"),
    [
        (after([(1, ended(name, -9)) for name in ("oak", "elm", "fir")], three_training()), 20.0, "no peer is left"),
        (after([(0, started("oak", 1))]), 120.0, "no peer was ready within 120 s"),
        (
            after([(60, stop_announced(6)), (61, said("elm", finished(6)))], three_training()),
            105.0,
            "oak, fir did not reach the last epoch within 45 s",
        ),
    ],
)
def test_hopeless_run_is_given_up(state: DemoState, now_s: float, reason: str) -> None:
    """Every wait has a deadline."""
    director = Director(OPTIONS, Limits())
    assert director.actions(state, now_s) == [GiveUp(reason)]
    assert director.actions(state, now_s + 1) == []


def test_the_announced_kill_happens_where_peers_start_slowly() -> None:
    """They trained from 55 s of 60 on: nobody was killed, nobody came, and nothing said so."""
    director, state, done = Director(OPTIONS, Limits()), three_training(late_s=47), dict[type[object], float]()
    waiting = after([(0, started("oak", 1)), (0, started("elm", 2))])
    assert not any(director.actions(waiting, float(now_s)) for now_s in range(55))
    for now_s in range(55, 120):
        for action in director.actions(state, float(now_s)):
            done.setdefault(type(action), now_s)
    assert done == {Kill: 60, StartNewcomer: 64, TellStop: 100}


def test_end_waits_for_somebody_to_hear_it() -> None:
    """A short run on a slow machine still starts."""
    director = Director(OPTIONS, Limits())
    assert director.actions(after([(0, started("oak", 1))]), 70.0) == []


# ------------------------------------------------------------------------------------------------ record and verdict


def test_verdict_is_good_only_for_equal_weights_at_the_last_epoch_and_a_lower_loss() -> None:
    """Each way to fail is named."""
    good = done(oak="aa", elm="aa", fir="aa")
    assert verdict(good) == ""
    assert verdict(done(oak="aa", elm="ab", fir="aa")) == "the peers hold different weights: oak aa, elm ab, fir aa"
    assert verdict(done(oak="aa", elm="aa")) == "fir did not reach the last epoch"
    assert verdict(three_training()) == "no peer reached the last epoch"
    assert verdict(replace(good, stop_epoch=5)).startswith("the peers stopped at different epochs: oak 4")
    assert verdict(replace(good, losses=good.losses[:1])) == "the loss did not fall: from 7.6 to 7.6"
    assert verdict(replace(good, losses=[])) == "the loss did not fall: from None to None"


def test_verdict_does_not_count_the_lost() -> None:
    """A peer that was killed owes nothing, also if it had finished."""
    state = after(
        [(14, stop_announced(4)), (15, said("oak", finished())), (15, said("elm", finished()))], three_training()
    )
    assert verdict(after([(16, ended("fir", -9)), (16, ended("elm", -9))], state)) == ""


def test_nan_loss_is_no_success() -> None:
    """Weights may be equal and worthless."""
    state = done(oak="aa", elm="aa", fir="aa")
    bad = replace(state, losses=[state.losses[0], state.losses[-1]._replace(loss=float("nan"))])
    assert verdict(bad) == "the loss did not fall: from 7.6 to nan"


def test_record_holds_the_numbers_of_the_run(tmp_path: Path) -> None:
    """The fields that others read, with their meaning."""
    state = after([(12.5, started("yew", 200, newcomer=True)), (12.6, said("yew", training()))], three_training())
    state = after([(13.2, ended("fir", -9)), (14, stop_announced(4))], state)
    state = after([(15, said(name, finished())) for name in ("oak", "elm")], state)
    state = after([(16, said("baseline", say.BaselinePoint(epoch=3, samples=48, loss=4.5)))], state)
    state = after([(18, over(baseline_complete=False))], state)
    path = tmp_path / "run.json"
    write_record(path, make_record(state, OPTIONS, 18.0))
    found = json.loads(path.read_text())
    assert found["pids"] == [100, 101, 102, 200]
    assert (found["peers_started"], found["killed"], found["joined"]) == (3, 1, 1)
    assert found["epoch_times_s"] == [10, 11, 12, 13]
    assert (found["loss_first"], found["loss_last"], found["baseline_loss_last"]) == (7.6, 4.0, 4.5)
    assert (found["baseline_samples"], found["baseline_complete"], found["samples"]) == (48, False, 64)
    assert found["weights_sha256"] == {str(id_of("oak")): "aa", str(id_of("elm")): "aa"}
    assert (found["state_download_s"], found["state_download_bytes"]) == (None, None)
    assert (found["phase"], found["exit_reason"]) == ("done", "completed")
    assert list(tmp_path.iterdir()) == [path]


def test_empty_run_makes_a_record() -> None:
    """The file is there from the first moment."""
    record = make_record(DemoState(seconds=60), OPTIONS, 0.0)
    assert [record[name] for name in ("epochs", "loss_first", "max_stall_s", "pids")] == [0, None, 0.0, []]


# -------------------------------------------------------------------------------------------------------- conclusion


def test_conclusion_of_a_good_run_begins_with_the_proof() -> None:
    """The full hash, the losses, who was lost, the longest stall."""
    state = after([(12.5, killing("fir")), (14, stop_announced(4))], three_training())
    state = after([(15, said(name, finished(weights="ab" * 32))) for name in ("oak", "elm")], state)
    state = after([(16, said("baseline", say.BaselinePoint(epoch=4, samples=64, loss=3.9)))], state)
    state = after([(18, over(baseline_complete=True))], state)
    assert conclusion(state) == [
        f"All 2 surviving peers hold identical weights at epoch 4: sha256 {'ab' * 32}",
        "Held-out loss 7.60 → 4.00 in 4 epochs, 64 sequences; one process alone with as many: 3.90.",
        "fir was killed (SIGKILL) at 12.5 s; the next epoch was done 0.5 s later.",
        "Longest time without a new epoch: 1.0 s.",
    ]


def test_conclusion_says_when_the_single_process_had_fewer() -> None:
    """A baseline that ran out of time is compared where it stopped."""
    state = done(oak="aa", elm="aa", fir="aa")
    point = said("baseline", say.BaselinePoint(epoch=2, samples=32, loss=5.9))
    state = after([(16, point), (18, over(baseline_complete=False))], state)
    assert conclusion(state)[2] == "No peer was killed: there were not two that had trained in time."
    assert conclusion(state)[1] == (
        "Held-out loss 7.60 → 4.00 in 4 epochs, 64 sequences; one process alone came to 5.90 after 32 of them when its "
        "time was up (the swarm had 7.60 there)."
    )


def test_conclusion_of_a_failed_run_claims_nothing() -> None:
    """Only the reason."""
    state = after([(20, over(reason="no peer is left"))], three_training())
    assert conclusion(state) == ["The run did not succeed: no peer is left"]


# ------------------------------------------------------------------------------------------------ settings, messages


@pytest.mark.parametrize("wrong", [{"seconds": 0}, {"peers": 1}, {"peers": 17}, {"seed": -1}])
def test_option_out_of_range_is_named(wrong: dict[str, int]) -> None:
    """The message begins with the option."""
    with pytest.raises(ConfigError, match=f"^{next(iter(wrong))}="):
        DemoOptions(**wrong)  # type: ignore[arg-type]


def test_warm_up_is_linear_and_never_zero() -> None:
    """The first step already moves."""
    training_settings = Training(warm_up_epochs=4)
    assert [warm_up(training_settings, epoch) for epoch in (0, 1, 3, 4, 100)] == [0.25, 0.5, 1.0, 1.0, 1.0]


def test_messages_survive_the_pipe() -> None:
    """Every kind comes out as it went in, on one line."""
    reports: list[say.Report] = [READY["oak"], training(), finished(), noted("a\nb"), stepped_into(3)]
    reports.append(events.PeerLost(peer=id_of("oak"), reason="closed"))
    for report in reports:
        line = say.encode(report)
        assert b"\n" not in line
        assert say.decode_report(line) == report
    for command in (say.Stop(epoch=3), say.Leave()):
        assert say.decode_command(say.encode(command)) == command


def test_output_that_cannot_be_written_is_refused_before_anything_starts(tmp_path: Path) -> None:
    """The message names the option."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"^json="):
        run_demo(DemoOptions(json=tmp_path / "nowhere" / "run.json", report=None))
    with pytest.raises(ConfigError, match=r"^json="):
        run_demo(DemoOptions(json=tmp_path, report=None))
    with pytest.raises(ConfigError, match=r"^report="):
        run_demo(DemoOptions(report=tmp_path / "file"))


def test_missing_matplotlib_is_said_before_anything_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With the command that mends it."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=re.escape(f"{install_command('demo')}, or give --no-report")):
        run_demo(DemoOptions(report=tmp_path))
