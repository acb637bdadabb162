"""The policy of turns: each rule by itself, and all of them on a device that is simulated in virtual time."""

import math
from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis import assume, given

from serve_app.turns.schedule import Awake, TurnLimits, Waiting, expected_s, latest_start, next_turn

LIMITS = TurnLimits(min_turn_s=5.0, max_wait_s=30.0, switch_s=2.0, still_s=0.4)
BUSY = Awake(since=0.0, busy=True, tokens=100, tier=0, left_s=60.0)


def test_it_goes_on_while_nothing_else_waits() -> None:
    assert next_turn(1_000.0, BUSY, {}, LIMITS) is None
    assert next_turn(1_000.0, BUSY._replace(busy=False), {}, LIMITS) is None


def test_one_without_work_gives_way_at_once() -> None:
    assert next_turn(0.1, BUSY._replace(busy=False), {"b": Waiting(0.0, 1)}, LIMITS) == "b"
    assert next_turn(0.1, None, {"b": Waiting(0.0, 1)}, LIMITS) == "b"


def test_a_turn_lasts_for_the_minimum_and_is_worth_its_switch() -> None:
    more = {"b": Waiting(0.0, 1_000)}
    assert next_turn(4.9, BUSY, more, LIMITS) is None
    assert next_turn(5.0, BUSY, more, LIMITS) == "b"
    costly = LIMITS._replace(still_s=2.0)
    assert next_turn(17.9, BUSY, more, costly) is None
    assert next_turn(18.0, BUSY, more, costly) == "b"


@pytest.mark.parametrize(
    ("other", "goes"),
    [
        (Waiting(9.0, tokens=99), False),
        (Waiting(9.0, tokens=101), True),
        (Waiting(9.0, tokens=1, tier=-1), True),
        (Waiting(9.0, tokens=10_000, tier=1), False),
        (Waiting(9.0, tokens=1, tier=1, deadline=13.0), True),
        # There is time until later, or none any more.
        (Waiting(9.0, tokens=1, tier=1, deadline=20.0), False),
        (Waiting(9.0, tokens=1, tier=1, deadline=11.0), False),
    ],
)
def test_after_that_the_most_urgent_work_goes_first(other: Waiting, goes: bool) -> None:
    assert next_turn(10.0, BUSY, {"b": other}, LIMITS) == ("b" if goes else None)


def test_one_with_nothing_in_its_queue_gives_way_after_its_minimum() -> None:
    running = Awake(since=0.0, busy=True)
    assert next_turn(4.0, running, {"b": Waiting(0.0, 1, tier=1)}, LIMITS) is None
    assert next_turn(6.0, running, {"b": Waiting(0.0, 1, tier=1)}, LIMITS) == "b"


def test_a_wait_that_is_due_ends_a_turn() -> None:
    little = {"b": Waiting(0.0, 1, tier=1)}
    assert next_turn(29.9, BUSY, little, LIMITS) is None
    assert next_turn(30.0, BUSY, little, LIMITS) == "b"
    # Even one that has only just begun.
    assert next_turn(30.0, BUSY._replace(since=29.9), little, LIMITS) == "b"


def test_with_several_the_first_is_due_earlier() -> None:
    little = {"b": Waiting(1.0, 1, tier=1), "c": Waiting(0.0, 1, tier=1)}
    assert latest_start(little, LIMITS) == 31.0 - 7.0
    assert next_turn(23.9, BUSY, little, LIMITS) is None
    assert next_turn(24.0, BUSY, little, LIMITS) == "c"
    # The minimum turn goes before, as long as no wait is over.
    assert next_turn(24.0, BUSY._replace(since=20.0), little, LIMITS) is None


def test_the_most_urgent_one_is_next_if_the_others_can_wait() -> None:
    idle = BUSY._replace(busy=False)
    others = {"old": Waiting(0.0, 1), "large": Waiting(10.0, 1_000)}
    assert next_turn(20.0, idle, others, LIMITS) == "large"
    assert next_turn(24.0, idle, others, LIMITS) == "old"


def test_the_expected_wait_is_that_of_the_plan() -> None:
    # Nothing is awake: a switch, and a turn for each that waits for longer.
    others = {"b": Waiting(5.0, 1)}
    assert expected_s(10.0, "b", None, others, LIMITS) == 2.0
    assert expected_s(10.0, "c", None, others, LIMITS) == 9.0
    # The one that is awake ends its work before the wait is due.
    soon = BUSY._replace(left_s=4.0)
    assert expected_s(10.0, "b", soon, others, LIMITS) == 6.0
    assert expected_s(1.0, "b", soon._replace(since=0.5), {"b": Waiting(1.0, 1)}, LIMITS) == 6.5
    # Or it goes on until then.
    assert expected_s(10.0, "b", BUSY, others, LIMITS) == 27.0


