"""The counters: limits hold and sums are right in any order of requests, messages, crashes and restarts."""

import json
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.quotas.counters import (
    ALWAYS,
    GONE_S,
    SILENT_S,
    SWEEP_S,
    Account,
    Ask,
    Charge,
    Counters,
    HolderAnswer,
    HolderReport,
)
from serve_app.quotas.counters import (
    Counter as QuotaCounter,
)
from serve_app.quotas.holder import HeldCounter, Holder, Reservation
from serve_app.quotas.windows import Span, window_at
from serve_app.settings.usage import Quota

QUOTA = Quota(
    tokens_per_minute=1000,
    tokens_per_day=2500,
    tokens_per_month=4000,
    requests_per_minute=40,
    max_concurrency=8,
)
SUBJECT = "tenant t"
START = 1_790_000_000.0
"""Some time in the middle of a day."""


@dataclass
class Service:
    """The counters with their state on a disk, of which a crash leaves what was written before the answer."""

    quota: Quota = QUOTA
    now: float = START
    at: float = 0.0
    disk: dict[str, str] = field(default_factory=dict)
    starts: int = 0

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.starts += 1
        self.counters = Counters(self.disk, self.at)
        self.counters.set_tenants({"t": self.quota}, "1")

    def take(self, report: HolderReport) -> HolderAnswer:
        answer = self.counters.take(report, self.now, self.at)
        if self.counters.urgent:
            self.save()
        return answer

    def settle(self, name: str, *charges: Charge) -> None:
        self.counters.settle(name, charges, self.now, self.at)
        self.save()

    def save(self) -> None:
        for key, value in self.counters.take_changes().items():
            if value is None:
                self.disk.pop(key, None)
            else:
                self.disk[key] = value

    def states(self) -> dict[str, tuple[int, int]]:
        """Return what remains and what is reserved, by limit."""
        states = self.counters.states(self.now)["tenant t"]
        return {state.name: (state.remaining, state.reserved) for state in states}


@dataclass
class Running:
    """A call that has been admitted.

    Attributes:
        holder: Its holder.
        reservation: Its reservation.
        minute: The minute in which it counts.
        tokens: The tokens that it may take, or has taken.
        ended: Whether it has ended.
        written: Whether its row is written.
    """

    holder: str
    reservation: Reservation
    minute: int
    tokens: int
    ended: bool = False
    written: bool = False


def first_name(holder: Holder) -> str:
    """Return the name that a holder began with: one that was silent for long goes on under another one."""
    return holder.name.partition("+")[0]


