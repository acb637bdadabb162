"""The book: limits hold and sums are right in any order of requests, messages, crashes and restarts."""

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.quotas.book import SILENT_S, QuotaBook
from serve_app.quotas.lease import Lease
from serve_app.quotas.lease_holder import LeaseHolder
from serve_app.quotas.messages import Account, Answer, Kind, LeaseID, Report, limits_of
from serve_app.quotas.reservation import Reservation
from serve_app.quotas.windows import Span, window_at
from serve_app.settings.usage import Quota

QUOTA = Quota(
    tokens_per_minute=1000,
    tokens_per_day=2500,
    tokens_per_month=4000,
    requests_per_minute=40,
    max_concurrency=8,
)
KINDS: tuple[Kind, ...] = ("tokens", "requests", "slots")
START = 1_790_000_000.0
"""Some time in the middle of a day."""


@dataclass
class Service:
    """The book with its state on a disk, of which a crash leaves what was written before the answer."""

    quota: Quota = QUOTA
    now: float = START
    at: float = 0.0
    disk: dict[str, str] = field(default_factory=dict)
    starts: int = 0

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.starts += 1
        self.book = QuotaBook(self.disk, self.at, f"process {self.starts}")
        self.book.set_tenants({"t": self.quota}, "1")

    def exchange(self, report: Report) -> Answer:
        answer = self.book.exchange(report, self.now, self.at)
        if self.book.urgent:
            self.save()
        return answer

    def save(self) -> None:
        for key, value in self.book.take_changes().items():
            if value is None:
                self.disk.pop(key, None)
            else:
                self.disk[key] = value

    def states(self) -> dict[str, tuple[int, int]]:
        """Return what remains and what is reserved, by limit."""
        states = self.book.states(self.now)["tenant t"]
        return {state.name: (state.remaining, state.reserved) for state in states}


@dataclass
class Running:
    """A request that has been admitted."""

    holder: str
    reservation: Reservation
    minute: int
    tokens: int
    ended: bool = False


class Fleet:
    """Holders with one tenant's requests, and a record of what each request really takes."""

    def __init__(self, quota: Quota = QUOTA) -> None:
        self.quota = quota
        self.service = Service(quota)
        self.requests: list[Running] = []
        self.names = 0
        self.holders: list[LeaseHolder] = []
        self.leases: dict[str, list[Lease]] = {}
        self.late: list[Report] = []
        # Slots of a holder that is silent for long go to others, though its requests may still run.
        self.heard_at: dict[str, float] = {}
        self.silent = False
        for _ in range(3):
            self.join()

    def join(self) -> None:
        self.names += 1
        holder = LeaseHolder(f"h{self.names}", lambda: self.service.at)
        self.holders.append(holder)
        self.leases[holder.name] = [
            holder.lease(LeaseID("tenant t", kind), self.quota)
            for kind in KINDS
            if limits_of(self.quota, kind)
        ]

    def crash(self, number: int) -> None:
        """End a holder with all of its requests."""
        name = self.holders.pop(number).name
        for request in self.requests:
            request.ended |= request.holder == name
        self.join()

    def take(self, number: int, tokens: int) -> bool:
        holder = self.holders[number]
        leases = self.leases[holder.name]
        reservation = holder.take(leases, tokens)
        for lease in leases:
            lease.ask([] if reservation else [tokens if lease.is_tokens else 1])
        if reservation is None:
            return False
        minute = int(reservation.periods[0])
        self.requests.append(Running(holder.name, reservation, minute, tokens))
        return True

    def settle(self, number: int, share: float) -> None:
        running = [request for request in self.requests if not request.ended]
        if running:
            request = running[number % len(running)]
            request.ended = True
            request.tokens = int(request.tokens * share)
            request.reservation.settle(request.tokens)

    def report(self, number: int, fate: str = "arrives") -> None:
        holder, sent_at = self.holders[number], self.service.at
        report = holder.report()
        if fate == "late":
            self.late.append(report)
        elif fate != "lost":
            self.heard_at[holder.name] = sent_at
            answer = self.service.exchange(report)
            if fate == "arrives":
                holder.apply(answer, sent_at)

    def deliver(self) -> None:
        """Let reports arrive that were under way for long; nobody waits for their answers."""
        for report in self.late:
            self.service.exchange(report)
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
        alive = {holder.name for holder in self.holders}
        since = self.service.at - SILENT_S
        self.silent |= any(self.heard_at.get(name, since) < since for name in alive)
        flying = sum(not request.ended and request.holder in alive for request in self.requests)
        assert self.silent or flying <= limit(self.quota, "max_concurrency")

    def exact(self) -> None:
        """End all requests, let everyone report, and check that the book has exactly what was used."""
        while any(not request.ended for request in self.requests):
            self.settle(0, 0.5)
        for _ in range(3):
            for number in range(len(self.holders)):
                self.report(number)
        spans: dict[str, Span] = {"tokens_per_minute": "minute", "tokens_per_day": "day"}
        for name, span in spans.items():
            window = window_at(span, self.service.now)
            used = sum(r.tokens for r in self.requests if window_at(span, r.minute) == window)
            assert self.service.states()[name] == (limit(self.quota, name) - used, 0)
        assert self.service.states()["max_concurrency"] == (limit(self.quota, "max_concurrency"), 0)

    def do(self, action: str, number: int, amount: int, fate: str) -> None:
        service = self.service
        match action:
            case "take":
                self.take(number, amount)
            case "ask":
                # As a client does: the service is asked only if the lease doesn't cover the request.
                if not self.take(number, amount):
                    self.report(number, fate)
                    self.take(number, amount)
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


