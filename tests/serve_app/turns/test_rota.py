"""The rota of a device: one engine has it at a time, whatever is lost, late, or dead."""

from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from serve_app.turns.messages import HOLDING, Order, State, TurnDemand, TurnReport
from serve_app.turns.rota import Rota

WORK = TurnDemand(True, tokens=100, waited_s=0.0, left_s=5.0)
IDLE = TurnDemand()


@dataclass
class Devices:
    """A rota and the engines that report to it, all at a time that the test sets."""

    rota: Rota = field(default_factory=lambda: Rota(min_turn_s=5.0, max_wait_s=30.0))
    now: float = 0.0
    numbers: dict[str, int] = field(default_factory=dict)

    def tell(self, name: str, state: State, demand: TurnDemand = IDLE, **more: float) -> Order:
        self.numbers[name] = self.numbers.get(name, 0) + 1
        report = TurnReport("g", "gpu", name, name, self.numbers[name], state, demand, **more)
        return self.rota.exchange(report, self.now)

    def load(self, name: str) -> None:
        """Let an engine come up: it has the device, loads, and is awake."""
        assert self.tell(name, "starting", TurnDemand(True)).yours
        self.tell(name, "loading")
        assert self.rota.holder == name
        self.tell(name, "awake")

    def switch(self, before: str, after: str, demand: TurnDemand = WORK) -> None:
        assert not self.tell(before, "draining").yours
        self.tell(before, "asleep")
        assert self.tell(after, "asleep", demand).yours
        self.tell(after, "waking", demand)
        assert self.tell(after, "awake", demand).yours


@pytest.fixture
def pair() -> Devices:
    """Two engines, of which "b" is awake and idle."""
    devices = Devices()
    devices.load("a")
    devices.tell("b", "starting", TurnDemand(True))
    assert not devices.tell("a", "draining").yours
    devices.tell("a", "asleep", sleep_s=0.5)
    devices.load("b")
    return devices


def test_engines_load_one_after_the_other_each_asleep_before_the_next() -> None:
    devices = Devices()
    for name in "abc":
        devices.tell(name, "starting", TurnDemand(True))
    devices.tell("a", "loading")
    for name in "bc":
        assert not devices.tell(name, "starting", TurnDemand(True)).yours
    assert not devices.tell("a", "awake").yours
    assert not devices.tell("b", "starting", TurnDemand(True)).yours
    devices.tell("a", "asleep")
    assert devices.tell("b", "starting", TurnDemand(True)).yours
    assert not devices.tell("c", "starting", TurnDemand(True)).yours
    devices.tell("b", "loading")
    assert not devices.tell("b", "awake").yours
    devices.tell("b", "asleep")
    assert devices.tell("c", "starting", TurnDemand(True)).yours


def test_a_switch_waits_for_the_report_that_the_first_one_sleeps(pair: Devices) -> None:
    assert not pair.tell("a", "asleep", WORK).yours
    assert not pair.tell("b", "awake").yours
    pair.now = 100.0
    assert not pair.tell("a", "asleep", WORK).yours
    assert not pair.tell("b", "draining").yours
    assert not pair.tell("a", "asleep", WORK).yours
    pair.tell("b", "asleep")
    assert pair.tell("a", "asleep", WORK).yours


def test_it_goes_on_if_the_other_has_nothing_to_do_any_more(pair: Devices) -> None:
    pair.tell("a", "asleep", WORK)
    assert not pair.tell("b", "awake").yours
    pair.tell("a", "asleep", IDLE)
    assert pair.tell("b", "draining").yours


def test_a_device_without_work_stays_with_its_model(pair: Devices) -> None:
    pair.now = 500.0
    assert pair.tell("b", "awake").yours
    assert not pair.tell("a", "asleep").yours
    assert pair.rota.turns == {"a": 1, "b": 1}