class Fleet:
    """Holders with one tenant's requests, and a record of what each request really takes."""

    def __init__(self, quota: Quota = QUOTA) -> None:
        self.quota = quota
        self.service = Service(quota)
        self.requests: list[Running] = []
        self.names = 0
        self.holders: list[Holder] = []
        self.limits: dict[str, list[HeldCounter]] = {}
        self.rows: Counter[str] = Counter()
        self.late: list[HolderReport] = []
        # Slots of a holder that is silent for long go to others, though its requests may still run.
        self.heard_at: dict[str, float] = {}
        self.silent = False
        for _ in range(3):
            self.join()

    def join(self) -> None:
        self.names += 1
        name = f"h{self.names}"
        holder = Holder(name, lambda: self.service.at, lambda: self.rows[name])
        self.holders.append(holder)
        self.limits[name] = list(holder.limits(SUBJECT, self.quota))

    def crash(self, number: int) -> None:
        """End a holder with all of its calls; another one settles for it, by the rows that it has written."""
        holder = self.holders.pop(number)
        name = holder.name
        self.late = [report for report in self.late if report.holder != name]
        reported = self.service.counters.rows_of(name)
        mine = [request for request in self.requests if request.holder == first_name(holder)]
        written = [request for request in mine if request.written]
        for request in mine:
            request.ended = True
            if not request.written:
                # No row says what it has used: it is charged nothing.
                self.requests.remove(request)
        if reported is not None:
            rest = written[reported:]
            self.service.settle(name, Charge(SUBJECT, sum(one.tokens for one in rest), len(rest)))
        else:
            for request in written:
                self.requests.remove(request)
        self.join()

    def take(self, number: int, tokens: int) -> bool:
        holder = self.holders[number]
        reservation = holder.take(self.limits[first_name(holder)], tokens)
        if reservation is None:
            return False
        self.requests.append(Running(first_name(holder), reservation, reservation.minute, tokens))
        return True

    def settle(self, number: int, share: float) -> None:
        running = [request for request in self.requests if not request.ended]
        if running:
            request = running[number % len(running)]
            request.ended = True
            request.tokens = int(request.tokens * share)
            request.reservation.settle(request.tokens, request=True)

    def write(self) -> None:
        """Write the rows of all calls that have ended, in their order."""
        ended = [request for request in self.requests if request.ended and not request.written]
        for request in ended:
            # The rows of a holder are in the order of the list.
            self.requests.remove(request)
            self.requests.append(request)
            request.written = True
            request.reservation.written()
            self.rows[request.holder] += 1

    def report(self, number: int, fate: str = "arrives", *needs: int) -> None:
        holder, sent_at = self.holders[number], self.service.at
        report = holder.report([(self.limits[first_name(holder)], need) for need in needs])
        if fate == "late":
            self.late.append(report)
        elif fate != "lost":
            self.heard_at[first_name(holder)] = sent_at
            answer = self.service.take(report)
            if fate == "arrives":
                holder.apply(answer, sent_at)

    def deliver(self) -> None:
        """Let reports arrive that were under way for long; nobody waits for their answers."""
        for report in self.late:
            self.service.take(report)
        self.late.clear()

    def check(self) -> None:
        """Check that no window has more than its limit, by what the requests really took."""
        spans: dict[str, Span] = {
            "tokens_per_minute": "minute",
            "tokens_per_day": "day",
            "tokens_per_month": "month",
        }
        for name, span in spans.items():
            used: Counter[int] = Counter()
            for request in self.requests:
                used[window_at(span, request.minute).starts_at] += request.tokens
            assert max(used.values(), default=0) <= limit(self.quota, name)
        minutes = Counter(request.minute for request in self.requests)
        assert max(minutes.values(), default=0) <= limit(self.quota, "requests_per_minute")
        alive = set(map(first_name, self.holders))
        since = self.service.at - SILENT_S
        self.silent |= any(self.heard_at.get(name, since) < since for name in alive)
        flying = sum(not request.ended and request.holder in alive for request in self.requests)
        assert self.silent or flying <= limit(self.quota, "max_concurrency")

    def exact(self, *limits: str) -> None:
        """End all calls, let everyone report, and check that the counters have exactly what was used."""
        while any(not request.ended for request in self.requests):
            self.settle(0, 0.5)
        self.write()
        silent_s = max(self.service.at - at for at in (0.0, *self.heard_at.values()))
        if silent_s > GONE_S or any(holder.name != first_name(holder) for holder in self.holders):
            # What a holder has that was silent for so long counts as used.
            return
        for _ in range(3):
            for number in range(len(self.holders)):
                self.report(number)
        spans: dict[str, Span] = {"tokens_per_minute": "minute", "tokens_per_day": "day"}
        for name in limits or spans:
            window = window_at(span := spans[name], self.service.now)
            used = sum(r.tokens for r in self.requests if window_at(span, r.minute) == window)
            assert self.service.states()[name] == (limit(self.quota, name) - used, 0)
        assert self.service.states()["max_concurrency"] == (limit(self.quota, "max_concurrency"), 0)

    def ask(self, number: int, amount: int, fate: str = "arrives") -> bool:
        """Take as a client does: the service is asked only if what is here doesn't cover the call."""
        if self.take(number, amount):
            return True
        self.report(number, fate, amount)
        return self.take(number, amount)

    def do(self, action: str, number: int, amount: int, fate: str) -> None:
        service = self.service
        match action:
            case "take":
                self.take(number, amount)
            case "ask":
                self.ask(number, amount, fate)
            case "write":
                self.write()
            case "settle":
                self.settle(amount, (amount % 11) / 10)
            case "report":
                self.report(number, fate)
            case "deliver":
                self.deliver()
            case "crash":
                self.crash(number)
            case "restart":
                service.restart()
            case "save":
                service.save()
            case "pass":
                service.now += amount / 10
                service.at += amount / 10
            case "jump":
                service.now += 50 * amount


def limit(quota: Quota, name: str) -> int:
    value = getattr(quota, name)
    return 1 << 60 if value is None else int(value)


STEPS = ("ask", "ask", "ask", "ask", "take", "settle", "settle", "report", "report", "write", "pass", "save")
FATES = ("arrives", "arrives", "arrives", "unanswered", "lost", "late")


Step = tuple[str, int, int, str]


