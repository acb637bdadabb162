"""The queue: every rule of order and admission, and nothing else. Pure and synchronous."""

import heapq
import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from operator import attrgetter
from typing import Any, Generic, TypeVar

from batcher import checks
from batcher.entries import Entry
from batcher.errors import QueueFull
from batcher.fair_share import Account, Backlog, Heap, Needs, Tenant, Tenants, Tier

BACKGROUND_SHARE = 0.9  # share of the bounds that the background may fill
OPEN_SHARE = 0.8  # share of them that any tenant may fill; beyond it each has its fair share of the whole

EntryT = TypeVar("EntryT", bound=Entry[Any])
_by_turn, _by_deadline = attrgetter("turn"), attrgetter("deadline")
_arrivals = itertools.count(1)


class RequestQueue(Generic[EntryT]):
    """A bounded queue that is fair between tenants and knows tiers, deadlines and cancellation.

    The README has its rules: "Order", and "When the queue is full" for the part of its bounds that a tenant
    may fill. An entry that finds no space may wait for it *outside*: in the same order as all others, but it
    doesn't count against the bounds. An entry with a need that was refused is passed by until `reopen`.

    Each operation takes amortised O(log n) of the tenants and deadlines that wait, but for `peek`, `clear`
    and iteration, and looks at each tier in which records wait.

    Args:
        clock: Returns the time in seconds, which never goes back.
        max_size, max_cost: Maximum records, and most cost, unless the queue is empty; None: no bound.
        priority_aging_s: Seconds for a level, see "Order"; None: a low tier waits until all above are done.
        tenant_weights: Share of a tenant in relation to other tenants; 1.0 where not given.
        background: From this priority on, the queue is full at nine tenths of its bounds; None: from none.
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
        checks.whole("max_cost", max_cost, 1, optional=True)
        if priority_aging_s is not None:
            checks.positive("priority_aging_s", priority_aging_s)
        checks.whole("background", background, -checks.PRIORITIES, checks.PRIORITIES, optional=True)
        self._clock = clock
        self.set_max_size(max_size)
        self._max_cost = math.inf if max_cost is None else max_cost
        self._open_cost = OPEN_SHARE * self._max_cost
        self._aging = priority_aging_s
        self._background = math.inf if background is None else background
        self.total: int = 0  # records that wait, outside too: an entry may stand for several
        self.total_cost: int = 0  # their cost
        self.size: int = 0  # records that count against the bounds
        self.cost: int = 0  # their cost
        self.entered: int = 0  # records that got in so far
        self._tiers: dict[int, Tier] = {}
        self.tenants: Tenants = Tenants(clock, tenant_weights or {})  # of its entries, now and of late
        self._outside: OrderedDict[EntryT, None] = OrderedDict()
        self._deadlines: Heap = Heap(_by_deadline)
        self._expired: list[EntryT] = []
        self._needs = Needs()

    @property
    def outside(self) -> int:
        """Records that wait for space."""
        return self.total - self.size

    @property
    def outside_cost(self) -> int:
        return self.total_cost - self.cost

    def __len__(self) -> int:
        return self.total

    def __iter__(self) -> Iterator[EntryT]:
        """Iterate over all that wait, in no particular order."""
        accounts = (account for tier in self._tiers.values() for account in tier.accounts.values())
        return (entry for account in accounts for entry in account.entries())

    def classes(self) -> dict[int, tuple[int, int]]:
        """Return how many records count against the bounds, and their cost, by priority."""
        return {priority: (tier.size, tier.cost) for priority, tier in self._tiers.items() if tier.size}

    def first_priority(self) -> int | None:
        """Return the most urgent tier in which records wait, for space too; None: there is none."""
        return min(self._tiers, default=None)

    def last_priority(self) -> int | None:
        """Return the least urgent tier in which records wait, for space too; None: there is none."""
        return max(self._tiers, default=None)

    def ahead(self, priority: int, tenant: str | None = None) -> tuple[int, int]:
        """Return how many records go before a new record, and their cost; tenant None: all its tier.

        Records that are passed by count too.
        """
        records = cost = 0
        for level, tier in self._tiers.items():
            total = tier.size + tier.outside
            before = total if level <= priority else 0
            if level == priority and tenant is not None:
                account = tier.accounts.get(tenant)
                own, others = (account.total, -1) if account else (0, 0)
                # Each other tenant is served once more at most than its own has records waiting.
                before = min(before, own + (len(tier.accounts) + others) * (own + 1))
            records += before
            cost += (tier.cost + tier.outside_cost) * before // total
        return records, cost

    def put(self, entry: EntryT, needs: tuple[str, ...] = ()) -> bool:
        """Put an entry in its place; return False if it waits outside. ValueError: it waits already.

        Entries of a tenant with the same needs stay in order; only `head` returns entries with needs.
        """
        if entry._next is not None:
            raise ValueError("the entry waits already")
        records, cost = entry.records, entry.cost
        tier = self._tiers.get(entry.priority)
        if tier is None:
            turn = self._next_turn(entry.priority, self._clock())
            tier = self._tiers[entry.priority] = Tier(turn, self._needs)
        account = tier.accounts.get(entry.tenant)
        if account is None:
            account = tier.join(self.tenants.join(entry.tenant))
        backlog = account.backlogs.get(needs)
        new = backlog is None
        if backlog is None:
            backlog = account.backlogs[needs] = Backlog(account, needs)
        last = backlog._previous
        entry._place, entry._previous, entry._next = account, last, backlog
        entry._order = next(_arrivals)
        last._next = backlog._previous = entry
        if new:
            tier.open(backlog)
            for need in needs:
                self._needs.wanted[need] = self._needs.wanted.get(need, 0) + 1
        account.total += records
        self.total += records
        self.total_cost += cost
        size, used = self.size + records, self.cost + cost
        entry.admitted = admitted = not account.outside and (
            (size <= self._open_size and used <= self._open_cost) or self._bound(entry) is None
        )
        if admitted:
            self.size, self.cost = size, used
            self.entered += records
            account.tenant.size += records
            account.tenant.cost += cost
            tier.size += records
            tier.cost += cost
        else:
            self._outside[entry] = None
            self._count_outside(entry, 1)
        if entry.deadline is not None:
            self._deadlines.push(entry)
        return admitted

    def wants(self, need: str) -> bool:
        """Return whether an entry waits for a need."""
        return need in self._needs.wanted

    def refuse(self, need: str) -> None:
        """Pass by the entries with a need until `reopen`, or until none waits for it: it was refused."""
        self._needs.refused.add(need)

    def reopen(self) -> None:
        """Pass no entry by any more; each has kept its place."""
        self._needs.refused.clear()
        passed, self._needs.passed = self._needs.passed, set()
        for backlog in passed:
            backlog.account.tier.open(backlog)

    def add(self, entry: EntryT) -> None:
        """Put an entry in its place as `put` does, or raise `QueueFull` if there is no space for it."""
        if not self.put(entry) and (bound := self.let_in(entry)) is not None:
            self.remove(entry)
            raise QueueFull(*bound, retry_after_s=0.0)

    def set_max_size(self, max_size: int | None) -> None:
        """Change how many records may wait; waiting records beyond a smaller number stay. None: no bound."""
        checks.whole("max_size", max_size, 1, optional=True)
        self._max_size = math.inf if max_size is None else max_size
        self._open_size = OPEN_SHARE * self._max_size

    def pass_by(self, entry: EntryT) -> None:
        """Count an entry that gets in; an entry that is taken at once, while nothing waits, needs no more."""
        entry.admitted = True
        entry._wake()
        self.entered += entry.records

    def admit(self) -> None:
        """Let entries that wait outside in, in order of arrival, as far as there is space."""
        while self._outside and self.let_in(next(iter(self._outside))) is None:
            pass

    def let_in(self, entry: EntryT) -> tuple[str, int] | None:
        """Let in an entry that waits outside, or return the name and value of the bound that forbids it."""
        bound = self._bound(entry)
        if bound is None:
            del self._outside[entry]
            self._count_outside(entry, -1)
            self.pass_by(entry)
            for count in (self, entry._place.tier, entry._place.tenant):
                count.size += entry.records
                count.cost += entry.cost
        return bound

    def _count_outside(self, entry: EntryT, sign: int) -> None:
        account: Account = entry._place
        account.outside += sign
        account.tier.outside += sign * entry.records
        account.tier.outside_cost += sign * entry.cost

    def _bound(self, entry: EntryT) -> tuple[str, int] | None:
        """Return the bound that an entry would exceed, if it were let in now."""
        share = BACKGROUND_SHARE if entry.priority >= self._background else 1.0
        tenant: Tenant = entry._place.tenant
        for name, most, used, own in (
            ("max_queue_size", self._max_size, self.size + entry.records, tenant.size + entry.records),
            ("max_queue_cost", self._max_cost, self.cost + entry.cost, tenant.cost + entry.cost),
        ):
            crowded = used > OPEN_SHARE * most and tenant.size
            full = used > share * most or (crowded and own > share * self.tenants.share(tenant) * most)
            if full and self.size:
                return name, int(most)
        return None

    def head(self, *, since: int | None = None, before: int | None = None) -> EntryT | None:
        """Return the entry whose turn it is, without taking it; None: none waits that isn't passed by.

        Args:
            since, before: The tiers to look at: from this priority on, and up to this one; None: no bound.
        """
        if self._deadlines:
            self._sweep()
        tiers: Collection[Tier] = self._tiers.values()
        if since is not None:
            tiers = [tier for tier in tiers if tier.turn[1] >= since]
        if before is not None:
            tiers = [tier for tier in tiers if tier.turn[1] < before]
        while tiers:
            tier = min(tiers, key=_by_turn)
            entry: EntryT | None = tier.first()
            if entry is not None:
                return entry
            tiers = [other for other in tiers if other is not tier]
        return None

    def pick(self, entry: EntryT) -> None:
        """Take one waiting entry, whatever its place, and charge its tenant; ValueError: it isn't waiting."""
        if entry._next is None:
            raise ValueError("the entry is not waiting: it was taken or removed, or has expired")
        self._drop(entry, self._next_turn(entry.priority, self._clock()))

    def take(
        self, budget: float | None = None, max_records: int | None = None, *, padded: bool = False
    ) -> list[EntryT]:
        """Take the next entries in order while they fit within the bounds, and at least one entry.

        If they are `padded`, their total cost is the largest cost times their number, not the sum.
        """
        self._sweep()
        now = self._clock()
        batch: list[EntryT] = []
        total = longest = records = 0
        most_cost: float = math.inf if budget is None else budget
        most: float = math.inf if max_records is None else max_records
        tier, stays = None, False
        while self._tiers and records < most:
            if tier is None or not (stays and tier.accounts):
                # The turns of the others don't change meanwhile, nor its own if it was served by now already.
                tier = min(self._tiers.values(), key=_by_turn)
                served = self._next_turn(tier.turn[1], now)
                stays = tier.turn == served
            entry: EntryT = tier.first()
            records += entry.records
            longest = max(longest, entry.cost) if padded else 0
            total = longest * records if padded else total + entry.cost
            if (total > most_cost or records > most) and batch:
                break
            self._drop(entry, served)
            batch.append(entry)
        return batch

    def peek(self, count: int) -> list[EntryT]:
        """Return the next `count` entries in the order in which `take` would return them."""
        self._sweep()
        turns = heapq.merge(*(self._turns(tier, count) for tier in self._tiers.values()))
        return [entry for _, entry in itertools.islice(turns, count)]

    def _turns(self, tier: Tier, count: int) -> Iterator[tuple[tuple[float, int], EntryT]]:
        """Yield the next `count` entries of a tier, or more, in their order, each after the tier's turn."""
        turn = tier.turn
        first = heapq.nsmallest(count, tier.accounts.values(), key=lambda each: (each.key, each._item[1]))
        for *_, entry in heapq.merge(*(account.turns() for account in first)):
            yield turn, entry
            turn = self._next_turn(turn[1], self._clock())

    def settle(self, entry: EntryT, charged: int, used: int) -> None:
        """Charge the tenant of a taken entry for the cost that it used, instead of the cost until now."""
        # One that was forgotten starts at the level of the others: there is nothing to put right.
        account: Account = entry._place
        account.key += (used - charged) * account.tenant.charge
        if account._item is not None and account.key < account._item[0]:
            account.tier.turns.push(account)

    def _next_turn(self, priority: int, now: float) -> tuple[float, int]:
        """Return a tier's next turn if served now; all age alike, so comparing their turns needs no clock."""
        return (0.0 if self._aging is None else now + priority * self._aging), priority

    def remove(self, entry: EntryT) -> bool:
        """Take an entry out unserved: it was cancelled. Return whether it was still waiting."""
        if waits := entry.waiting:
            self._drop(entry, None)
        return waits

    def clear(self) -> list[EntryT]:
        """Take everything out unserved."""
        return [entry for entry in list(self) if self.remove(entry)]

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
        entry: EntryT | None = self._deadlines.top()
        return None if entry is None else entry.deadline

    def _sweep(self) -> None:
        """Take out the entries whose deadline has passed."""
        while (entry := self._deadlines.top()) is not None and entry.deadline <= self._clock():
            self.remove(entry)
            self._expired.append(entry)

    def _drop(self, entry: EntryT, turn: tuple[float, int] | None) -> None:
        """Take an entry out; a served entry is charged to its tenant, and its tier has its next turn."""
        account: Account = entry._place
        tier, tenant, records, cost = account.tier, account.tenant, entry.records, entry.cost
        if turn is not None:
            if account.key > tier.level:
                tier.level = account.key
            account.key += (cost or 1) * tenant.charge
            tier.turn = turn
        if entry.admitted:
            tenant.size -= records
            tenant.cost -= cost
            tier.size -= records
            tier.cost -= cost
            self.size -= records
            self.cost -= cost
        else:
            del self._outside[entry]
            self._count_outside(entry, -1)
            if turn is not None:
                self.pass_by(entry)
        before, after = entry._previous, entry._next
        before._next, after._previous = after, before
        entry._previous = entry._next = entry._item = None
        if before is after:
            self._forget(before)
        account.total -= records
        self.total -= records
        self.total_cost -= cost
        if not account.total:
            tier.retire(account)
            self.tenants.leave(tenant)
            if not tier.accounts:
                del self._tiers[entry.priority]

    def _forget(self, backlog: Backlog) -> None:
        """Note that a backlog has no entries left."""
        needs = self._needs
        del backlog.account.backlogs[backlog.needs]
        backlog._item = backlog._next = backlog._previous = None
        needs.passed.discard(backlog)
        for need in backlog.needs:
            needs.wanted[need] -= 1
            if not needs.wanted[need]:
                del needs.wanted[need]
                # The next entry asks for it anew.
                needs.refused.discard(need)