@dataclass
class Turn:
    """A turn of the simulated device.

    Attributes:
        model: Its model.
        began: When it was awake.
        ended: When its end was decided; infinite for the last one.
        busy: Whether it had work then.
        due: Whether the wait of another one was over then.
    """

    model: str
    began: float
    ended: float = math.inf
    busy: bool = False
    due: bool = False


@dataclass
class SimulatedDevice:
    """A device whose models have seconds of work that arrive at given times.

    It moves by steps of 0.1 s; so a switch takes a bit less than the policy is told.
    """

    limits: TurnLimits
    arrivals: list[tuple[float, str, float]]
    turns: list[Turn] = field(default_factory=list)
    waits: list[tuple[str, float, float]] = field(default_factory=list)

    def run(self, seconds: float) -> None:
        """Run to the end of all work, `seconds` at most."""
        left: dict[str, float] = {}
        since: dict[str, float] = {}
        awake: str | None = None
        waking: tuple[str, float] | None = None
        arrivals = sorted(self.arrivals)
        for step in range(int(seconds * 10)):
            now = step / 10
            while arrivals and arrivals[0][0] <= now:
                _, name, work = arrivals.pop(0)
                left[name] = left.get(name, 0.0) + work
                if name != awake:
                    since.setdefault(name, now)
            if waking is not None:
                if now < waking[1] - 1e-9:
                    continue
                awake, waking = waking[0], None
                self.waits.append((awake, since.pop(awake), now))
                self.turns.append(Turn(awake, now))
            if not arrivals and not any(left.values()):
                return
            if awake is not None and left.get(awake):
                left[awake] = max(0.0, left[awake] - 0.1)
            others = {name: Waiting(since[name], int(100 * left[name])) for name in since}
            holder = None
            if awake is not None:
                work = left.get(awake, 0.0)
                holder = Awake(self.turns[-1].began, work > 0, int(100 * work), 0, work)
            chosen = next_turn(now, holder, others, self.limits)
            if chosen is None:
                continue
            if awake is not None:
                turn = self.turns[-1]
                turn.ended, turn.busy = now, left.get(awake, 0.0) > 0
                turn.due = any(now >= one.since + self.limits.max_wait_s for one in others.values())
                if turn.busy:
                    since[awake] = now
            awake, waking = None, (chosen, now + self.limits.switch_s - 0.2)


work = st.lists(
    st.tuples(
        st.integers(0, 600).map(lambda tenths: tenths / 10),
        st.sampled_from(["a", "b", "c", "d"]),
        st.integers(1, 200).map(lambda tenths: tenths / 10),
    ),
    min_size=1,
    max_size=40,
)


@given(work, st.integers(1, 60), st.integers(3, 40), st.integers(10, 900), st.booleans())
def test_waits_and_turns_keep_their_limits(
    arrivals: list[tuple[float, str, float]], min_turn: int, switch: int, max_wait: int, still: bool
) -> None:
    limits = TurnLimits(min_turn / 10, max_wait / 10, switch / 10, switch / 10 if still else 0.0)
    models = {name for _, name, _ in arrivals}
    device = SimulatedDevice(limits, arrivals)
    device.run(1_500.0)
    # All work is done.
    assert {turn.model for turn in device.turns} == models
    for turn in device.turns:
        # No turn is shorter than the minimum while its model has work, but for a wait that is due.
        if turn.busy:
            assert turn.due or turn.ended - turn.began >= limits.min_turn_s - 1e-6
    if len(models) == 1:
        assert len(device.turns) == 1
    assume(limits.max_wait_s >= (len(models) - 1) * limits.round_s)
    for _, since, awake in device.waits:
        assert awake - since <= limits.max_wait_s + limits.switch_s + 1e-6
    # So no wait ends a turn before its minimum.
    assert all(turn.ended - turn.began >= limits.min_turn_s - 1e-6 for turn in device.turns if turn.busy)


def test_two_models_that_always_have_work_leave_nine_tenths_of_the_time() -> None:
    limits = TurnLimits(min_turn_s=1.0, max_wait_s=60.0, switch_s=0.8, still_s=0.8)
    device = SimulatedDevice(limits, [(0.0, "a", 400.0), (0.0, "b", 400.0)])
    device.run(500.0)
    assert (len(device.turns) - 1) * 0.8 < 0.11 * 500.0