def steps_of(seed: int, *more: str) -> list[Step]:
    """Return some steps at random. Lists that hypothesis draws are mostly too short to get anywhere."""
    draws = random.Random(seed)
    names = (*STEPS, *more)
    return [
        (draws.choice(names), draws.randrange(3), draws.randrange(1, 301), draws.choice(FATES))
        for _ in range(draws.randrange(5, 80))
    ]


SEEDS = st.integers(0, 1 << 32)


@given(SEEDS)
def test_no_window_gets_more_than_its_limit_whatever_happens(seed: int) -> None:
    fleet = Fleet()
    for step in steps_of(seed, "crash", "restart", "deliver", "jump"):
        fleet.do(*step)
        fleet.check()


@given(SEEDS)
def test_every_sum_is_exact_once_all_have_reported(seed: int) -> None:
    fleet = Fleet()
    for step in steps_of(seed, "restart", "deliver", "jump"):
        fleet.do(*step)
    fleet.deliver()
    fleet.exact()


@given(SEEDS)
def test_every_sum_of_a_day_is_that_of_the_rows_after_any_crashes(seed: int) -> None:
    fleet = Fleet()
    for step in steps_of(seed, "restart", "crash", "crash", "deliver"):
        fleet.do(*step)
    fleet.deliver()
    fleet.exact("tokens_per_day")


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 20), st.floats(0, 1)), min_size=1, max_size=40))
def test_less_than_one_request_is_left_when_all_want_more(asks: list[tuple[int, int, float]]) -> None:
    fleet = Fleet(Quota(tokens_per_minute=200))
    for number, tokens, share in asks:
        if not fleet.ask(number, tokens):
            # The others give back what is free, and then the first one has it.
            for other in (0, 1, 2, 0, 1, 2):
                fleet.report(other)
            if not fleet.ask(number, tokens):
                ((remaining, _),) = fleet.service.states().values()
                assert remaining < tokens
        fleet.settle(number, share)
        fleet.write()


def ahead(fleet: Fleet) -> HeldCounter:
    """Let the first holder take tokens ahead of its use."""
    for _ in range(20):
        fleet.service.now += 0.5
        fleet.service.at += 0.5
        fleet.ask(0, 30)
        fleet.settle(0, 0.1)
        fleet.report(0)
    return fleet.limits["h1"][0]


def test_what_is_taken_ahead_is_given_back_when_another_holder_needs_it() -> None:
    fleet = Fleet(Quota(tokens_per_minute=1000))
    assert ahead(fleet).current.free > 30
    remaining = fleet.service.states()["tokens_per_minute"][0]
    assert not fleet.ask(1, remaining)
    lacking = fleet.limits["h2"][0]
    assert lacking.pending
    fleet.report(0)
    fleet.report(0)
    assert fleet.ask(1, remaining)
    fleet.report(1)
    assert not fleet.ask(0, 30)
    assert not fleet.limits["h1"][0].pending


def test_what_is_taken_ahead_and_not_used_is_given_back_by_itself() -> None:
    fleet = Fleet(Quota(tokens_per_minute=100_000))
    limits = ahead(fleet)
    for _ in range(20):
        fleet.service.at += 0.5
        fleet.report(0)
    assert limits.current.free == 0


def test_a_restart_keeps_what_is_held_and_what_is_used() -> None:
    fleet = Fleet()
    for _ in range(5):
        fleet.ask(0, 100)
    fleet.settle(0, 0.3)
    fleet.report(0)
    before = fleet.service.states()
    fleet.service.save()
    fleet.service.restart()
    assert fleet.service.states() == before
    fleet.exact()


def test_a_service_that_has_lost_its_state_gets_it_from_the_holders() -> None:
    fleet = Fleet()
    for number in (0, 1):
        assert fleet.ask(number, 100)
    fleet.settle(0, 0.3)
    fleet.service.disk.clear()
    fleet.service.restart()
    fleet.exact()


def test_slots_of_a_holder_that_is_silent_are_free_again_and_its_tokens_are_not() -> None:
    fleet = Fleet()
    assert fleet.ask(0, 100)
    fleet.report(0)
    fleet.holders.pop(0)
    # What it had taken ahead may be used too.
    for silent_s, left in ((SILENT_S + 1, 2400), (GONE_S + 1, 2300)):
        fleet.service.at += silent_s
        fleet.report(1)
        states = fleet.service.states()
        assert states["max_concurrency"] == (8, 0)
        assert states["tokens_per_day"][0] == left


