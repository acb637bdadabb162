"""The queue: every rule of order and admission, and nothing else. Pure and synchronous."""

import heapq
import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

from batcher import checks
from batcher.entries import Queued
from batcher.errors import QueueFull
from batcher.fair_share import Backlog, Tenant, Tenants, Tier

BACKGROUND_SHARE = 0.9
"""Share of the bounds that the background may fill."""

OPEN_SHARE = 0.8
"""Share of the bounds that any tenant may fill; beyond it each has its fair share of the whole."""

EntryT = TypeVar("EntryT", bound=Queued)


class Bound(NamedTuple):
    """A bound that keeps an entry out.

    Attributes:
        name: `max_queue_size` or `max_queue_cost`.
        value: Its value.
        of_tenant: It is the tenant's share of the queue that is full, not the whole queue.
    """

    name: str
    value: int
    of_tenant: bool


class RequestQueue(Generic[EntryT]):
    """A bounded queue that is fair between tenants and knows tiers, deadlines and cancellation.

    **Order.** The lowest `priority`, or tier, goes first. Inside a tier the tenant goes first that was
    served the least cost by its weight (virtual token counter, arXiv 2401.00588): a tenant that joins
    starts at the counter of the least served active one, so neither idling nor a fresh name earns credit.
    Inside a tenant, arrival order. A tier that has waited for its turn `priority_aging_s` longer than the
    tier one level above goes first for one entry; each further level takes as long again. So no tier
    starves, and a low tier with a long backlog can't hold up a high one either.

    **Bounds.** An entry that finds no space may wait for it: it stands *outside*, in the same order as all
    others, and may be taken from there; it just doesn't count against the bounds. Up to four fifths of the
    bounds any tenant may enter. Beyond that a tenant has its fair share, by weight, among those that
    had entries within the last 10 seconds: one that floods the queue is refused, its neighbours are not.

    Each operation takes amortised O(log n) of the tenants and deadlines that wait, but for `peek`, `clear`
    and iteration.

    Attributes:
        total: Records that wait, outside too: an entry may stand for several.
        total_cost: Their cost.
        outside: Records that wait for space.
        outside_cost: Their cost.
        entered: Records that got in so far.

    Args:
        clock: Returns the time in seconds.
        max_size: Most records that may wait; an empty queue takes any one entry. None: no bound.
        max_cost: Most cost that may wait; an empty queue takes any one entry. None: no bound.
        priority_aging_s: Seconds, see above; None: a low tier waits until all above it is done.
        tenant_weights: Share of a tenant in relation to the others; 1.0 where not given.
        background: The priority from which on an entry finds the queue full at nine tenths of its
            bounds, so that there is space for the others; None: all are alike.

    Raises:
        ValueError: An argument is out of range.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float],
        max_size: int | None = None,
        max_cost: int | None = None,
        priority_aging_s: float | None = 10.0,
        tenant_weights: Mapping[str, float] | None = None,
        background: int | None = None,
    ) -> None:
        checks.function("clock", clock)
        if max_size is not None:
            checks.whole("max_size", max_size, 1)
        if max_cost is not None:
            checks.whole("max_cost", max_cost, 1)
        if priority_aging_s is not None:
            checks.positive("priority_aging_s", priority_aging_s)
        if background is not None:
            checks.whole("background", background, -checks.PRIORITIES, checks.PRIORITIES)
        self._clock = clock
        self._max_size = math.inf if max_size is None else max_size
        self._max_cost = math.inf if max_cost is None else max_cost
        self._open_size = math.floor(OPEN_SHARE * max_size) if max_size else math.inf
        self._open_cost = math.floor(OPEN_SHARE * max_cost) if max_cost else math.inf
        self._aging = priority_aging_s
        self._background: float = math.inf if background is None else background
        self._sequence = itertools.count()
        self.total: int = 0
        self.total_cost: int = 0
        self.outside: int = 0
        self.outside_cost: int = 0
        self.entered: int = 0
        self._tiers: dict[int, Tier] = {}
        self._turns: list[tuple[float, int, int, Tier]] = []
        self._tenants = Tenants(clock, tenant_weights or {})
        # Backlogs with entries outside, in turn: those of the foreground, and those of the background.
        self._claims: tuple[OrderedDict[Backlog, None], OrderedDict[Backlog, None]]
        self._claims = OrderedDict(), OrderedDict()
        self._let_in: list[EntryT] = []
        self._deadlines: list[tuple[float, int, EntryT, Backlog]] = []
        self._timed = 0
        self._expired: list[EntryT] = []

    @property
    def size(self) -> int:
        """Records that count against the bounds."""
        return self.total - self.outside

    @property
    def cost(self) -> int:
        """The cost of the records that count against the bounds."""
        return self.total_cost - self.outside_cost

    def __len__(self) -> int:
        return self.total

    def __iter__(self) -> Iterator[EntryT]:
        """Yield every waiting entry, in no particular order."""
        for tier in self._tiers.values():
            for backlog in tier.backlogs.values():
                yield from backlog.walk()

    def classes(self) -> dict[int, tuple[int, int]]:
        """Return how many records count against the bounds, and their cost, by priority."""
        return {
            tier.priority: (tier.live - tier.outside, tier.cost - tier.outside_cost)
            for tier in self._tiers.values()
            if tier.live > tier.outside
        }

    def ahead(self, priority: int, tenant: str | None = None) -> tuple[int, int]:
        """Return how many records go before one that comes now, and their cost together.

        Args:
            priority: Its tier: all that waits in those before it goes first.
            tenant: Its tenant: inside the tier the tenants have turns, so each of the others is served
                once more at most than it has entries waiting. None: the whole tier goes first.
        """
        records = cost = 0
        for tier in self._tiers.values():
            if tier.priority > priority:
                continue
            live = tier.live
            if tenant is not None and tier.priority == priority:
                backlog = tier.backlogs.get(tenant)
                own = 0 if backlog is None else backlog.live
                others = tier.tenants - (own > 0)
                live = min(live, own + others * (own + 1))
            records += live
            cost += tier.cost * live // tier.live
        return records, cost

    def own(self, priority: int, tenant: str) -> int:
        """Return how many records of a tenant wait in a tier."""
        tier = self._tiers.get(priority)
        backlog = tier.backlogs.get(tenant) if tier is not None else None
        return 0 if backlog is None else backlog.live

    # Bounds

    def put(self, entry: EntryT) -> bool:
        """Put an entry in its place, and return whether it is admitted; otherwise it waits outside.

        Raises:
            ValueError: It waits already.
        """
        if entry._place is not None:
            raise ValueError("the entry waits already")
        cost, records = entry.cost, entry.records
        tier = self._tiers.get(entry.priority)
        if tier is None:
            tier = self._open_tier(entry.priority)
        backlog = tier.backlogs.get(entry.tenant)
        if backlog is None:
            backlog = tier.backlogs[entry.tenant] = Backlog(tier, self._tenants.join(entry.tenant))
        if not backlog.entries:
            backlog.tenant = self._tenants.join(entry.tenant)
            tier.join(backlog, next(self._sequence))
        tenant = backlog.tenant
        size, full_cost = self.total - self.outside + records, self.total_cost - self.outside_cost + cost
        entry.admitted = not backlog.outside and (
            (size <= self._open_size and full_cost <= self._open_cost) or self._bound(entry, tenant) is None
        )
        entry._place = backlog
        backlog.append(entry)
        backlog.live += records
        tier.live += records
        tier.cost += cost
        tenant.live += records
        tenant.cost += cost
        self.total += records
        self.total_cost += cost
        if entry.admitted:
            self.entered += records
        else:
            self._claims[entry.priority >= self._background][backlog] = None
            backlog.outside[entry] = None
            self._count_outside(entry, backlog, 1)
        if entry.deadline is not None:
            self._timed += 1
            heapq.heappush(self._deadlines, (entry.deadline, next(self._sequence), entry, backlog))
        return entry.admitted

    def add(self, entry: EntryT) -> None:
        """Put an entry in its place if there is space for it.

        Raises:
            QueueFull: There is none.
            ValueError: It waits already.
        """
        if not self.put(entry):
            bound = self.full(entry)
            self.remove(entry)
            raise QueueFull(bound.name, bound.value, retry_after_s=0.0)

    def pass_by(self, entry: EntryT) -> None:
        """Count an entry that is taken at once, while nothing waits that it could pass."""
        entry.admitted = True
        self.entered += entry.records

    def full(self, entry: EntryT) -> Bound:
        """Return the bound that keeps an entry outside."""
        backlog: Backlog = entry._place
        first = next(iter(backlog.outside))
        bound = self._bound(entry, backlog.tenant) or self._bound(first, backlog.tenant)
        # Behind another entry that was only just let in.
        return bound or Bound("max_queue_size", int(min(self._max_size, checks.LARGEST)), True)

    def admit(self) -> Sequence[EntryT]:
        """Let in those that wait outside, as far as there is space.

        Returns:
            The entries that have come in from outside since the last call, also those that were taken.
        """
        if self.outside:
            for claims in self._claims:
                while claims:
                    backlog = next(iter(claims))
                    entry: EntryT = next(iter(backlog.outside))
                    bound = self._bound(entry, backlog.tenant)
                    if bound is None:
                        self._let(entry, backlog)
                        if backlog.outside:
                            claims.move_to_end(backlog)
                    elif bound.of_tenant:
                        # Its turn comes again when one of the tenant's entries leaves.
                        del claims[backlog]
                        backlog.tenant.parked.append(backlog)
                    else:
                        break
        if not self._let_in:
            return ()
        let_in, self._let_in = self._let_in, []
        return let_in

    def _bound(self, entry: EntryT, tenant: Tenant) -> Bound | None:
        """Return the bound that an entry of a tenant would exceed, if it were let in now."""
        inside = self.total - self.outside
        size = inside + entry.records
        cost = self.total_cost - self.outside_cost + entry.cost
        open_size, open_cost = size <= self._open_size, cost <= self._open_cost
        if (open_size and open_cost) or not inside:
            return None
        most, most_cost = self._max_size, self._max_cost
        if entry.priority >= self._background:
            most, most_cost = BACKGROUND_SHARE * most, BACKGROUND_SHARE * most_cost
        if size > most:
            return Bound("max_queue_size", int(self._max_size), False)
        if cost > most_cost:
            return Bound("max_queue_cost", int(self._max_cost), False)
        held = tenant.live - tenant.outside
        if not held:
            return None
        share = self._tenants.share(tenant)
        if not open_size and held + entry.records > share * most:
            return Bound("max_queue_size", int(self._max_size), True)
        if not open_cost and tenant.cost - tenant.outside_cost + entry.cost > share * most_cost:
            return Bound("max_queue_cost", int(self._max_cost), True)
        return None

    def _let(self, entry: EntryT, backlog: Backlog) -> None:
        """Let an entry in that waits outside."""
        self._leave_outside(entry, backlog)
        entry.admitted = True
        self.entered += entry.records
        self._let_in.append(entry)

    def _leave_outside(self, entry: EntryT, backlog: Backlog) -> None:
        del backlog.outside[entry]
        if not backlog.outside:
            self._claims[entry.priority >= self._background].pop(backlog, None)
        self._count_outside(entry, backlog, -1)

    def _count_outside(self, entry: EntryT, backlog: Backlog, sign: int) -> None:
        tier, tenant, cost, records = backlog.tier, backlog.tenant, sign * entry.cost, sign * entry.records
        self.outside += records
        self.outside_cost += cost
        tier.outside += records
        tier.outside_cost += cost
        tenant.outside += records
        tenant.outside_cost += cost

    # Order

    def head(self, before: int | None = None) -> EntryT | None:
        """Return the entry whose turn it is, without taking it; expired ones are passed over.

        Args:
            before: Only of the tiers before this priority; None: of all.
        """
        if self._deadlines:
            self._sweep()
        backlog = self._next_backlog() if before is None else self._next_backlog_before(before)
        if backlog is None:
            return None
        head: EntryT = backlog.entries[0]
        return head

    def pick(self, entry: EntryT) -> None:
        """Take one waiting entry, whatever its place, and charge its tenant.

        Raises:
            ValueError: The entry is not waiting.
        """
        if entry._place is None:
            raise ValueError("the entry is not waiting: it was taken or removed, or has expired")
        self._serve(entry, entry._place, self._clock())

    def take(
        self, budget: int | None = None, max_records: int | None = None, *, padded: bool = False
    ) -> list[EntryT]:
        """Take the entries whose turn it is, in order, as many as fit together.

        An entry that is larger than a whole bound is taken alone.

        Args:
            budget: Most cost of all together; None: no bound.
            max_records: Most records; None: no bound.
            padded: The cost of all together is that of the costliest times their number, not the sum.
        """
        if self._deadlines:
            self._sweep()
        now = self._clock()
        batch: list[EntryT] = []
        total = longest = records = 0
        while max_records is None or records < max_records:
            backlog = self._next_backlog()
            if backlog is None:
                break
            entry: EntryT = backlog.entries[0]
            cost = entry.cost
            records += entry.records
            if padded:
                longest = max(longest, cost)
                total = longest * (len(batch) + 1)
            else:
                total += cost
            if batch and ((budget is not None and total > budget) or records > (max_records or records)):
                break
            self._serve(entry, backlog, now)
            batch.append(entry)
        return batch

    def peek(self, count: int) -> list[EntryT]:
        """Return the next `count` entries in the order in which `take` would return them."""
        self._sweep()
        return list(itertools.islice(self._walk(), count))

    def settle(self, entry: EntryT, charged: int, used: int) -> None:
        """Charge the tenant of a taken entry for what it used, instead of what it was taken for."""
        tier = self._tiers.get(entry.priority)
        backlog = tier.backlogs.get(entry.tenant) if tier is not None else None
        if tier is None or backlog is None or used == charged:
            # A tenant that was forgotten starts at the level of the others: nothing to put right.
            return
        backlog.counter += (used - charged) * backlog.tenant.charge
        if backlog.item is not None and backlog.counter < backlog.item[0]:
            tier.enlist(backlog)

    def _open_tier(self, priority: int) -> Tier:
        tier = self._tiers[priority] = Tier(priority, self._key(priority))
        if len(self._turns) > 2 * len(self._tiers) + 64:
            self._turns = [turn for turn in self._turns if turn[3].live]
            heapq.heapify(self._turns)
        heapq.heappush(self._turns, (tier.key, priority, next(self._sequence), tier))
        return tier

    def _key(self, priority: int) -> float:
        # All tiers age alike, so comparing these keys needs no clock.
        return float(priority) if self._aging is None else self._clock() + priority * self._aging

    def _next_backlog(self) -> Backlog | None:
        """Return the backlog whose first entry is next; None: nothing waits."""
        turns = self._turns
        while turns:
            key, priority, number, tier = turns[0]
            if not tier.live:
                heapq.heappop(turns)
            elif key != tier.key and len(turns) > 1:
                heapq.heapreplace(turns, (tier.key, priority, number, tier))
            else:
                return tier.first()
        return None

    def _next_backlog_before(self, priority: int) -> Backlog | None:
        """Return the backlog whose first entry is next among the tiers before a priority."""
        tiers = [tier for tier in self._tiers.values() if tier.priority < priority]
        return min(tiers, key=lambda tier: (tier.key, tier.priority)).first() if tiers else None

    def _serve(self, entry: EntryT, backlog: Backlog, now: float) -> None:
        """Charge a tenant for an entry and take it out."""
        if not entry.admitted:
            self._let(entry, backlog)
        backlog.counter += (entry.cost or 1) * backlog.tenant.charge
        if self._aging is not None:
            tier = backlog.tier
            tier.key = now + tier.priority * self._aging
        self._drop(entry, backlog)

    def _walk(self) -> Iterator[EntryT]:
        turns = [(tier.key, tier.priority, tier.walk()) for tier in self._tiers.values()]
        heapq.heapify(turns)
        while turns:
            _, priority, entries = turns[0]
            entry = next(entries, None)
            if entry is None:
                heapq.heappop(turns)
            else:
                yield entry
                heapq.heapreplace(turns, (self._key(priority), priority, entries))

    # Leaving

    def remove(self, entry: EntryT) -> bool:
        """Take an entry out unserved: it was cancelled. Return whether it was still waiting."""
        backlog: Backlog | None = entry._place
        if backlog is None:
            return False
        if not entry.admitted:
            self._leave_outside(entry, backlog)
        self._drop(entry, backlog)
        return True

    def clear(self) -> list[EntryT]:
        """Take everything out unserved."""
        entries = list(self)
        for entry in entries:
            self.remove(entry)
        return entries

    def expire(self) -> list[EntryT]:
        """Take out and return the entries whose deadline has passed; each is returned once."""
        if self._deadlines:
            self._sweep()
        if not self._expired:
            return []
        expired, self._expired = self._expired, []
        return expired

    def next_deadline(self) -> float | None:
        """Return the earliest deadline of a waiting entry."""
        deadlines = self._deadlines
        while deadlines and not self._holds(deadlines[0]):
            heapq.heappop(deadlines)
        return deadlines[0][0] if deadlines else None

    def _drop(self, entry: EntryT, backlog: Backlog) -> None:
        tier, tenant, cost = backlog.tier, backlog.tenant, entry.cost
        entry._place = None
        records = entry.records
        backlog.live -= records
        tier.live -= records
        tier.cost -= cost
        tenant.live -= records
        tenant.cost -= cost
        self.total -= records
        self.total_cost -= cost
        if entry.deadline is not None:
            self._timed -= 1
            if len(self._deadlines) > 2 * self._timed + 64:
                self._deadlines = [item for item in self._deadlines if self._holds(item)]
                heapq.heapify(self._deadlines)
        backlog.discard(entry)
        if tenant.parked:
            self._claim_again(tenant)
        if not tier.live:
            # Nothing is owed in a tier in which nothing waits.
            del self._tiers[tier.priority]
        elif not backlog.entries:
            tier.retire(backlog, next(self._sequence))
        if not tenant.live:
            self._tenants.leave(tenant)

    def _claim_again(self, tenant: Tenant) -> None:
        for backlog in tenant.parked:
            if backlog.outside:
                self._claims[backlog.tier.priority >= self._background][backlog] = None
        tenant.parked.clear()

    def _holds(self, item: tuple[float, int, EntryT, Backlog]) -> bool:
        """Return whether an item of the deadlines is of an entry that still waits where it did."""
        return item[2]._place is item[3] and item[2].deadline == item[0]

    def _sweep(self) -> None:
        if not self._deadlines:
            return
        now = self._clock()
        while self._deadlines and self._deadlines[0][0] <= now:
            item = heapq.heappop(self._deadlines)
            if self._holds(item) and self.remove(item[2]):
                self._expired.append(item[2])

    # Tenants

    def weigh(self, tenant: str, weight: float | None) -> None:
        """Give a tenant a weight of its own, for what it is served from now on.

        Args:
            tenant: Its name.
            weight: Its share in relation to the others; None: what `tenant_weights` says.

        Raises:
            ValueError: The weight is out of range.
            TypeError: The tenant is not a string.
        """
        self._tenants.weigh(tenant, weight)

    def set_tenant_weights(self, weights: Mapping[str, float]) -> None:
        """Change the tenants' shares from now on; what they were served is not counted anew.

        Args:
            weights: Share of a tenant in relation to the others; 1.0 where not given.

        Raises:
            ValueError: A weight is out of range.
        """
        self._tenants.set_weights(weights)

    def tenant(self, name: str) -> Tenant | None:
        """Return what is known of a tenant that has entries, or had within the last 10 seconds."""
        return self._tenants.get(name)