def test_the_device_of_a_dead_engine_is_given_on(pair: Devices) -> None:
    pair.tell("b", "awake", WORK)
    assert not pair.tell("a", "asleep", WORK).yours
    pair.rota.remove("b", pair.now)
    assert pair.tell("a", "asleep", WORK).yours
    # Another replica of "b" asks for a turn to load.
    assert not pair.tell("b2", "starting", TurnDemand(True)).yours


@pytest.mark.parametrize("victim", ["a", "b"])
@pytest.mark.parametrize("when", ["draining", "asleep", "waking"])
def test_a_death_in_the_middle_of_a_switch_leaves_no_device_idle(
    pair: Devices, victim: str, when: str
) -> None:
    pair.tell("a", "asleep", WORK)
    pair.tell("b", "awake")
    pair.tell("b", "draining")
    if when != "draining":
        pair.tell("b", "asleep")
        pair.tell("a", "asleep", WORK)
    if when == "waking":
        pair.tell("a", "waking", WORK)
    pair.rota.remove(victim, pair.now)
    if victim == "b":
        state: State = "waking" if when == "waking" else "asleep"
        assert pair.tell("a", state, WORK).yours
    else:
        assert pair.tell("b", "draining" if when == "draining" else "asleep", WORK).yours


def test_an_engine_that_fails_to_wake_up_leaves_the_device(pair: Devices) -> None:
    pair.tell("a", "asleep", WORK)
    pair.tell("b", "awake")
    pair.tell("b", "asleep")
    assert pair.tell("a", "asleep", WORK).yours
    pair.tell("a", "waking", WORK)
    assert not pair.tell("a", "failed", WORK).yours
    assert pair.tell("b", "asleep", WORK).yours
    pair.now += 100.0
    assert not pair.tell("a", "failed", WORK).yours
    assert pair.tell("b", "awake", WORK).yours


def test_a_new_rota_learns_who_has_the_device() -> None:
    devices = Devices(Rota(5.0, 30.0, opens_at=5.0))
    assert not devices.tell("a", "asleep", WORK).yours
    assert devices.tell("b", "awake", WORK).yours
    assert not devices.tell("a", "asleep", WORK).yours
    late = Devices(Rota(5.0, 30.0, opens_at=5.0), now=4.0)
    assert not late.tell("a", "asleep", WORK).yours
    late.now = 5.0
    assert late.tell("a", "asleep", WORK).yours


def test_of_two_that_are_awake_one_is_sent_to_sleep(pair: Devices) -> None:
    assert not pair.tell("a", "awake", WORK).yours
    assert pair.tell("b", "awake", WORK).yours


def test_a_report_that_comes_late_is_out_of_date(pair: Devices) -> None:
    pair.tell("a", "asleep", WORK)
    pair.tell("b", "awake")
    late = TurnReport("g", "gpu", "b", "b", 1, "asleep")
    assert not pair.rota.exchange(late, pair.now).yours
    assert not pair.tell("a", "asleep", WORK).yours


def test_the_cost_of_a_switch_is_measured(pair: Devices) -> None:
    pair.tell("a", "asleep", WORK)
    pair.tell("b", "awake")
    pair.now += 3.0
    pair.tell("b", "draining")
    pair.now += 0.5
    pair.tell("b", "asleep", sleep_s=0.5)
    pair.tell("a", "asleep", WORK)
    pair.tell("a", "waking", WORK)
    pair.now += 0.75
    pair.tell("a", "awake", WORK, wake_s=0.75)
    assert pair.rota.limits.still_s == 1.25
    assert pair.rota.limits.switch_s == 4.25
    assert pair.rota.still_s["a"] == 1.25
    assert pair.tell("b", "asleep", WORK).wait_s >= 4.25