def test_a_holder_that_was_taken_for_dead_goes_on_under_another_name() -> None:
    fleet = Fleet()
    assert fleet.ask(0, 100)
    fleet.settle(0, 0.5)
    fleet.write()
    assert fleet.ask(0, 200)
    fleet.service.settle("h1")
    assert fleet.service.states()["tokens_per_day"] == (2450, 0)
    (holder, *_) = fleet.holders
    for _ in range(2):
        fleet.service.at += 0.5
        holder.apply(fleet.service.take(holder.report()), fleet.service.at)
    assert holder.name != "h1"
    # The call that runs holds what it had reserved, and what is settled is not charged again.
    assert fleet.service.states()["tokens_per_day"] == (2250, 200)


def test_a_request_counts_in_the_minute_in_which_it_was_admitted() -> None:
    fleet = Fleet()
    assert fleet.ask(0, 100)
    fleet.service.now += 60
    fleet.service.at += 60
    assert fleet.service.states()["tokens_per_minute"] == (1000, 0)
    fleet.settle(0, 0.4)
    for _ in range(2):
        fleet.report(0)
    assert fleet.service.states()["tokens_per_minute"] == (1000, 0)
    assert fleet.service.states()["tokens_per_day"] == (2460, 0)


def test_a_lower_limit_holds_from_then_on_and_takes_nothing_back() -> None:
    fleet = Fleet(Quota(tokens_per_minute=1000))
    assert fleet.ask(0, 900)
    fleet.report(0)
    fleet.service.counters.set_tenants({"t": Quota(tokens_per_minute=500)}, "2")
    assert fleet.service.states() == {"tokens_per_minute": (0, 900)}
    fleet.settle(0, 0.1)
    fleet.write()
    for _ in range(2):
        fleet.service.at += 3
        fleet.report(0)
    assert fleet.service.states() == {"tokens_per_minute": (410, 0)}


TOKENS = QuotaCounter("key ada", "tokens")


def test_the_quota_of_a_key_is_the_one_that_was_changed_last() -> None:
    service = Service()
    old, new = Quota(tokens_per_minute=10), Quota(tokens_per_minute=20)
    for number, (holder, quota, expected) in enumerate(
        [("a", old, 10), ("b", old, 10), ("a", new, 20), ("b", old, 20), ("b", new, 20)], 1
    ):
        answer = service.take(
            HolderReport(holder, number, asks=(Ask(TOKENS, 1),), keys=(("key ada", quota),))
        )
        assert answer.grants[0].states[0].limit == expected


def test_a_key_that_nobody_reports_is_forgotten() -> None:
    service = Service()
    quota = Quota(tokens_per_minute=10)
    service.take(HolderReport("a", 1, asks=(Ask(TOKENS, 1),), keys=(("key ada", quota),)))
    assert "key ada" in service.counters.states(service.now)
    for number in (2, 3):
        service.at += 4000
        service.now += 4000
        service.take(HolderReport("b", number))
    assert "key ada" not in service.counters.states(service.now)
    service.save()
    # What it has used counts until the month ends.
    assert {text for text in service.disk if "ada" in text and "total" not in text} == set()


def test_slots_that_nobody_has_are_forgotten() -> None:
    service = Service()
    quotas = [(f"key {number}", Quota(max_concurrency=2)) for number in range(3)]
    asks = tuple(Ask(QuotaCounter(subject, "slots"), 1) for subject, _ in quotas)
    service.take(HolderReport("a", 1, asks=asks, keys=tuple(quotas)))
    # Two calls end, and one goes on.
    stays = Account(asks[0].counter, ALWAYS, 0, 1, 0)
    service.take(HolderReport("a", 2, accounts=(stays,), keys=tuple(quotas[:1])))
    service.at += SWEEP_S
    service.take(HolderReport("a", 3, accounts=(stays,), keys=tuple(quotas[:1])))
    service.save()
    assert [text for text in service.disk if "total" in text and "slots" in text] == [
        json.dumps(["total", "key 0", "slots", "None"])
    ]


@pytest.mark.parametrize("table", ["", "0"])
def test_a_holder_gets_the_quotas_of_tenants_that_it_does_not_know(table: str) -> None:
    service = Service()
    assert service.take(HolderReport("a", 1, table=table)).tenants == {"t": QUOTA}
    assert service.take(HolderReport("a", 2, table="1")).tenants is None


def test_a_subject_without_a_quota_is_granted_nothing() -> None:
    ask = Ask(QuotaCounter("tenant other", "tokens"), 1)
    assert Service().take(HolderReport("a", 1, asks=(ask,))).grants == ()
