"""The counters: limits hold and sums are right in any order of requests, messages, crashes and restarts."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.quotas.counters import Counters
from serve_app.quotas.holder import Holder
from serve_app.quotas.windows import window_at
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

SILENT_S = 31.0
"""Seconds after which the amounts of a silent holder are free."""


@dataclass
class Service:
    """The counters with their state on a disk, of which a crash leaves what was written before the answer."""

    quota: Quota = QUOTA
    now: float = START
    at: float = 0.0
    disk: dict[str, str] = field(default_factory=dict)
    swept: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.counters = Counters(self.disk, self.at)
        self.counters.set_tenants({"t": self.quota}, "1")

    def take(self, report: Any) -> Any:
        self.sweep()
        answer = self.counters.take(report, self.now, self.at)
        if self.counters.urgent:
            self.save()
        return answer

    def sweep(self) -> None:
        for _ in self.counters.sweep(self.now, self.at):
            pass
        self.swept()

    def save(self) -> None:
        for part in self.counters.take_changes():
            for key, value in part.items():
                if value is None:
                    self.disk.pop(key, None)
                else:
                    self.disk[key] = value

    def number(self, holder: str) -> int:
        """Return the number of the last report of a holder, which the service has."""
        found = self.counters._holders.get(holder)
        return found.number if found else 0

    def states(self) -> dict[str, tuple[int, int]]:
        """Return what remains and what is reserved, by limit."""
        states = self.counters.states(SUBJECT, self.counters.subjects()[SUBJECT], self.now)
        return {state.name: (state.remaining, state.reserved) for state in states}


@dataclass
class Running:
    """A call that has been admitted.

    Attributes:
        holder: Its holder.
        reservation: Its reservation.
        minute: The minute in which it counts.
        tokens: The tokens that it may take, or has taken.
        ended_in: Number of the first report after its end; 0: it runs.
        orphaned: Its holder was silent for so long that its amounts were free before its end was reported.
    """

    holder: str
    reservation: Any
    minute: int
    tokens: int
    ended_in: int = 0
    orphaned: bool = False


class Fleet:
    """Holders with one tenant's requests, and a record of what each request really takes."""

    def __init__(self, quota: Quota = QUOTA) -> None:
        self.quota = quota
        self.service = Service(quota, swept=self.orphan)
        self.requests: list[Running] = []
        self.names = 0
        self.holders: list[Holder] = []
        self.late: list[Any] = []
        for _ in range(3):
            self.join()

    def join(self) -> None:
        self.names += 1
        self.holders.append(Holder(f"h{self.names}", lambda: self.service.at))

    def limits(self, number: int) -> list[Any]:
        return self.holders[number].limits(SUBJECT, self.quota)

    def is_reported(self, request: Running) -> bool:
        """Return whether the service has the use of a call."""
        return 0 < request.ended_in <= self.service.number(request.holder)

    def crash(self, number: int) -> None:
        """End a holder with all of its calls: the service charges what it has reported."""
        name = self.holders.pop(number).name
        self.late = [report for report in self.late if report.holder != name]
        self.join()
        self.bury()

    def bury(self) -> None:
        """Forget the calls of dead holders whose use the service doesn't have: they are charged nothing."""
        alive = {holder.name for holder in self.holders}
        self.requests = [one for one in self.requests if one.holder in alive or self.is_reported(one)]

    def orphan(self) -> None:
        """Note the calls whose amounts the service has freed, since it has not heard of their holder."""
        holders = self.service.counters._holders
        for request in self.requests:
            found = holders.get(request.holder)
            if found is not None and found.is_silent and not self.is_reported(request):
                request.orphaned = True

    def take(self, number: int, tokens: int) -> bool:
        holder = self.holders[number]
        reservation = holder.take(self.limits(number), tokens)
        if reservation is None:
            return False
        self.requests.append(Running(holder.name, reservation, reservation.minute, tokens))
        return True

    def settle(self, number: int, share: float) -> None:
        running = [request for request in self.requests if not request.ended_in]
        if running:
            request = running[number % len(running)]
            (holder,) = (one for one in self.holders if one.name == request.holder)
            request.ended_in = holder._number + 1
            request.tokens = int(request.tokens * share)
            request.reservation.settle(request.tokens, request=True)

    def report(self, number: int, fate: str = "arrives", *needs: int) -> None:
        holder, sent_at = self.holders[number], self.service.at
        report = holder.report([(self.limits(number), need) for need in needs])
        if fate == "late":
            self.late.append(report)
        elif fate != "lost":
            answer = self.service.take(report)
            if fate == "twice":
                answer = self.service.take(report)._replace(grants=answer.grants)
            if fate != "unanswered":
                holder.apply(answer, sent_at)

    def deliver(self) -> None:
        """Let reports arrive that were under way for long; nobody waits for their answers."""
        for report in self.late:
            self.service.take(report)
        self.late.clear()

    def check(self) -> None:
        """Check that no window has more than its limit, by what the requests really took."""
        counted = [request for request in self.requests if not request.orphaned]
        spans: dict[str, Literal["minute", "day", "month"]] = {
            "tokens_per_minute": "minute",
            "tokens_per_day": "day",
            "tokens_per_month": "month",
        }
        for name, span in spans.items():
            used: Counter[int] = Counter()
            for request in counted:
                used[window_at(span, request.minute).starts_at] += request.tokens
            assert max(used.values(), default=0) <= limit(self.quota, name)
        minutes = Counter(request.minute for request in counted)
        assert max(minutes.values(), default=0) <= limit(self.quota, "requests_per_minute")
        flying = sum(not request.ended_in for request in counted)
        assert flying <= limit(self.quota, "max_concurrency")

    def exact(self, *limits: str) -> None:
        """End all calls, let everyone report, and check that the counters have exactly what was used."""
        while any(not request.ended_in for request in self.requests):
            self.settle(0, 0.5)
        # The amounts of dead holders are free; the living ones were silent too, and report again.
        self.service.at += SILENT_S
        for _ in range(3):
            for number in range(len(self.holders)):
                self.report(number)
        spans: dict[str, Literal["minute", "day"]] = {"tokens_per_minute": "minute", "tokens_per_day": "day"}
        for name in limits or spans:
            window = window_at(span := spans[name], self.service.now)
            used = sum(r.tokens for r in self.requests if window_at(span, r.minute) == window)
            assert self.service.states()[name] == (max(0, limit(self.quota, name) - used), 0)
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
                self.bury()
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