def test_an_engine_that_fell_asleep_for_nobody_leaves_the_device_free(pair: Devices) -> None:
    pair.tell("a", "asleep", WORK)
    assert not pair.tell("b", "awake").yours
    assert not pair.tell("b", "draining").yours
    # It reports nothing while it falls asleep; the clients of the other leave meanwhile.
    pair.tell("a", "asleep", IDLE)
    pair.now = 100.0
    assert not pair.tell("b", "asleep", sleep_s=0.5).yours
    assert pair.rota.holder is None
    pair.now = 200.0
    assert pair.tell("a", "asleep", WORK).yours
    pair.tell("a", "waking", WORK)
    pair.now = 200.25
    pair.tell("a", "awake", WORK)
    # The device had nothing to do before.
    assert pair.rota.still_s["a"] == 0.25


def test_an_engine_that_fell_asleep_for_nobody_wakes_for_own_work(
    pair: Devices,
) -> None:
    pair.tell("a", "asleep", WORK)
    pair.tell("b", "awake")
    pair.tell("b", "draining")
    pair.tell("a", "asleep", IDLE)
    pair.now = 100.0
    assert pair.tell("b", "asleep", WORK, sleep_s=0.5).yours
    pair.tell("b", "waking", WORK)
    pair.now += 0.25
    assert pair.tell("b", "awake", WORK).yours
    assert pair.rota.still_s["b"] == 0.75


def test_a_wake_up_older_than_the_rota_counts_from_its_first_report() -> None:
    devices = Devices(Rota(5.0, 30.0, opens_at=105.0), now=100.0)
    assert devices.tell("a", "waking", WORK).yours
    devices.now = 100.25
    devices.tell("a", "awake", WORK)
    assert devices.rota.still_s == {"a": 0.25}


def test_the_expected_wait_counts_down_to_the_turn(pair: Devices) -> None:
    pair.tell("b", "awake", WORK._replace(tokens=1_000, left_s=100.0))
    first = pair.tell("a", "asleep", WORK).wait_s
    assert first == 30.0
    pair.now = 20.0
    assert pair.tell("a", "asleep", WORK._replace(waited_s=20.0)).wait_s == 10.0


class RotaMachine(RuleBasedStateMachine):
    """Engines that report, switch, fail and die in any order; none has the device beside another."""

    @initialize()
    def start(self) -> None:
        self.devices = Devices()
        self.states: dict[str, State] = {}
        self.demands: dict[str, TurnDemand] = {}
        self.orders: dict[str, bool] = {}
        self.count = 0

    @rule(name=st.sampled_from("abc"), busy=st.booleans(), waited=st.floats(0, 60))
    def report(self, name: str, busy: bool, waited: float) -> None:
        state = self.states.setdefault(name, "starting")
        demand = WORK._replace(waited_s=waited) if busy else IDLE
        self.orders[name] = self.devices.tell(name, state, demand).yours

    @rule(name=st.sampled_from("abc"), fails=st.booleans(), ends=st.booleans())
    def obey(self, name: str, fails: bool, ends: bool) -> None:
        """Act as an engine does after an answer, and report it."""
        yours, state = self.orders.pop(name, None), self.states.get(name)
        if yours is None or state is None:
            return
        following: State = state
        match state, yours:
            case ("starting", True):
                following = "loading"
            case ("loading", _) | ("draining", True):
                following = "awake"
            case ("awake", False):
                following = "draining"
            case ("draining", False) if ends:
                following = "asleep"
            case ("asleep", True):
                following = "waking"
            case ("waking", _):
                following = "failed" if fails else "awake"
        self.states[name] = following
        self.orders[name] = self.devices.tell(name, following, WORK).yours

    @rule(seconds=st.floats(0, 40))
    def wait(self, seconds: float) -> None:
        self.devices.now += seconds

    @rule(name=st.sampled_from("abc"))
    def die(self, name: str) -> None:
        if name in self.states:
            self.devices.rota.remove(name, self.devices.now)
            del self.states[name], self.devices.numbers[name]
            self.orders.pop(name, None)

    @invariant()
    def one_has_the_device(self) -> None:
        holding = [name for name, state in getattr(self, "states", {}).items() if state in HOLDING]
        assert len(holding) <= 1
        assert all(name == self.devices.rota.holder for name in holding)


TestRotaMachine = RotaMachine.TestCase
