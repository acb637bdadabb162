"""Forecast of which batches end within their windows, and which can't.

Work is counted in tokens: `rows.work_of`. The forecast combines three estimates:

- `DayProfile`: the work per second that live traffic leaves to batches, by hour of day. It is measured only
  while rows wait, together with its recent error.
- `RowDemand`: the latest batches of each tenant: how much of their bound was used, and how often new work
  comes.
- `Queue`: the batches of a tenant in the order of their deadlines, the tenants side by side by weight.

The verdict depends on the difference between the work that fits until a deadline and the work ahead of it, in
standard deviations. So the same rule works for a service with exact knowledge and for a service that started
this morning.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import inf, sqrt
from typing import Literal, NamedTuple

from serve_app.jobs.models import Batch
from serve_app.jobs.rows import RowTokens, work_of

HOUR_S, DAY_S = 3600, 86_400

HALF_LIFE_S = 3.0 * DAY_S
"""Seconds after which a measurement counts half."""

KNOWN_S = 60.0
"""Seconds of measurement, after decay, from which an hour is known."""

JUDGED_S = 300.0
"""Seconds of measurement from which an hour is compared with the profile."""

NEW_ERROR = 0.3
"""Relative error of a profile in which no hour was measured twice."""

LEAST_ERROR = 0.05

UNKNOWN_ERROR = 0.5
"""Relative error of the rate of an hour that was never measured, beside the range of the measured hours."""

TOGETHER = 0.3
"""Correlation of the errors of two hours: a day with more traffic has more of it in all hours."""

HORIZON_H = 8 * 24
"""Hours that a forecast looks ahead: the longest window plus a day."""

LATEST_S = 7.0 * DAY_S
"""Seconds for which a batch counts in the demand of its tenant."""

LEAST_ROWS = 16
"""Ended rows from which a batch shows how much of its bound its answers take. This number of rows weighs as
much as the tenant's earlier batches."""

SPREAD = 0.5
"""Relative deviation of a batch from the tenant's other batches, before there are several."""

END_S = 60.0
"""Seconds that the last rows and the end of a batch take."""

HOLDS, KEPT, LATE = 2.0, 1.0, 2.5
"""Standard deviations: a window with a margin of HOLDS is promised, and later batches of the tenant may lower
its margin to KEPT; a window that misses by LATE surely doesn't hold. `tests/serve_app/jobs/test_days.py`
requires these values."""

Verdict = Literal["holds", "unsure", "late", "breaks", "unknown"]
"""Whether a window holds; "breaks": it may break a promised window of the same tenant."""

REFUSED: frozenset[Verdict] = frozenset({"late", "breaks"})
"""Verdicts of the windows that `deadlines: refuse` refuses."""

UNKNOWN = (
    "No promise: the rate that live traffic leaves to batches hasn't been measured yet, so that nothing is "
    "known about the completion_window of this batch"
)


class Outlook(NamedTuple):
    """Forecast of the end of a batch.

    Attributes:
        verdict: Whether its window holds, as far as it is known.
        message: Message to its owner; empty: no message.
        margin: Work that fits until its deadline beyond the work ahead, in standard deviations.
    """

    verdict: Verdict
    message: str = ""
    margin: float = 0.0


@dataclass(slots=True)
class Hour:
    """Measurements of an hour of the day (UTC) on all days; the latest days count most.

    Attributes:
        hour: 0 to 23.
        work: Work that was done while rows waited.
        seconds: Seconds for which rows waited.
        at: Time of the last measurement, in seconds since the epoch.
        error: Mean square of the relative error of its rate as a forecast; None: the hour was measured only
            once.
    """

    hour: int
    work: float = 0.0
    seconds: float = 0.0
    at: float = 0.0
    error: float | None = None


