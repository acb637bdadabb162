"""Days of a service in virtual time: live traffic by hour, tenants with batches, and the product's decisions.

The forecast, the order, the places, the shares and the meter are the product's. The engines share their time
equally among the rows that they have, and have what live traffic leaves of it.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from math import exp, pi, sin
from random import Random

import pytest

from serve_app.jobs.batches import OpenBatch
from serve_app.jobs.forecast import (
    DAY_S,
    LATEST_S,
    REFUSED,
    DayProfile,
    Queue,
    RowDemand,
    Verdict,
    in_order,
)
from serve_app.jobs.models import Batch
from serve_app.jobs.pacing import Fixed, Meter
from serve_app.jobs.rows import Row
from serve_app.jobs.scheduler import Places
from tests.serve_app.jobs.helpers import NOW, batch_of

STEP_S = 60
START = NOW - NOW % DAY_S

PLACES = 8
DEVICE = 300.0
"""Work per second of the engines without live traffic."""

WINDOWS_H = (1, 2, 3, 4, 6, 8, 12, 24, 24, 24)


@dataclass(frozen=True)
class Tenant:
    """What a tenant sends.

    Attributes:
        name: Its name.
        weight: Its share.
        per_day: Batches of a day.
        rows: Rows of a batch, about.
        bound: Bound of a row's work.
        used: Share of the bound that its answers take.
        spread: Deviation of a batch from that.
    """

    name: str
    weight: float
    per_day: float
    rows: int
    bound: float
    used: float
    spread: float


TENANTS = (
    Tenant("anna", 1.0, 10.0, 250, 3000.0, 0.25, 0.15),
    Tenant("ben", 2.0, 4.0, 600, 1500.0, 0.5, 0.1),
    Tenant("cleo", 1.0, 20.0, 80, 4000.0, 0.2, 0.3),
    Tenant("dora", 0.5, 1.5, 2000, 900.0, 0.8, 0.05),
)


@dataclass
class Job:
    """A batch, and what only the simulation knows of it."""

    batch: Batch
    open: OpenBatch
    works: list[float]
    verdict: Verdict
    done: float = 0.0
    completed: int = 0

    @property
    def stored(self) -> Batch:
        """The batch as the store has it."""
        return replace(self.batch, completed=self.completed, output_tokens=round(self.done - self.completed))


@dataclass
class Outcome:
    """What became of the batches of each verdict: their number, and their rows.

    Attributes:
        batches: Batches by verdict.
        rows: Their rows.
        held: Batches that ended within their windows, or would have.
        held_rows: Their rows.
    """

    batches: Counter[Verdict] = field(default_factory=Counter)
    rows: Counter[Verdict] = field(default_factory=Counter)
    held: Counter[Verdict] = field(default_factory=Counter)
    held_rows: Counter[Verdict] = field(default_factory=Counter)

    def add(self, job: Job, held: bool) -> None:
        """Count a batch."""
        self.batches[job.verdict] += 1
        self.rows[job.verdict] += job.batch.total
        self.held[job.verdict] += held
        self.held_rows[job.verdict] += held * job.batch.total

    def __iadd__(self, other: "Outcome") -> "Outcome":
        for mine, added in zip(vars(self).values(), vars(other).values(), strict=True):
            mine.update(added)
        return self

    @property
    def kept(self) -> float:
        """The share of the promised batches that ended in time."""
        return self.held["holds"] / self.batches["holds"]

    @property
    def refused_in_vain(self) -> float:
        """The share of all rows that were refused and would have been in time."""
        return sum(self.held_rows[verdict] for verdict in REFUSED) / self.rows.total()

    def __str__(self) -> str:
        lines = ["verdict  batches  of all rows  batches in time  their rows"]
        for verdict, count in sorted(self.batches.items()):
            rows = self.rows[verdict]
            lines.append(
                f"{verdict:8} {count:7} {rows / self.rows.total():12.1%} "
                f"{self.held[verdict] / count:16.2%} {self.held_rows[verdict] / rows:11.1%}"
            )
        return "\n".join(lines)


def live_shares(random: Random, days: int, growth: float) -> list[float]:
    """Return the share of the engines that live traffic takes in each step: by hour, by day, by chance."""
    found = []
    noise = burst = 0.0
    left = 0
    for day in range(days):
        level = (1 + growth) ** day * exp(random.gauss(0.0, 0.12))
        for step in range(DAY_S // STEP_S):
            hour = step * STEP_S / 3600
            noise = 0.98 * noise + random.gauss(0.0, 0.01)
            if left:
                left -= 1
            else:
                burst = 0.0
                if random.random() < STEP_S / DAY_S * 6:
                    burst, left = random.uniform(0.1, 0.35), random.randint(5, 40)
            usual = 0.12 + 0.38 * max(0.0, sin(pi * (hour - 7) / 14))
            weekend = 0.7 if day % 7 > 4 else 1.0
            found.append(min(0.95, max(0.02, usual * level * weekend + noise + burst)))
    return found


class Days:
    """Days of a service.

    Args:
        seed: What happens follows from it.
        days: Number of days.
        load: Times by which the tenants send more than usual.
        refuse: Whether batches are refused that surely don't hold.
        growth: Part by which live traffic grows from day to day.
    """

    def __init__(
        self, seed: int, days: int, *, load: float = 1.0, refuse: bool = True, growth: float = 0.0
    ) -> None:
        self.outcome = Outcome()
        self.now = float(START)
        self._random = Random(seed)
        self._refuse = refuse
        self._shares = live_shares(self._random, days + 8, growth)
        self._end = START + days * DAY_S
        self._arrivals = sorted(self._all_arrivals(days, load), key=lambda one: one[0])
        self._places = Places(Fixed(PLACES), 1 << 40, lambda: None)
        self._meter = Meter(lambda: self.now)
        self._profile = DayProfile()
        self._jobs: dict[str, Job] = {}
        self._latest: deque[Batch] = deque()
        self._running: list[tuple[float, int, Job, Row]] = []
        self._virtual = 0.0
        self._number = 0

    def run(self) -> Outcome:
        """Live through the days, and return what became of the batches."""
        step = 0
        arrivals = deque(self._arrivals)
        while self.now < self._end:
            while arrivals and arrivals[0][0] <= self.now:
                self._arrive(*arrivals.popleft()[1:])
            self._expire()
            self._serve(DEVICE * (1 - self._shares[step]))
            full = self._places.used == PLACES and any(job.open.rows for job in self._jobs.values())
            work, seconds = self._meter.look(full, self._places.in_flight)
            if seconds:
                self._profile.add(work, seconds, self.now - STEP_S / 2)
            step += 1
        return self.outcome

    def _all_arrivals(self, days: int, load: float) -> Iterator[tuple[float, Tenant, int]]:
        for tenant in TENANTS:
            for day in range(days):
                for _ in range(self._poisson(tenant.per_day * load)):
                    # Most come by day.
                    hour = min(23.9, max(0.0, self._random.gauss(13, 5)))
                    yield START + day * DAY_S + hour * 3600, tenant, self._random.choice(WINDOWS_H)

    def _poisson(self, mean: float) -> int:
        count, sum = 0, self._random.expovariate(1.0)
        while sum < mean:
            count, sum = count + 1, sum + self._random.expovariate(1.0)
        return count

    def _arrive(self, tenant: Tenant, window_h: int) -> None:
        random = self._random
        rows = max(5, round(tenant.rows * exp(random.gauss(-0.25, 0.7))))
        used = tenant.used * exp(random.gauss(0.0, tenant.spread))
        self._number += 1
        batch = batch_of(
            f"b{self._number}",
            "in",
            tenant.name,
            state="in_progress",
            created_at=int(self.now),
            expires_at=int(self.now) + window_h * 3600,
            total=rows,
            work=rows * tenant.bound,
            weight=tenant.weight,
        )
        self._forget()
        latest = [*self._latest, *(job.stored for job in self._jobs.values())]
        queued = [job.stored for job in self._jobs.values()]
        queue = Queue([*queued, batch], self._profile.ahead(self.now), RowDemand(latest, self.now), self.now)
        verdict = queue.outlook_of_new(batch, 7 * DAY_S).verdict
        batch = replace(batch, promised=verdict == "holds")
        works = [tenant.bound * used * exp(random.gauss(-0.32, 0.8)) for _ in range(rows)]
        job = Job(batch, OpenBatch(batch), works, verdict)
        job.open.rows.extend(Row(number, b"") for number in range(rows))
        if self._refuse and verdict in REFUSED:
            self._count(job, self._would_hold(job))
        else:
            self._jobs[batch.id] = job
            self._fill()

    def _forget(self) -> None:
        while self._latest and self.now - self._latest[0].created_at > LATEST_S:
            self._latest.popleft()

    def _count(self, job: Job, held: bool) -> None:
        self.outcome.add(job, held)

    def _expire(self) -> None:
        for job in [job for job in self._jobs.values() if job.batch.expires_at <= self.now]:
            self._running = [one for one in self._running if one[2] is not job or self._leave(one)]
            self._end_of(job, False)
        self._running.sort()
        self._fill()

    def _leave(self, one: tuple[float, int, Job, Row]) -> bool:
        self._places.leave(one[2].open, one[3])
        return False

    def _end_of(self, job: Job, held: bool) -> None:
        del self._jobs[job.batch.id]
        rest = job.batch.total - job.completed
        self._latest.append(replace(job.stored, state="completed", failed=rest, unrun=rest))
        self._count(job, held)

    def _serve(self, rate: float) -> None:
        """Let the rows run for a step: each has the same part of the rate."""
        end = self.now + STEP_S
        while self._running:
            at, _, job, row = self._running[0]
            needed_s = (at - self._virtual) * len(self._running) / rate
            if self.now + needed_s > end:
                break
            self.now += needed_s
            self._virtual = at
            heappop(self._running)
            work = job.works[row.line]
            job.done += work
            job.completed += 1
            self._meter.add(1, work)
            self._places.leave(job.open, row)
            if job.completed == job.batch.total:
                self._end_of(job, self.now <= job.batch.expires_at)
            self._fill()
        if self._running:
            self._virtual += (end - self.now) * rate / len(self._running)
        self.now = end

    def _fill(self) -> None:
        heads: dict[str, OpenBatch] = {}
        for batch in in_order(job.batch for job in self._jobs.values()):
            if (one := self._jobs[batch.id].open).rows:
                heads.setdefault(batch.tenant, one)
        for one, row in self._places.fill(list(heads.values())):
            job = self._jobs[one.batch.id]
            self._number += 1
            heappush(self._running, (self._virtual + job.works[row.line], self._number, job, row))

    def _would_hold(self, new: Job) -> bool:
        """Return whether a batch that was refused would have ended in time, if none had come after it.

        The tenants share what live traffic leaves. Promised windows of its tenant have to hold too.
        """
        queues: dict[str, list[tuple[int, list[float], bool]]] = defaultdict(list)
        weights = {tenant.name: tenant.weight for tenant in TENANTS}
        jobs = self._jobs | {new.batch.id: new}
        for batch in in_order(job.batch for job in jobs.values()):
            job = jobs[batch.id]
            watched = batch.tenant == new.batch.tenant and (batch.promised or job is new)
            queues[batch.tenant].append((batch.expires_at, [sum(job.works) - job.done], watched))
        time, step = self.now, int((self.now - START) // STEP_S)
        while any(watched for _, _, watched in queues[new.batch.tenant]):
            room = DEVICE * (1 - self._shares[step]) * STEP_S
            total = sum(weights[tenant] for tenant, queue in queues.items() if queue)
            for tenant, queue in queues.items():
                part = room * weights[tenant] / total
                while queue and part > 0:
                    _, left, _ = queue[0]
                    took = min(part, left[0])
                    left[0] -= took
                    part -= took
                    if left[0] <= 0:
                        queue.pop(0)
            time, step = time + STEP_S, step + 1
            if any(end <= time and watched for queue in queues.values() for end, _, watched in queue):
                return False
            for queue in queues.values():
                queue[:] = [one for one in queue if one[0] > time]
        return True


@pytest.mark.parametrize("seeds", [range(1, 2), pytest.param(range(1, 11), marks=pytest.mark.long)], ids=len)
def test_promised_batches_are_in_time_and_few_are_refused_in_vain(seeds: range) -> None:
    """Twenty days of each seed, from a service that knows nothing, with one to 2.2 times the usual load."""
    outcome = Outcome()
    for seed in seeds:
        outcome += Days(seed, 20, load=1.0 + 0.4 * (seed % 4)).run()
    print(outcome)
    assert outcome.kept >= 0.995, outcome
    assert outcome.rows["holds"] > 0.45 * outcome.rows.total(), outcome
    assert outcome.refused_in_vain < 0.05, outcome
    assert outcome.held_rows["late"] < 0.15 * outcome.rows["late"], outcome
    # A warning says something.
    assert outcome.held_rows["unsure"] < 0.85 * outcome.rows["unsure"], outcome


@pytest.mark.long
def test_promises_hold_while_live_traffic_grows() -> None:
    """Each day has 3% more live traffic than the day before."""
    outcome = Days(4, 14, load=1.4, growth=0.03).run()
    assert outcome.kept >= 0.99, outcome


@pytest.mark.long
def test_without_refusals_a_tenant_breaks_few_promises_to_itself() -> None:
    outcome = Days(5, 12, load=1.8, refuse=False).run()
    assert outcome.kept >= 0.99, outcome
    assert outcome.batches["late"] > 0, outcome
