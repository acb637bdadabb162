"""The rota of devices: one engine has a device at a time, whatever is late, silent or dead."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from msgspec.structs import replace

from serve_app.settings.turns import ShareSettings
from serve_app.turns.rota import HOLDING, SILENT_S, Entry, Order, State, follow

WORK: dict[str, Any] = {"busy": True, "tokens": 100, "left_s": 5.0}
IDLE: dict[str, Any] = {"busy": False, "tokens": 0, "left_s": 0.0, "since": None}
ONE = ("gpu",)


@dataclass
class Devices:
    """Engines that share devices, at a time that the test sets."""

    settings: ShareSettings = field(default_factory=lambda: ShareSettings(min_turn_s=5.0, max_wait_s=30.0))
    now: float = 1.0
    entries: dict[str, Entry] = field(default_factory=dict)

    def look(self, name: str, **changes: Any) -> Order:
        """Let an engine look, after changes of its entry."""
        own = replace(self.entries[name], at=self.now, **changes)
        others = {other: entry for other, entry in self.entries.items() if other != name}
        order = follow(self.now, name, own, others, self.settings)
        self.entries[name] = order.entry
        return order

    def state(self, name: str, **changes: Any) -> State:
        """Let an engine look, and return its state."""
        return self.look(name, **changes).entry.state

    def start(self, name: str, devices: tuple[str, ...] = ONE, group: str = "g") -> State:
        """Let an engine come up, and return whether it loads or waits."""
        self.entries[name] = Entry(group, devices, "starting", self.now, since=self.now)
        return self.state(name)

    def awake(self, name: str, **work: Any) -> State:
        """Let an engine end its load, or its wake-up."""
        assert self.entries[name].state in {"loading", "waking"}
        return self.state(name, state="awake", began=self.now, since=None, **work)

    def asleep(self, name: str, sleep_s: float = 0.5, **work: Any) -> Order:
        """Let an engine that drains fall asleep, which takes a while."""
        assert self.entries[name].state == "draining"
        self.now += sleep_s
        return self.look(name, state="asleep", freed=self.now, sleep_s=sleep_s, **work)


@pytest.fixture
def pair() -> Devices:
    """Two engines, of which "b" is awake and idle."""
    devices = Devices()
    assert devices.start("a") == "loading"
    devices.awake("a")
    assert devices.start("b") == "starting"
    assert devices.state("a") == "draining"
    devices.asleep("a")
    assert devices.state("b") == "loading"
    assert devices.awake("b") == "awake"
    return devices


def test_engines_load_one_after_the_other_each_asleep_before_the_next() -> None:
    devices = Devices()
    assert [devices.start(name) for name in "abc"] == ["loading", "starting", "starting"]
    for first, second in ("ab", "bc"):
        assert devices.state(second) == "starting"
        assert devices.awake(first) == "draining"
        assert devices.state(second) == "starting"
        devices.asleep(first)
        assert devices.state(second) == "loading"


def test_a_switch_waits_until_the_first_engine_sleeps(pair: Devices) -> None:
    assert pair.state("a", **WORK) == "asleep"
    assert pair.state("b") == "draining"
    pair.now = 100.0
    assert pair.state("a") == "asleep"
    assert pair.state("b", **WORK) == "draining"
    assert pair.asleep("b").entry.state == "asleep"
    assert pair.state("a") == "waking"
    # The work that came while it drained waits for the next turn.
    assert pair.state("b") == "asleep"


def test_an_engine_goes_on_if_the_next_has_no_more_work(pair: Devices) -> None:
    pair.look("a", **WORK)
    assert pair.state("b") == "draining"
    pair.look("a", **IDLE)
    assert pair.state("b") == "awake"


def test_a_device_without_work_stays_with_its_model(pair: Devices) -> None:
    pair.now = 500.0
    assert (pair.state("b"), pair.state("a")) == ("awake", "asleep")


def test_the_device_of_a_dead_engine_is_given_on(pair: Devices) -> None:
    assert pair.state("b", **WORK) == "awake"
    assert pair.state("a", **WORK) == "asleep"
    del pair.entries["b"]
    assert pair.state("a") == "waking"
    # Another replica of "b" waits for a turn to load.
    assert pair.start("b2") == "starting"


@pytest.mark.parametrize("victim", ["a", "b"])
@pytest.mark.parametrize("when", ["draining", "asleep", "waking"])
def test_a_death_in_the_middle_of_a_switch_leaves_no_device_idle(
    pair: Devices, victim: str, when: str
) -> None:
    pair.look("a", **WORK)
    assert pair.state("b", **IDLE) == "draining"
    if when != "draining":
        pair.asleep("b", **WORK)
    if when == "waking":
        assert pair.state("a") == "waking"
    del pair.entries[victim]
    other = "ab".replace(victim, "")
    assert pair.state(other) in {"waking", "awake"}


def test_an_engine_that_fails_to_wake_up_leaves_the_device(pair: Devices) -> None:
    pair.look("a", **WORK)
    pair.look("b")
    pair.asleep("b", **WORK)
    assert pair.state("a") == "waking"
    assert pair.state("a", state="failed", freed=pair.now) == "failed"
    assert pair.state("b") == "waking"
    pair.now += 100.0
    assert pair.awake("b") == "awake"
    assert pair.state("a") == "failed"


def test_a_silent_engine_keeps_its_device_and_holds_up_no_other_engine(pair: Devices) -> None:
    pair.look("a", **WORK)
    pair.now += SILENT_S + 0.1
    # Its process may hang while it waits.
    assert pair.state("b") == "awake"
    pair.now += SILENT_S + 0.1
    assert pair.state("a") == "asleep"


def test_engines_of_other_groups_and_devices_take_no_turns_together(pair: Devices) -> None:
    assert pair.start("c", ("other",)) == "loading"
    assert pair.start("d", ONE, group="h") == "loading"
    assert pair.state("b") == "awake"


def test_the_cost_of_a_switch_is_measured(pair: Devices) -> None:
    pair.look("a", **WORK, since=pair.now)
    pair.look("b")
    pair.now += 4.0
    pair.asleep("b", drain_s=3.5)
    order = pair.look("a")
    # "b" did work until its sleep began.
    assert order.still_from == pair.now - 0.5
    pair.awake("a", wake_s=0.75)
    assert pair.look("b", **WORK).wait_s >= 0.5 + 0.75 + 3.5


def test_an_engine_that_fell_asleep_for_nobody_leaves_the_device_free(pair: Devices) -> None:
    pair.look("a", **WORK, since=pair.now)
    assert pair.state("b") == "draining"
    # Its sleep has begun, and the clients of the other engine leave.
    pair.look("a", **IDLE)
    pair.now = 100.0
    assert pair.asleep("b").entry.state == "asleep"
    pair.now = 200.0
    order = pair.look("a", **WORK, since=pair.now)
    # The device had nothing to do before.
    assert (order.entry.state, order.still_from) == ("waking", 200.0)


def test_an_engine_that_fell_asleep_for_nobody_wakes_for_own_work(pair: Devices) -> None:
    pair.look("a", **WORK)
    pair.look("b")
    pair.look("a", **IDLE)
    pair.now = 100.0
    order = pair.asleep("b", **WORK, since=90.0)
    assert (order.entry.state, order.still_from) == ("waking", 100.0)


def test_the_expected_wait_counts_down_to_the_turn(pair: Devices) -> None:
    pair.look("b", busy=True, tokens=1_000, left_s=100.0)
    # It falls asleep in half a second.
    assert pair.look("a", **WORK, since=pair.now).wait_s == 30.5
    pair.now += 20.0
    assert pair.look("a").wait_s == 10.5


def test_a_model_on_two_devices_takes_both_at_once() -> None:
    devices = Devices()
    assert devices.start("left", ("0",)) == devices.start("right", ("1",)) == "loading"
    for name in ("left", "right"):
        devices.awake(name, **WORK)
    devices.start("both", ("0", "1"))
    devices.now += 6.0
    assert devices.state("both") == "starting"
    # Its own wait is not due, and one of the two has no more work.
    assert devices.state("left", **IDLE) == "draining"
    assert devices.state("right") == "awake"
    devices.asleep("left", **WORK)
    # The first device is kept for it.
    assert (devices.state("both"), devices.state("left")) == ("starting", "asleep")
    assert devices.state("right", **IDLE) == "draining"
    devices.asleep("right")
    assert devices.state("both") == "loading"
    assert devices.state("left") == "asleep"


class RotaMachine(RuleBasedStateMachine):
    """Engines look, switch, fall silent, fail and die in any order; no device has two engines."""

    NAMES = "abcde"

    def __init__(self) -> None:
        super().__init__()
        self.devices = Devices()

    @rule(name=st.sampled_from(NAMES), on=st.sampled_from([("0",), ("1",), ("0", "1"), ("1", "2")]))
    def come_up(self, name: str, on: tuple[str, ...]) -> None:
        if name not in self.devices.entries:
            self.devices.start(name, on)

    @rule(name=st.sampled_from(NAMES), busy=st.booleans(), tokens=st.integers(1, 1_000))
    def look(self, name: str, busy: bool, tokens: int) -> None:
        if entry := self.devices.entries.get(name):
            waits = busy and entry.state != "awake"
            since = entry.since if waits and entry.since is not None else self.devices.now
            work = WORK | {"tokens": tokens, "since": since if waits else None} if busy else IDLE
            self.devices.look(name, **({} if entry.state == "starting" else work))

    @rule(name=st.sampled_from(NAMES), fails=st.booleans())
    def switch(self, name: str, fails: bool) -> None:
        """End what an engine has begun, and let it look."""
        match self.devices.entries.get(name):
            case Entry(state="waking") if fails:
                self.devices.look(name, state="failed", freed=self.devices.now)
            case Entry(state="loading" | "waking"):
                self.devices.awake(name)
            case Entry(state="draining"):
                self.devices.asleep(name)

    @rule(seconds=st.floats(0, 40))
    def wait(self, seconds: float) -> None:
        self.devices.now += seconds

    @rule(name=st.sampled_from(NAMES))
    def die(self, name: str) -> None:
        self.devices.entries.pop(name, None)

    @invariant()
    def a_device_has_one_engine(self) -> None:
        taken = [
            device
            for entry in self.devices.entries.values()
            if entry.state in HOLDING
            for device in entry.devices
        ]
        assert len(taken) == len(set(taken))

    @rule()
    def each_engine_that_waits_gets_its_turn(self) -> None:
        """All engines have work from now on, and look each second."""
        entries = self.devices.entries
        left = {name for name, entry in entries.items() if entry.state != "failed"}
        for _ in range(300):
            for name in sorted(entries):
                self.look(name, True, 100)
                if entries[name].state in {"loading", "waking", "awake"}:
                    left.discard(name)
                self.switch(name, False)
            self.devices.now += 1.0
            if not left:
                return
        raise AssertionError(f"{left} have had no turn: {entries}")


TestRotaMachine = RotaMachine.TestCase