class DayProfile:
    """Work per second that live traffic leaves to the batches of a model, by hour of day.

    Args:
        hours: Earlier measurements.
    """

    def __init__(self, hours: Iterable[Hour] = ()) -> None:
        self._hours = {one.hour: one for one in hours}
        self._day_hour = -1
        self._before = self._work = self._seconds = 0.0

    @property
    def hours(self) -> list[Hour]:
        """The measurements, to be stored."""
        return list(self._hours.values())

    def add(self, work: float, seconds: float, now: float) -> None:
        """Note work that was done while rows waited.

        Args:
            work: The work.
            seconds: Seconds that the work took.
            now: Seconds since the epoch.
        """
        if (day_hour := int(now // HOUR_S)) != self._day_hour:
            self._judge()
            self._day_hour, self._work, self._seconds = day_hour, 0.0, 0.0
            self._before = self._known(now).get(day_hour % 24, 0.0)
        self._work += work
        self._seconds += seconds
        one = self._hours.setdefault(day_hour % 24, Hour(day_hour % 24, at=now))
        kept = _kept(now - one.at)
        one.work, one.seconds, one.at = one.work * kept + work, one.seconds * kept + seconds, now

    def ahead(self, now: float) -> "Ahead | None":
        """Return the work that fits from now on; None: nothing is measured."""
        known = self._known(now)
        if not known:
            return None
        errors = [one.error for one in self.hours if one.error is not None]
        error = max(LEAST_ERROR, sqrt(sum(errors) / len(errors)) if errors else NEW_ERROR)
        rates = known.values()
        mean = sum(rates) / len(rates)
        unknown = mean, UNKNOWN_ERROR * mean + (max(rates) - min(rates)) / 2
        hours = [(known[hour], error * known[hour]) if hour in known else unknown for hour in range(24)]
        return Ahead(hours, now)

    def _known(self, now: float) -> dict[int, float]:
        return {
            one.hour: one.work / one.seconds
            for one in self.hours
            if one.seconds * _kept(now - one.at) >= KNOWN_S
        }

    def _judge(self) -> None:
        """Compare the past hour with the rate that was known before it."""
        if not self._before or self._seconds < JUDGED_S:
            return
        one = self._hours[self._day_hour % 24]
        error = (self._work / self._seconds / self._before - 1) ** 2
        one.error = error if one.error is None else 0.7 * one.error + 0.3 * error


class Ahead:
    """The work that fits from now on.

    Args:
        hours: Work per second, and its standard deviation, for each hour of the day.
        now: Seconds since the epoch.
    """

    def __init__(self, hours: Sequence[tuple[float, float]], now: float) -> None:
        first = int(now // HOUR_S)
        spans = [HOUR_S - now % HOUR_S] + [float(HOUR_S)] * HORIZON_H
        rates = [hours[(first + step) % 24] for step in range(len(spans))]
        self._now = now
        self._ends = [0.0, *accumulate(spans)]
        self._rates = rates
        # The errors of all spans, fully correlated and independent: `until` mixes the two.
        self._work = [0.0, *accumulate(rate * span for (rate, _), span in zip(rates, spans, strict=True))]
        self._sums = [0.0, *accumulate(sd * span for (_, sd), span in zip(rates, spans, strict=True))]
        squares = ((sd * span) ** 2 for (_, sd), span in zip(rates, spans, strict=True))
        self._squares = [0.0, *accumulate(squares)]

    def until(self, time: float) -> tuple[float, float]:
        """Return the work that fits until a time, and its standard deviation."""
        left = min(max(0.0, time - self._now), self._ends[-1])
        step = max(0, bisect_left(self._ends, left) - 1)
        span = left - self._ends[step]
        rate, sd = self._rates[step]
        total = self._sums[step] + sd * span
        apart = self._squares[step] + (sd * span) ** 2
        return self._work[step] + rate * span, sqrt(TOGETHER * total**2 + (1 - TOGETHER) * apart)

    def when(self, work: float) -> float:
        """Return when an amount of work is done, in seconds since the epoch; infinity: beyond the horizon."""
        if work > self._work[-1]:
            return inf
        step = max(0, bisect_left(self._work, work) - 1)
        rate = self._rates[step][0]
        return self._now + self._ends[step] + ((work - self._work[step]) / rate if rate else 0.0)


class Habit(NamedTuple):
    """Statistics of the latest batches of a tenant.

    Attributes:
        used: Share of the bound of a batch that its answers took.
        spread: Relative standard deviation of the share of one batch.
        flow: New work per second.
        burst: Work of the largest batch.
        weight: The tenant's share relative to other tenants.
    """

    used: float = 1.0
    spread: float = SPREAD
    flow: float = 0.0
    burst: float = 0.0
    weight: float = 1.0


class RowDemand:
    """The demand of the tenants for a model.

    Args:
        latest: The latest batches of the model, ended or open.
        now: Seconds since the epoch.
    """

    def __init__(self, latest: Iterable[Batch], now: float) -> None:
        groups: dict[str, list[Batch]] = defaultdict(list)
        for batch in latest:
            if now - batch.created_at <= LATEST_S:
                groups[batch.tenant].append(batch)
        self._any = _habit([batch for group in groups.values() for batch in group], Habit(), now)
        self.habits: Mapping[str, Habit] = {
            tenant: _habit(group, self._any, now) for tenant, group in groups.items()
        }

    def of(self, tenant: str) -> Habit:
        """Return the habit of a tenant; without batches of its own, the habit of all tenants together."""
        return self.habits.get(tenant) or self._any._replace(flow=0.0, burst=0.0)


def _habit(batches: Sequence[Batch], others: Habit, now: float) -> Habit:
    shares = [(_used(one), one.work) for one in batches if _ended_rows(one) >= LEAST_ROWS and one.work]
    bound = sum(work for _, work in shares)
    used = sum(share * work for share, work in shares) / bound if bound else others.used
    squares = sum((share / used - 1) ** 2 for share, _ in shares) if used else 0.0
    spread = sqrt((squares + SPREAD**2) / (len(shares) + 1))
    works = [one.work * (_used(one) if _ended_rows(one) >= LEAST_ROWS else used) for one in batches]
    # A new service can't look back for a week.
    since = max(DAY_S, now - min((one.created_at for one in batches), default=now))
    weight = batches[0].weight or 1.0 if batches else 1.0
    return Habit(used, spread, sum(works) / since, max(works, default=0.0), weight)


def _ended_rows(batch: Batch) -> int:
    return batch.completed + batch.failed - batch.unrun


def _used(batch: Batch) -> float:
    """Return the share of their bound that the ended rows of a batch took."""
    if not batch.work:
        return 1.0
    tokens = RowTokens(batch.input_tokens, batch.cached_tokens, batch.output_tokens)
    rows = _ended_rows(batch)
    return work_of(rows, tokens) / (batch.work * rows / batch.total)


def remaining(batch: Batch) -> int:
    """Return the rows of a batch that have no result yet; 0 until it is validated."""
    return batch.total - batch.completed - batch.failed


def in_order(batches: Iterable[Batch]) -> list[Batch]:
    """Return batches in the order in which a tenant's batches run: by deadline, then by arrival.

    Args:
        batches: Open batches, the earliest first.
    """
    return sorted(batches, key=lambda batch: batch.expires_at)


class Queue:
    """The open batches of a model, and whether they fit into their windows.

    Args:
        batches: The open batches, the earliest first.
        ahead: The work that fits from now on; None: nothing is measured.
        demand: The demand of the tenants.
        now: Seconds since the epoch.
    """

    def __init__(self, batches: Iterable[Batch], ahead: Ahead | None, demand: RowDemand, now: float) -> None:
        self._ahead = ahead
        self._demand = demand
        self._now = now
        self._tenants: dict[str, list[Batch]] = defaultdict(list)
        for batch in batches:
            if batch.state in ("validating", "in_progress"):
                self._tenants[batch.tenant].append(batch)
        self._weights = {tenant: habit.weight for tenant, habit in demand.habits.items()}
        self._weights |= {tenant: own[0].weight or 1.0 for tenant, own in self._tenants.items()}
        self._flow = sum(habit.flow for habit in demand.habits.values())
        queued = {tenant: sum(self._work(one)[0] for one in own) for tenant, own in self._tenants.items()}
        self._now_only = _Rounds((work, self._weights[tenant]) for tenant, work in queued.items())
        self._and_new = _Rounds(
            (queued.get(tenant, 0.0) + demand.of(tenant).burst, weight)
            for tenant, weight in self._weights.items()
        )

    def outlooks(self) -> dict[str, Outlook]:
        """Return the outlook of each batch, by id."""
        found: dict[str, Outlook] = {}
        for tenant, own in self._tenants.items():
            found |= self._forecast(tenant, in_order(own))
        return found

    def outlook_of_new(self, batch: Batch, most_s: float) -> Outlook:
        """Return the outlook of a new batch of the queue, with the shortest window that holds.

        Promises to other tenants need no check: they allowed for the shares of all tenants.

        Args:
            batch: The batch.
            most_s: The longest window that it could have, in seconds.
        """
        outlook = self._as_new(batch)
        if outlook.verdict in ("holds", "unknown"):
            return outlook
        return outlook._replace(message=f"{outlook.message}; {self.shortest(batch, most_s)}")

    def shortest(self, batch: Batch, most_s: float) -> str:
        """Return a message about the shortest window that holds for a batch of the queue, if it began now."""
        for hour in (*range(1, 24), *range(24, int(most_s // HOUR_S) + 1, 6)):
            other = replace(batch, expires_at=int(self._now) + hour * HOUR_S)
            if self._as_new(other).verdict == "holds":
                return f'the shortest completion_window that holds from now on is "{hour}h"'
        return f"no completion_window up to {most_s / DAY_S:g}d is sure to hold"

    def _as_new(self, batch: Batch) -> Outlook:
        """Return the outlook of a batch as if it were new, with the window that it has here."""
        own = [one for one in self._tenants[batch.tenant] if one.id != batch.id]
        found = self._forecast(batch.tenant, in_order([*own, batch]))
        outlook = found[batch.id]
        if outlook.verdict in ("holds", "unsure"):
            for one in own:
                if one.promised and one.expires_at > batch.expires_at and found[one.id].margin < KEPT:
                    message = f"With this completion_window, the batch runs before {one.id}"
                    return Outlook("breaks", f"{message}, whose promised window might then not hold")
        return outlook

    def _forecast(self, tenant: str, own: Sequence[Batch]) -> dict[str, Outlook]:
        if self._ahead is None:
            return {one.id: Outlook("unknown", UNKNOWN) for one in own}
        weight = self._weights[tenant]
        share = sum(self._weights.values()) / weight
        flow = self._flow - self._demand.of(tenant).flow
        found: dict[str, Outlook] = {}
        done = needed = variance = 0.0
        for one in own:
            work, spread = self._work(one)
            before, done = needed, done + work
            needed = self._now_only.together(done, weight)
            variance += (work * spread) ** 2
            room, error = self._ahead.until(one.expires_at - END_S)
            # Other tenants may add work until then, but never more than their shares.
            left_s = max(0.0, one.expires_at - self._now)
            most = max(needed, min(self._and_new.together(done, weight) + flow * left_s, done * share))
            relative = sqrt(max(0.0, variance)) / done if done else 0.0
            deviation = sqrt(error**2 + (relative * needed) ** 2)
            margin = (room - most) / sqrt(error**2 + (relative * most) ** 2 + 1e-9)
            if margin >= HOLDS:
                found[one.id] = Outlook("holds", margin=margin)
            else:
                verdict: Verdict = "late" if needed - room > LATE * deviation else "unsure"
                message = self._message(one, verdict, before, needed, room)
                found[one.id] = Outlook(verdict, message, margin)
            if needed > max(room, before):
                # The rest ends with its window, and delays no later batch.
                part = max(0.0, room - before) / (needed - before)
                done -= work * (1 - part)
                variance -= (work * spread) ** 2 * (1 - part**2)
                needed = max(before, room)
        return found

    def _work(self, batch: Batch) -> tuple[float, float]:
        """Return the remaining work of a batch, and its relative standard deviation."""
        habit = self._demand.of(batch.tenant)
        bound = batch.work * (remaining(batch) / batch.total if batch.total else 1.0)
        rows = _ended_rows(batch)
        if not rows or not batch.work:
            return bound * habit.used, habit.spread
        own = rows / (rows + LEAST_ROWS)
        return bound * (own * _used(batch) + (1 - own) * habit.used), habit.spread * sqrt(1 - own)

    def _message(self, batch: Batch, verdict: Verdict, before: float, needed: float, room: float) -> str:
        assert self._ahead is not None
        over_s = self._ahead.when(needed) - batch.expires_at
        ends = f"this batch ends {_time(abs(over_s))} {'after' if over_s > 0 else 'before'} the end of its"
        words = f"At the rate that live traffic has recently left to batches, {ends} completion_window"
        if verdict == "unsure":
            return f"{words}; that rate varies, so that the window is not sure to hold"
        left = remaining(batch)
        unrun = round(left * min(1.0, (needed - room) / max(needed - before, 1e-9)))
        rows = f"about {unrun:,} of its {batch.total:,} rows" if batch.total else "rows"
        return f"{words}: {rows} would not run, and would be in the error file as batch_expired"


class _Rounds:
    """Turns of tenants by weight: in each round, a tenant's work equals its weight.

    Prefix sums over the tenants that end within a number of rounds, and over the tenants that continue, make
    each question a look into a sorted list.
    """

    def __init__(self, tenants: Iterable[tuple[float, float]]) -> None:
        rounds = sorted((work / weight, work, weight) for work, weight in tenants)
        self._ends = [end for end, _, _ in rounds]
        self._ended = [0.0, *accumulate(work for _, work, _ in rounds)]
        self._going = [0.0, *accumulate(weight for _, _, weight in reversed(rounds))]

    def together(self, work: float, weight: float) -> float:
        """Return the work of all tenants that is done when `work` of one tenant is done; at least `work`."""
        rounds = work / weight
        place = bisect_left(self._ends, rounds)
        return max(work, self._ended[place] + rounds * self._going[len(self._ends) - place])


def _kept(seconds: float) -> float:
    return float(0.5 ** (max(0.0, seconds) / HALF_LIFE_S))


def _time(seconds: float) -> str:
    if seconds == inf:
        return "more than a day"
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{max(1, round(seconds / 60))} min"