STEPS = ("ask", "ask", "ask", "ask", "take", "settle", "settle", "report", "report", "report", "pass", "save")
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
@settings(max_examples=150, deadline=None)
def test_no_window_gets_more_than_its_limit_whatever_happens(seed: int) -> None:
    fleet = Fleet()
    for step in steps_of(seed, "crash", "restart", "deliver", "jump"):
        fleet.do(*step)
        fleet.check()


@given(SEEDS)
@settings(max_examples=150, deadline=None)
def test_every_sum_is_exact_once_all_have_reported(seed: int) -> None:
    fleet = Fleet()
    for step in steps_of(seed, "restart", "deliver", "jump"):
        fleet.do(*step)
    fleet.deliver()
    fleet.exact()


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 20), st.floats(0, 1)), min_size=1, max_size=40))
@settings(max_examples=60, deadline=None)
def test_less_than_one_request_is_left_when_all_want_more(asks: list[tuple[int, int, float]]) -> None:
    fleet = Fleet(Quota(tokens_per_minute=200))
    for number, tokens, share in asks:
        if not fleet.take(number, tokens):
            fleet.report(number)
            # The others give back what is free, and then the first one has it.
            for other in (0, 1, 2, 0, 1, 2, number):
                fleet.report(other)
            if not fleet.take(number, tokens):
                ((remaining, _),) = fleet.service.states().values()
                assert remaining < tokens
        fleet.settle(number, share)


def test_an_unused_lease_is_given_back_when_another_holder_needs_it() -> None:
    fleet = Fleet(Quota(tokens_per_minute=1000))
    for _ in range(20):
        fleet.take(0, 30)
        fleet.report(0)
        fleet.settle(0, 0.1)
    free = fleet.leases["h1"][0].free
    assert free > 100, "it has some ahead"
    fleet.report(0)
    remaining = fleet.service.states()["tokens_per_minute"][0]
    assert not fleet.take(1, remaining)
    fleet.report(1)
    lease = fleet.leases["h2"][0]
    assert lease.unmet
    assert lease.pending
    assert not fleet.take(1, remaining)
    fleet.report(0)
    fleet.report(0)
    fleet.report(1)
    assert fleet.take(1, remaining)
    fleet.report(1)
    assert not fleet.take(0, 30)
    fleet.report(0)
    lease = fleet.leases["h1"][0]
    assert (lease.unmet > 0, lease.pending) == (True, False)


def test_a_restart_keeps_what_is_leased_and_what_is_used() -> None:
    fleet = Fleet()
    for _ in range(5):
        while not fleet.take(0, 100):
            fleet.report(0)
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
        while not fleet.take(number, 100):
            fleet.report(number)
    fleet.settle(0, 0.3)
    fleet.service.disk.clear()
    fleet.service.restart()
    fleet.exact()


def test_slots_of_a_holder_that_is_gone_are_free_again_and_its_tokens_are_not() -> None:
    fleet = Fleet()
    while not fleet.take(0, 100):
        fleet.report(0)
    fleet.crash(0)
    for _ in range(2):
        fleet.service.at += SILENT_S + 1
        fleet.report(1)
    states = fleet.service.states()
    assert states["max_concurrency"] == (8, 0)
    assert states["tokens_per_day"][0] == 2400


def test_a_request_counts_in_the_minute_in_which_it_was_admitted() -> None:
    fleet = Fleet()
    while not fleet.take(0, 100):
        fleet.report(0)
    fleet.service.now += 60
    fleet.service.at += 60
    assert fleet.service.states()["tokens_per_minute"] == (1000, 0)
    fleet.settle(0, 0.4)
    for _ in range(2):
        fleet.report(0)
    assert fleet.service.states()["tokens_per_minute"] == (1000, 0)
    assert fleet.service.states()["tokens_per_day"] == (2460, 0)


def test_a_lower_limit_holds_from_then_on_and_takes_nothing_back() -> None:
    fleet = Fleet()
    while not fleet.take(0, 900):
        fleet.report(0)
    fleet.report(0)
    fleet.service.book.set_tenants({"t": Quota(tokens_per_minute=500)}, "2")
    assert fleet.service.states() == {"tokens_per_minute": (0, 900)}
    fleet.settle(0, 0.1)
    fleet.report(0)
    assert fleet.service.states() == {"tokens_per_minute": (410, 0)}


def test_the_quota_of_a_key_is_the_one_that_was_changed_last() -> None:
    service = Service()
    account = Account(LeaseID("key ada", "tokens"), "", need=1)
    old, new = Quota(tokens_per_minute=10), Quota(tokens_per_minute=20)
    for number, (holder, quota, expected) in enumerate(
        [("a", old, 10), ("b", old, 10), ("a", new, 20), ("b", old, 20), ("b", new, 20)], 1
    ):
        answer = service.exchange(Report(holder, number, "", "1", (account,), (), (("key ada", quota),)))
        assert answer.grants[0].limits[0].limit == expected


@pytest.mark.parametrize("table", ["", "0"])
def test_a_holder_gets_the_quotas_of_tenants_that_it_does_not_know(table: str) -> None:
    service = Service()
    assert service.exchange(Report("a", 1, "", table)).tenants == {"t": QUOTA}
    assert service.exchange(Report("a", 2, "", "1")).tenants is None


def test_a_subject_without_a_quota_is_granted_nothing() -> None:
    account = Account(LeaseID("tenant other", "tokens"), "", need=1)
    assert Service().exchange(Report("a", 1, "", "1", (account,))).grants == ()
