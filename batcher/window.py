"""The window: the running records within a capacity, and whether one more fits."""

import math
from operator import add, mul, sub
from typing import NamedTuple

from batcher.outputs import AHEAD, Forecast
from batcher.service_rate import ServiceRate

QUANTILE = 2.33  # standard deviations above the mean: what runs holds no more in 99 of 100 cases
CAUTION = 4.0  # caution that follows if all that runs is preempted; more than 1 counts as 1
CALM_S = 60.0  # seconds in which caution falls to 1/e

TIMES = len(AHEAD)


class Claim(NamedTuple):
    """The capacity that a slot may take until it ends."""

    cost: int  # what it takes at its end; where that is uncertain, the largest of `uses`
    most: int
    # The mean of what it holds at each of the times of `AHEAD`, and the variance; none: `cost`, to its end.
    uses: tuple[float, ...] = ()
    variances: tuple[float, ...] = ()

    @classmethod
    def of(cls, forecast: Forecast, prompt: int, records: int, tokens: int, most: int) -> "Claim":
        """Return the claim of records that start together.

        Args:
            forecast: The expected tokens of each of their answers.
            prompt, records: Tokens of the prompts together, and records, which are as alike as the answers to
                one prompt.
            tokens, most: Tokens of each answer so far, and at most.
        """
        end = prompt + records * max(tokens, forecast.mean)
        bound = prompt + records * max(tokens, most)
        if forecast.alive:
            # Until the next of the times an answer may have as many tokens as then.
            holds = [prompt + records * min(tokens + ahead, most) for ahead in (*AHEAD[1:], most)]
            uses = tuple(map(mul, forecast.alive, holds))
            variances = tuple((hold - use) * use for hold, use in zip(holds, uses, strict=True))
            return cls(math.ceil(max(uses)), bound, uses, variances)
        if forecast.variance:
            return cls(math.ceil(end), bound, (end,) * TIMES, (records**2 * forecast.variance,) * TIMES)
        return cls(math.ceil(end), bound)


NOTHING = Claim(0, 0)
ZEROS = (0.0,) * TIMES


class Part:
    """The running slots of one kind: the foreground, or the background that gives way to it."""

    def __init__(self) -> None:
        self.records: int = 0
        # The sums of their claims.
        self.cost: int = 0
        self.most: int = 0
        self.certain: int = 0  # the cost of those that are certain
        self.uses: tuple[float, ...] = ZEROS
        self.variances: tuple[float, ...] = ZEROS
        self.starting: int = 0  # slots that are not corrected yet
        self.usual: tuple[int, int] = (0, 0)  # records and cost that ran when a pause began
        self.rate: ServiceRate = ServiceRate()

    @property
    def inside(self) -> tuple[int, int]:
        """Records and cost that run, or usually run: in a pause of arrivals, running records end."""
        return max(self.records, self.usual[0]), max(self.cost, self.usual[1])

    def claim(self, claim: Claim, before: Claim) -> None:
        """Note that the claim of a slot has changed."""
        self.cost += claim.cost - before.cost
        self.most += claim.most - before.most
        self.certain += (0 if claim.uses else claim.cost) - (0 if before.uses else before.cost)
        if self.cost == self.certain:
            # What was added has been taken away again, but for rounding.
            self.uses = self.variances = ZEROS
        else:
            self.uses = tuple(map(add, self.uses, map(sub, claim.uses or ZEROS, before.uses or ZEROS)))
            changes = map(sub, claim.variances or ZEROS, before.variances or ZEROS)
            self.variances = tuple(map(add, self.variances, changes))


class Window:
    """The running records: the foreground fits by itself, and the background beside it.

    Where claims are uncertain, their sum counts, at each of the times of `AHEAD`: long and short answers even
    out, and not all have their most tokens together. After the engine has had to preempt, the window is
    cautious for some minutes: it reserves a part of what the worst case takes beyond that, or all of it.
    """

    def __init__(self) -> None:
        self.foreground, self.background = Part(), Part()
        # The parts beside which a record of each kind must fit: the rest gives way to it.
        self._beside = {False: (self.foreground,), True: (self.foreground, self.background)}
        self.capacity: int = 0
        self.most_records: int = 0
        self._caution = 0.0  # 0 to 1, at the time beside it
        self._cautious_at = 0.0

    @property
    def records(self) -> int:
        """Records that run."""
        return self.foreground.records + self.background.records

    @property
    def cost(self) -> int:
        """Cost of what runs."""
        return self.foreground.cost + self.background.cost

    def part(self, background: bool) -> Part:
        """Return the part of the window in which a record of this kind runs."""
        return self.background if background else self.foreground

    def left(self, background: bool, now: float) -> tuple[int, float]:
        """Return the records and the cost that are left to this kind; below 0 where too much runs."""
        parts = self._beside[background]
        records = sum(part.records for part in parts)
        return self.most_records - records, self.capacity - self._reserved(parts, NOTHING, now)

    def fits(self, records: int, claim: Claim, background: bool, now: float) -> bool:
        """Return whether records may start; alone, whatever they claim."""
        running = self.foreground.records
        if background:
            running += self.background.records
        if not running:
            return True
        beside = self._beside[background]
        return running + records <= self.most_records and self._reserved(beside, claim, now) <= self.capacity

    def overcommitted(self, records: int, now: float) -> None:
        """Note that the engine has preempted `records` records for lack of space."""
        rows = self._reserved((self.background,), NOTHING, now) if self.background.records else math.inf
        if rows <= self.capacity < self._reserved(self._beside[True], NOTHING, now):
            # The foreground has taken the space, whatever ran: no claim was wrong.
            return
        caution = self.caution(now) + CAUTION * records / max(1, self.records)
        self._caution, self._cautious_at = min(1.0, caution), now

    def _reserved(self, parts: tuple[Part, ...], claim: Claim, now: float) -> float:
        """Return the capacity to keep for running records and for one more claim."""
        cost, most, uses, variances = claim
        certain = 0 if uses else cost
        for part in parts:
            cost += part.cost
            certain += part.certain
        if cost == certain:
            return cost
        uses, variances = uses or ZEROS, variances or ZEROS
        for part in parts:
            most += part.most
            uses = tuple(map(add, uses, part.uses))
            variances = tuple(map(add, variances, part.variances))
        deviations = (QUANTILE * math.sqrt(max(0.0, variance)) for variance in variances)
        likely: float = min(most, certain + max(map(add, uses, deviations)))
        return likely + self.caution(now) * (most - likely)

    def caution(self, now: float) -> float:
        """Return the share of the difference of estimates and largest costs that is reserved, 0 to 1."""
        return self._caution * math.exp((self._cautious_at - now) / CALM_S) if self._caution else 0.0
