"""The phases of a run, transition by transition; `docs/why/protocol.md` has the same table."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.run.decide.phases import TRANSITIONS, Event, PhaseMachine, RunPhase, Situation, Work, tables
from tests.transitions import Recorder

COLLECTING, AVERAGING, STEPPING, BEHIND, ENDING = RunPhase

SEEN = {
    Event.BETTER: Situation(behind=True, at_end=True, may_leave=True, enough=True),
    Event.MAY_LEAVE: Situation(behind=False, at_end=True, may_leave=True, enough=True),
    Event.AT_END: Situation(behind=False, at_end=True, enough=True),
    Event.ENOUGH: Situation(behind=False, enough=True),
    Event.FEW: Situation(behind=False, enough=False),
}

TO = {
    COLLECTING: [],
    AVERAGING: [Event.ENOUGH],
    STEPPING: [Event.ENOUGH, Event.AVERAGED],
    BEHIND: [Event.BETTER],
    ENDING: [Event.AT_END],
}
"""The events that lead from the beginning to each phase."""

STORIES: list[tuple[list[Event], list[RunPhase]]] = [
    # a step of the swarm, and an averaging of states
    ([Event.FEW, Event.ENOUGH, Event.AVERAGED, Event.STEPPED], [COLLECTING, AVERAGING, STEPPING, COLLECTING]),
    ([Event.STATES_AVERAGED, Event.STEPPED], [STEPPING, COLLECTING]),
    # somebody leaves with the samples; somebody has a better state
    ([Event.ENOUGH, Event.FEW], [AVERAGING, COLLECTING]),
    ([Event.ENOUGH, Event.BETTER, Event.BETTER, Event.ENOUGH], [AVERAGING, BEHIND, BEHIND, AVERAGING]),
    ([Event.BETTER, Event.FEW], [BEHIND, COLLECTING]),
    # another state was taken over while an average was due
    ([Event.ENOUGH, Event.AVERAGED, Event.OVERTAKEN], [AVERAGING, STEPPING, COLLECTING]),
    # the end, and a later end that is announced then
    ([Event.AT_END, Event.AT_END, Event.MAY_LEAVE, Event.MAY_LEAVE], [ENDING, ENDING, COLLECTING, COLLECTING]),
    ([Event.AT_END, Event.BETTER, Event.AT_END, Event.FEW], [ENDING, BEHIND, ENDING, COLLECTING]),
    ([Event.AT_END, Event.ENOUGH], [ENDING, AVERAGING]),
    ([Event.BETTER, Event.MAY_LEAVE], [BEHIND, COLLECTING]),
    # what ends while this peer may be in any phase: a round, a download, the loading of a checkpoint
    *(
        ([*TO[phase], event], [then])
        for phase in RunPhase
        for event, then in (
            (Event.UNFIT, COLLECTING),
            (Event.MISFIT, COLLECTING),
            (Event.AVERAGED, STEPPING),
            (Event.STATES_AVERAGED, STEPPING),
            (Event.TAKEN_OVER, COLLECTING),
            (Event.RENAMED, COLLECTING),
            (Event.STATES_DUE, phase),
            (Event.STATES_OVER, phase),
        )
    ),
]


def play(events: list[Event]) -> list[RunPhase]:
    """The phases from the beginning on, one after each event."""
    machine, phases = PhaseMachine(), [COLLECTING]
    for event in events:
        machine.happened(event)
        phases.append(machine.phase)
    return phases


@pytest.mark.parametrize(("events", "phases"), STORIES)
def test_each_event_leads_on(events: list[Event], phases: list[RunPhase]) -> None:
    """What happens in a run, and the phases that it leads through."""
    assert play(events)[-len(phases) :] == phases


def test_the_stories_above_take_every_transition() -> None:
    """None of the table is untested: each phase with each event that can come in it."""
    with Recorder(PhaseMachine, ["happened"], event=lambda _, __, event: event.name, also_same=True) as recorder:
        for events, _ in STORIES:
            play(events)
    recorder.check(TRANSITIONS)
    assert {event for _, event, _ in TRANSITIONS} == {event.name for event in Event}


def test_an_event_that_cannot_come_is_no_transition() -> None:
    """A fault of the shell shows at once."""
    with pytest.raises(KeyError):
        PhaseMachine().happened(Event.STEPPED)


@pytest.mark.parametrize("event", SEEN)
def test_a_look_is_the_first_event_that_is_true(event: Event) -> None:
    """A better state comes before the end of the run, and that before the samples."""
    assert SEEN[event].event is event


def test_a_peer_that_must_fetch_is_behind() -> None:
    """Also where no better state counts: it may not begin, or something waits to be taken over."""
    assert Situation(behind=False, must_fetch=True, enough=True).event is Event.BETTER


def at(phase: RunPhase, **settings: bool) -> PhaseMachine:
    """A machine in this phase."""
    machine = PhaseMachine(**settings)
    for event in TO[phase]:
        machine.happened(event)
    assert machine.phase is phase
    return machine


def work(machine: PhaseMachine, event: Event, *, alone: bool = False, nobody: bool = False) -> Work:
    """What the background task does after this look."""
    return machine.work(SEEN[event], alone=alone, nobody=nobody)


@pytest.mark.parametrize("phase", [COLLECTING, STEPPING, BEHIND, ENDING])
def test_only_averaging_is_work(phase: RunPhase) -> None:
    """In all other phases the trainer is asked, or others; an averaging of states comes before everything."""
    machine = at(phase)
    assert work(machine, Event.ENOUGH) is Work.WAIT
    machine.happened(Event.STATES_DUE)
    assert work(machine, Event.ENOUGH) is Work.AVERAGE_STATES


@pytest.mark.parametrize(
    ("event", "phase"), [(Event.STATES_OVER, COLLECTING), (Event.RENAMED, BEHIND), (Event.STEPPED, STEPPING)]
)
def test_an_average_of_states_is_due_until_it_is_over(event: Event, phase: RunPhase) -> None:
    """It is also over with the state that it was for: a checkpoint was loaded, or a step taken."""
    machine = at(phase)
    machine.happened(Event.STATES_DUE)
    assert machine.states_due
    machine.happened(event)
    assert not machine.states_due


@pytest.mark.parametrize(("event", "then"), [(Event.BETTER, BEHIND), (Event.FEW, COLLECTING)])
def test_a_round_that_is_of_no_use_does_not_begin(event: Event, then: RunPhase) -> None:
    """Between two rounds the machine goes on at once, and wants another look."""
    machine = at(AVERAGING)
    assert work(machine, event) is Work.LOOK_AGAIN
    assert machine.phase is then


@pytest.mark.parametrize("event", [Event.ENOUGH, Event.AT_END, Event.MAY_LEAVE])
def test_enough_samples_are_averaged(event: Event) -> None:
    """Also if the end of the run is heard of just then."""
    assert work(at(AVERAGING), event) is Work.AVERAGE_GRADIENTS


def test_a_peer_that_knows_nobody_looks_for_others_once() -> None:
    """It does so again only after somebody was known."""
    machine = at(AVERAGING)
    assert work(machine, Event.ENOUGH, alone=True) is Work.STEP_ALONE
    assert work(machine, Event.ENOUGH, alone=True, nobody=True) is Work.SEEK
    assert work(machine, Event.ENOUGH, alone=True, nobody=True) is Work.STEP_ALONE
    machine.found()
    assert work(machine, Event.ENOUGH, alone=True, nobody=True) is Work.SEEK


@pytest.mark.parametrize("states_due", [False, True])
@pytest.mark.parametrize("phase", RunPhase)
def test_a_trainer_waits_for_a_round_and_at_the_end(phase: RunPhase, *, states_due: bool) -> None:
    """At the end it waits for the others, and for the last averaging of states; elsewhere for rounds of gradients."""
    machine = at(phase)
    if states_due:
        machine.happened(Event.STATES_DUE)
    waits = {
        (at_end, may_leave): machine.trainer_waits(needs_round=True, at_end=at_end, may_leave=may_leave)
        for at_end, may_leave in ((False, False), (True, False), (True, True))
    }
    averages = states_due and phase is not STEPPING
    assert waits == {
        (False, False): phase in (AVERAGING, ENDING),
        (True, False): phase in (AVERAGING, ENDING) or averages,
        (True, True): phase is AVERAGING or averages,
    }


@pytest.mark.parametrize("delays", [False, True])
@pytest.mark.parametrize("auxiliary", [False, True])
def test_who_has_no_batches_waits_and_who_delays_does_not(*, auxiliary: bool, delays: bool) -> None:
    """Until it may leave, and the last average is here; a step or a better state is taken at once by all."""
    waits = dict[RunPhase, list[bool]]()
    for phase in RunPhase:
        machine = at(phase, auxiliary=auxiliary, delays_gradients=delays)
        work(machine, Event.ENOUGH)
        waits[phase] = [
            machine.trainer_waits(needs_round=False, at_end=False, may_leave=may_leave) for may_leave in (False, True)
        ]
    assert waits == {
        COLLECTING: [auxiliary, False],
        AVERAGING: [True, False] if auxiliary else [not delays] * 2,
        STEPPING: [False, False],
        BEHIND: [False, False],
        ENDING: [True, False],
    }


@pytest.mark.parametrize("needs_round", [False, True])
def test_a_trainer_that_delays_waits_until_a_round_begins(*, needs_round: bool) -> None:
    """Until then it is not known that this peer does not step alone; one that cannot go on waits for the average."""
    machine = at(AVERAGING, delays_gradients=True)
    assert machine.trainer_waits(needs_round=needs_round, at_end=False, may_leave=False)
    work(machine, Event.ENOUGH)
    assert machine.trainer_waits(needs_round=needs_round, at_end=False, may_leave=False) is needs_round


def test_the_page_of_the_protocol_has_the_tables() -> None:
    """`docs/why/protocol.md` shows what the machine does."""
    page = (Path(__file__).parents[2] / "docs" / "why" / "protocol.md").read_text(encoding="utf-8")
    assert tables() in page, f"docs/why/protocol.md must have:\n{tables()}"