STEPS = ("ask", "ask", "ask", "ask", "take", "settle", "settle", "report", "report", "pass", "save")
FATES = ("arrives", "arrives", "arrives", "unanswered", "lost", "late", "twice")


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
def test_every_sum_of_a_day_is_reported_whatever_dies(seed: int) -> None:
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


def ahead(fleet: Fleet) -> Any:
    """Let the first holder take tokens ahead of its use."""
    for _ in range(20):
        fleet.service.now += 0.5
        fleet.service.at += 0.5
        fleet.ask(0, 30)
        fleet.settle(0, 0.1)
        fleet.report(0)
    return fleet.limits(0)[0]


def test_what_is_taken_ahead_is_given_back_when_another_holder_needs_it() -> None:
    fleet = Fleet(Quota(tokens_per_minute=1000))
    assert ahead(fleet).current.left > 30
    remaining = fleet.service.states()["tokens_per_minute"][0]
    assert not fleet.ask(1, remaining)
    fleet.report(0)
    fleet.report(0)
    assert fleet.ask(1, remaining)
    assert not fleet.ask(0, 30)


def test_what_is_taken_ahead_and_not_used_is_given_back_by_itself() -> None:
    fleet = Fleet(Quota(tokens_per_minute=100_000))
    tokens = ahead(fleet)
    assert tokens.current.left
    for _ in range(20):
        fleet.service.at += 0.5
        fleet.report(0)
    assert tokens.current.left == 0


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


def test_the_amounts_of_a_dead_holder_are_free_and_its_last_word_counts() -> None:
    fleet = Fleet()
    assert fleet.ask(0, 100)
    fleet.settle(0, 0.4)
    assert fleet.ask(0, 200)
    fleet.report(0)
    fleet.holders.pop(0)
    for silent_s, left, slots in ((0, 2260, 7), (SILENT_S, 2460, 8)):
        fleet.service.at += silent_s
        fleet.report(1)
        assert fleet.service.states()["tokens_per_day"][0] == left
        assert fleet.service.states()["max_concurrency"][0] == slots


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
    for _ in range(2):
        fleet.service.at += 3
        fleet.report(0)
    assert fleet.service.states() == {"tokens_per_minute": (410, 0)}


def asking(holder: Holder, quota: Quota, subject: str = "key ada") -> Any:
    """Return the report of a holder that asks for a token of a key."""
    return holder.report([(holder.limits(subject, quota), 1)])


def test_the_quota_of_a_key_is_the_one_that_was_changed_last() -> None:
    service = Service()
    a, b = (Holder(name, lambda: service.at) for name in "ab")
    old, new = Quota(tokens_per_minute=10), Quota(tokens_per_minute=20)
    for holder, quota, expected in [(a, old, 10), (b, old, 10), (a, new, 20), (b, old, 20), (b, new, 20)]:
        answer = service.take(asking(holder, quota))
        assert answer.grants[0].states[0].limit == expected


def test_what_nobody_uses_is_forgotten_in_memory_and_on_disk() -> None:
    service = Service()
    a, last, *others = (Holder(name, lambda: service.at) for name in ("a", "last", "x", "y", "z"))
    for number, holder in enumerate(others):
        service.take(asking(holder, Quota(tokens_per_minute=10), f"key {number}"))
    slots = Quota(max_concurrency=2)
    a.apply(service.take(asking(a, slots, "key 0")), service.at)
    assert a.take(a.limits("key 0", slots), 1)
    service.take(a.report())
    service.save()
    assert len(service.counters._counters) == 4
    # The keys' tokens weren't used, and the call that has the slot is gone with its Engine.
    for _ in range(2):
        service.at += 4000
        service.now += 40 * 86_400
        service.take(last.report())
    service.save()
    assert not service.counters._counters
    assert service.counters.subjects().keys() == {SUBJECT}
    assert set(service.disk) <= {"clock", '"last"'}


@pytest.mark.parametrize("table", ["", "0"])
def test_a_holder_gets_the_quotas_of_tenants_that_it_does_not_know(table: str) -> None:
    service = Service()
    holder = Holder("a", lambda: service.at)
    assert service.take(holder.report()._replace(table=table)).tenants == {"t": QUOTA}
    assert service.take(holder.report()._replace(table="1")).tenants is None


def test_a_subject_without_a_quota_is_granted_nothing() -> None:
    service = Service()
    ask = asking(Holder("a", lambda: service.at), Quota(tokens_per_minute=10), "tenant other")
    assert service.take(ask).grants == ()
