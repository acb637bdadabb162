"""A model of the service in virtual time: router, batcher, vLLM's scheduler, a device.

Live requests come at random times or from clients; rows of a batch fill what is left of the engines. The
scheduler is that of `serve_app.engine.vllm.scheduler`: live requests go first, and prompts of rows make a
step no longer than its bound. A step takes the time of a `Profile`.
"""

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from operator import attrgetter
from typing import Literal

from serve_app.engine.vllm.scheduler import LATE_STEPS, LIVE_S, SPREAD, STEPS_TO_FIRST, TRICKLE
from serve_app.ingress.replica_choice import AHEAD, SLACK_TOKENS
from serve_app.simulation.profiles import Profile, Work
from serve_app.tuning.workload import Arrival, Draw, Workload

IDLE = math.inf
"""End of the step of a replica without work."""

STEPS = 2
"""Steps between the end of a request and the first step of a request that enters the window then."""

EARLY_S = 0.005
"""Time before the end of a step at which the scheduler decides the next one, where live requests go first."""

Routing = Literal["prefix", "least_loaded"]

MARGINS: dict[Routing, float] = {"prefix": AHEAD * SLACK_TOKENS, "least_loaded": 0.0}
"""Tokens by which the first of the two replicas that a request draws may be ahead of the second, and is taken
nevertheless. With `prefix`, requests that share nothing draw both by the hash of their prompt."""


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """Settings of a replica, by their names in a config.

    Attributes:
        max_running: `batcher.max_running`; None: not set.
        max_num_batched_tokens: `engine.max_num_batched_tokens`.
        max_num_seqs: `engine.max_num_seqs`.
        overcommit: Whether `batcher.policy` is `max_utilization`: rows reserve what answers have been.
        live_first: Whether `engine.scheduling_policy` is `priority`, the default; else it is `fcfs`.
    """

    max_running: int | None
    max_num_batched_tokens: int
    max_num_seqs: int
    overcommit: bool = False
    live_first: bool = True

    @classmethod
    def of(cls, profile: Profile, *, live_first: bool = True) -> "ReplicaSettings":
        """Return the settings of a config without any of them."""
        return cls(None, profile.max_num_batched_tokens, profile.max_num_seqs, live_first=live_first)

    @property
    def sequences(self) -> int:
        """Requests that may run at once."""
        return min(self.max_num_seqs, self.max_running or self.max_num_seqs)


class Request:
    """A request or a row; times are seconds of virtual time.

    Attributes:
        number: Place in the order in which requests are sent; -1: a row.
        sent_at: When the client sends it.
        prompt: Tokens of the prompt.
        computed: Tokens of the prompt that aren't in the prefix cache.
        output: Tokens of the answer.
        reserved: Tokens of KV cache that the batcher reserves.
        route: Random number from 0 to 1 for the choice of a replica.
        first_at: When the client has the first token; 0 before.
        ended_at: When the client has the last token; 0 before.
    """

    __slots__ = (
        *("_began", "_left", "_visible", "computed", "ended_at", "first_at", "number", "output"),
        *("prompt", "reserved", "route", "sent_at"),
    )

    def __init__(
        self,
        number: int,
        sent_at: float,
        prompt: int,
        computed: int,
        output: int,
        reserved: int,
        route: float,
    ) -> None:
        self.number = number
        self.sent_at = sent_at
        self.prompt = prompt
        self.computed = computed
        self.output = output
        self.reserved = reserved
        self.route = route
        self.first_at = self.ended_at = 0.0
        self._left = computed  # tokens of the prompt that no step has computed
        self._visible = 0  # first step that may compute them
        self._began = 0  # step of the first token

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token."""
        return self.first_at - self.sent_at

    @property
    def tpot_s(self) -> float:
        """Seconds per token after the first."""
        return (self.ended_at - self.first_at) / max(self.output - 1, 1)

    @property
    def latency_s(self) -> float:
        """Seconds to the whole answer."""
        return self.ended_at - self.sent_at


class _Lane:
    """Prompts in the engine: those of live requests, or those of rows."""

    __slots__ = ("partial", "waiting")

    def __init__(self) -> None:
        self.waiting: deque[Request] = deque()
        self.partial: Request | None = None  # the prompt of which steps have computed a part


class Replica:
    """An engine and its batcher.

    A request enters the batcher's window when its reservation fits, in order of arrival. vLLM starts requests
    in the same order. A step computes one token of each request that has begun, and as many tokens of prompts
    as fit into `max_num_batched_tokens`. A request has part in the next step if it comes before that step is
    decided: with live requests first, shortly before the running step ends; with asynchronous scheduling
    alone, before the running step begins.

    Rows fill the window as far as their reservations fit. Their prompts come after those of live requests and
    within the bound of a step. A live request that needs a place or KV cache displaces the youngest row.

    Attributes:
        ends_at: When the running step ends; `IDLE` if none runs.
        load: Tokens that the router counts for the replica.
        busy_s: Seconds in which steps ran.
        held_s: Integral of the reserved tokens over time, in token seconds.
        most_held: The most tokens that were reserved at once.
        most_running: The most requests in a step.
        row_tokens: Tokens of rows' answers so far.

    Args:
        profile: The device.
        settings: The settings.
        workload: The requests.
        rows: The rows of a batch, without end; None: there is no batch.
    """

    def __init__(
        self,
        profile: Profile,
        settings: ReplicaSettings,
        workload: Workload,
        rows: Iterator[Request] | None = None,
    ) -> None:
        self._line = profile.step
        self._early_s = EARLY_S if settings.live_first else math.inf
        self._lag = profile.async_scheduling
        if not self._lag:
            self._early_s = 0.0
        self._capacity = profile.kv_tokens
        self._budget = settings.max_num_batched_tokens
        self._places = places = settings.max_num_seqs
        ending = min(places, math.ceil(STEPS * places / workload.output.expected))
        self._most = min(settings.max_running or places + ending, places + ending)
        self.ends_at = IDLE
        self.load = self.most_held = self.most_running = self.row_tokens = 0
        self.busy_s = self.held_s = 0.0
        # The batcher: its queue, and what is in the window.
        self._queue: deque[Request] = deque()
        self._records = self._held = self._row_records = self._row_held = 0
        self._held_since = 0.0
        # The engine: prompts, places that are taken, and places of requests that ended in the last step.
        self._live, self._rows = _Lane(), _Lane()
        self._lanes = (self._live,) if rows is None else (self._live, self._rows)
        self._seats = self._freed = 0
        # The running step.
        self._step = 0
        self._decoding = self._decoding_rows = self._context = 0
        self._firsts: list[Request] = []
        # Requests by their last step, and these steps as a heap.
        self._ends: dict[int, list[Request]] = {}
        self._end_steps: list[int] = []
        # Rows.
        self._backlog = rows
        self._again: deque[Request] = deque()  # rows that were displaced
        self._next: Request | None = None  # the row that doesn't fit yet
        self._running_rows: list[Request] = []  # rows that decode, in the order of their begin
        self._usual = 0.0  # mean prompt tokens of rows in a step
        self._live_until = -math.inf
        self._bound_s = min(workload.goals.tpot_s, workload.goals.ttft_s / STEPS_TO_FIRST)

    def start(self) -> None:
        """Let rows in, at the time 0."""
        self._fill(0.0)

    def arrive(self, request: Request, now: float) -> None:
        """Take a request; it starts, or waits in the batcher's queue. `now` is within the running step."""
        self._live_until = now + LIVE_S
        if not self._queue and self._fits(request):
            self._enter(request, now)
        else:
            self._queue.append(request)

    def advance(self, until: float) -> list[Request]:
        """Run steps that end by `until`; return the live requests that ended in the last of these steps.

        Steps that only decode take no look at the requests. The method returns after the first step in which
        a live request ends, whether or not more steps fit.
        """
        while self.ends_at <= until and self.ends_at < IDLE:
            ended = self._end_step()
            if ended:
                return ended
            if not self._firsts and not self._prompts():
                self._decode(until)
        return []

    def _prompts(self) -> bool:
        return any(lane.waiting or lane.partial for lane in self._lanes)

    def _decode(self, until: float) -> None:
        """Run steps that only decode, to the step in which a request ends."""
        if self.ends_at == IDLE or not self._end_steps:
            return
        began = now = self.ends_at
        context, decoding, last = self._context, self._decoding, self._end_steps[0]
        per_step = self._line.seconds(Work(0, decoding, 0))
        step = self._step
        while step < last and now <= until:
            context += decoding
            step += 1
            now += per_step + self._line.context_token * context
        self.row_tokens += self._decoding_rows * (step - self._step)
        self.busy_s += now - began
        if step > self._step:
            self._seats -= self._freed
            self._freed = 0
        self._context, self._step, self.ends_at = context, step, now

    # The batcher

    def _fits(self, request: Request) -> bool:
        """Return whether a live request fits; rows give way, but for those that end their prompt now."""
        live, held = self._records - self._row_records, self._held - self._row_held
        stay = sum(each.reserved for each in self._firsts if each.number < 0)
        if stay and held + stay + request.reserved > self._capacity:
            return False
        return not live or (held + request.reserved <= self._capacity and live < self._most)

    def _enter(self, request: Request, now: float) -> None:
        while self._held + request.reserved > self._capacity and self._displace(now):
            pass
        self._records += 1
        self._hold(request.reserved, now)
        self._submit(request, now, self._live)

    def _hold(self, tokens: int, now: float) -> None:
        self.held_s += self._held * (now - self._held_since)
        self._held_since = now
        self._held += tokens
        self.most_held = max(self.most_held, self._held)

    def _fill(self, now: float) -> None:
        """Let rows in, as far as they fit."""
        while self._backlog is not None and self._records < self._most:
            row = self._next or (self._again.popleft() if self._again else next(self._backlog))
            self._next = None
            if self._records and self._held + row.reserved > self._capacity:
                self._next = row
                break
            self._records += 1
            self._row_records += 1
            self._row_held += row.reserved
            self._hold(row.reserved, now)
            self._submit(row, now, self._rows)

    def _leave(self, request: Request, now: float) -> None:
        self._records -= 1
        if request.number < 0:
            self._row_records -= 1
            self._row_held -= request.reserved
        self._hold(-request.reserved, now)

    def _displace(self, now: float, *, place: bool = False) -> bool:
        """Stop the youngest row; the batcher starts it again, with its tokens in the prompt.

        Args:
            now: The time.
            place: Whether the row has to have a place in the engine.

        Returns:
            False: No row can be stopped.
        """
        rows = self._rows
        if (rows.waiting and not place) or rows.partial:
            row = rows.partial if place or not rows.waiting else rows.waiting.pop()
            assert row is not None
            if row is rows.partial:
                rows.partial, row._left = None, row.computed
                self._seats -= 1
            self._leave(row, now)
            self._again.append(row)
            return True
        if not self._running_rows:
            return False
        row = self._running_rows.pop()
        made = self._step - 1 - row._began
        last = row._began + row.output - 1
        self._ends[last].remove(row)
        self._decoding -= 1
        self._decoding_rows -= 1
        self._context -= row.prompt + 1 + made
        self._seats -= 1
        self._leave(row, now)
        prompt = row.prompt + 1 + made
        self._again.append(Request(-1, 0.0, prompt, prompt, row.output - 1 - made, row.reserved, 0.0))
        return True

    # The engine

    def _submit(self, request: Request, now: float, lane: _Lane) -> None:
        """Give a request to the engine."""
        lane.waiting.append(request)
        if self.ends_at == IDLE:
            self._begin(now)
        else:
            early = self._early_s if now < self._live_until else math.inf
            in_time = not self._lag or now <= self.ends_at - early
            request._visible = self._step + (1 if in_time else 2)

    def _end_step(self) -> list[Request]:
        """End the running step and begin the next; return the live requests whose answers are complete."""
        now = self.ends_at
        self._context += self._decoding
        self.row_tokens += self._decoding_rows
        ended = self._ends.pop(self._step, [])
        if self._end_steps and self._end_steps[0] == self._step:
            heapq.heappop(self._end_steps)
        for request in ended:
            request.ended_at = now
            if request.output > 1:
                self._decoding -= 1
                self._context -= request.prompt + request.output
                if request.number < 0:
                    self._decoding_rows -= 1
                    self._running_rows.remove(request)
        # With asynchronous scheduling the next step is decided before the ends are known.
        self._seats -= self._freed if self._lag else len(ended)
        self._freed = len(ended) if self._lag else 0
        for request in self._firsts:
            request.first_at = now
            row = request.number < 0
            self.row_tokens += row
            if request.output > 1:
                self._decoding += 1
                self._context += request.prompt + 1
                if row:
                    self._decoding_rows += 1
                    self._running_rows.append(request)
        self._begin(now)
        for request in ended:
            self._leave(request, now)
        # The engine has begun its next step when the batcher hears of the ends.
        if ended or self._queue:
            while self._queue and self._fits(self._queue[0]):
                self._enter(self._queue.popleft(), now)
            self._fill(now)
        return [request for request in ended if request.number >= 0]

    def _begin(self, now: float) -> None:
        """Begin the next step, or become idle."""
        self._step += 1
        prompts, sequences, read = self._compose(now)
        if not self._decoding and not sequences:
            # The engine is empty: what waits needn't wait for a step to end.
            self._seats = self._freed = 0
            for lane in self._lanes:
                for request in lane.waiting:
                    request._visible = 0
            prompts, sequences, read = self._compose(now)
            if not sequences:
                self._step -= 1
                self.ends_at = IDLE
                return
        running = self._decoding + sequences
        self.most_running = max(self.most_running, running)
        took = self._line.seconds(Work(prompts, running, self._context + read))
        self.busy_s += took
        self.ends_at = now + took

    def _compose(self, now: float) -> tuple[int, int, int]:
        """Add prompts to the step; return their tokens, their number and the context that they read."""
        step, self._firsts = self._step, []
        budget = self._budget - self._decoding
        prompts = sequences = read = row_prompts = 0
        for lane in self._lanes:
            rows = lane is self._rows
            if rows:
                budget = min(budget, self._row_space(prompts, now))
            while budget > 0:
                request = lane.partial
                if request is None:
                    if not lane.waiting or lane.waiting[0]._visible > step:
                        break
                    if self._seats >= self._places:
                        if rows or not self._displace(now, place=True):
                            break
                        budget = self._budget - self._decoding - prompts
                    request = lane.waiting.popleft()
                    self._seats += 1
                chunk = min(request._left, budget)
                budget -= chunk
                prompts += chunk
                row_prompts += chunk if rows else 0
                sequences += 1
                request._left -= chunk
                read += request.prompt - request._left
                lane.partial = request if request._left else None
                if request._left:
                    break
                self._firsts.append(request)
                request._began = step
                last = step + request.output - 1
                if last in self._ends:
                    self._ends[last].append(request)
                else:
                    self._ends[last] = [request]
                    heapq.heappush(self._end_steps, last)
        self._usual += (row_prompts - self._usual) / LATE_STEPS
        return prompts, sequences, read

    def _row_space(self, live_prompts: int, now: float) -> int:
        """Return the prompt tokens of rows that the step may have, as `LiveFirst` bounds them."""
        per_prompt = self._line.prompt_token
        if now >= self._live_until or not per_prompt:
            return self._budget
        decodes_s = self._line.seconds(Work(0, self._decoding, self._context))
        usual_s = decodes_s + max(decodes_s, SPREAD * self._usual * per_prompt)
        space = (min(usual_s, self._bound_s) - decodes_s) / per_prompt - live_prompts
        return max(TRICKLE, int(space))


@dataclass(frozen=True, slots=True)
class Run:
    """The result of a run.

    Attributes:
        requests: The requests that count, complete, in the order in which they were sent.
        sent: Requests that were sent, with those that don't count.
        ended: Requests that are complete.
        in_flight: Requests that still ran when the last request that counts had ended.
        seconds: Virtual time between the first and the last request that counts, as they were sent.
        busy: Share of the time in which steps ran, mean of the replicas.
        held: Share of the KV cache that was reserved, mean of the replicas and of the time.
        most_held: The most tokens that a replica has reserved.
        most_running: The most requests in a step of a replica.
        row_tokens_per_s: Tokens of rows' answers per second of all replicas, since the first request that
            counts.
    """

    requests: Sequence[Request]
    sent: int
    ended: int
    in_flight: int
    seconds: float
    busy: float
    held: float
    most_held: int
    most_running: int
    row_tokens_per_s: float


class Fleet:
    """Replicas with the same settings, and the router in front of them.

    A request reaches its replica `request_ms` after it was sent. `serial_ms` of that time are taken one
    request after the other, give or take a half: requests of a burst come one by one.

    Args:
        profile: The device of each replica.
        settings: Settings of each replica.
        replicas: Number of replicas.
        workload: The requests.
        routing: The model's `routing`.
        seed: Seed of the random numbers of the way to the replicas, and of the rows.
    """

    def __init__(
        self,
        profile: Profile,
        settings: ReplicaSettings,
        replicas: int,
        workload: Workload,
        routing: Routing = "prefix",
        seed: int = 0,
    ) -> None:
        self._serial_s = profile.serial_ms / 1e3
        self._way_s = max(0.0, profile.request_ms - profile.serial_ms) / 1e3
        self._kv_tokens = profile.kv_tokens
        self._margin = MARGINS[routing]
        self._numbers = random.Random(seed)
        self._free_at = 0.0
        self.replicas = [
            Replica(profile, settings, workload, _rows(workload, settings, f"{seed} {number}"))
            for number in range(replicas)
        ]
        self._place: dict[Request, Replica] = {}

    def run(
        self,
        requests: Iterable[Request],
        counts: range,
        follow: Callable[[Request, float], Iterable[Request]] | None = None,
    ) -> Run:
        """Run requests until all that count are complete.

        Args:
            requests: The requests, in the order in which they are sent.
            counts: The numbers of the requests that count.
            follow: Returns the requests that are sent because a request has ended, at that time.
        """
        replicas = self.replicas
        source = iter(requests)
        coming = deque(self._on_the_way(each) for each in (source if follow else islice(source, 1)))
        left, sent, ended, now, rows_since = len(counts), 0, 0, 0.0, (0.0, 0)
        found: list[Request] = []
        for replica in replicas:
            replica.start()
        while left:
            at = coming[0][0] if coming else IDLE
            replica = min(replicas, key=attrgetter("ends_at"))
            if at < replica.ends_at or at == IDLE == replica.ends_at:
                if at == IDLE:
                    raise AssertionError("requests that count were never sent")
                now, request = coming.popleft()
                if request.number == counts.start:
                    rows_since = now, sum(each.row_tokens for each in replicas)
                sent += 1
                self._route(request).arrive(request, now)
                if follow is None:
                    coming.extend(self._on_the_way(each) for each in islice(source, 1))
                continue
            until = at
            if len(replicas) > 1 and follow is not None:
                # What ends on one replica leads to requests for the others.
                until = min(at, *(each.ends_at for each in replicas if each is not replica))
            for request in replica.advance(until):
                now = request.ended_at
                ended += 1
                self._place.pop(request).load -= request.reserved
                if request.number in counts:
                    left -= 1
                    found.append(request)
                if follow is not None:
                    coming.extend(self._on_the_way(each) for each in follow(request, now))
        found.sort(key=attrgetter("number"))
        now = max(each.ended_at for each in found)
        rows = sum(each.row_tokens for each in replicas) - rows_since[1]
        return Run(
            requests=found,
            sent=sent,
            ended=ended,
            in_flight=len(self._place),
            seconds=found[-1].sent_at - found[0].sent_at,
            busy=min(1.0, sum(each.busy_s for each in replicas) / (now * len(replicas))),
            held=sum(each.held_s for each in replicas) / (now * len(replicas)) / self._kv_tokens,
            most_held=max(each.most_held for each in replicas),
            most_running=max(each.most_running for each in replicas),
            row_tokens_per_s=rows / max(now - rows_since[0], 1e-9),
        )

    def _on_the_way(self, request: Request) -> tuple[float, Request]:
        """Return when a request reaches its replica."""
        at = request.sent_at
        if self._serial_s:
            at = self._free_at = max(self._free_at, at) + self._serial_s * self._numbers.uniform(0.5, 1.5)
        return at + self._way_s, request

    def _route(self, request: Request) -> Replica:
        """Choose the replica of a request, and count the request there."""
        replicas = self.replicas
        chosen = replicas[0]
        if (count := len(replicas)) > 1:
            place = request.route * count
            number = int(place)
            first = replicas[number]
            other = int((place - number) * (count - 1))
            second = replicas[other if other < number else other + 1]
            chosen = first if first.load <= second.load + self._margin else second
        chosen.load += request.reserved
        self._place[request] = chosen
        return chosen


def open_loop(fleet: Fleet, workload: Workload, seed: int, *, rate: float, warm_up: int, counted: int) -> Run:
    """Run requests that come at random, independently of the answers.

    Args:
        fleet: The replicas.
        workload: The requests.
        seed: Seed of the random numbers; the same numbers are drawn for every fleet and every rate.
        rate: Requests per second, in place of those of the workload.
        warm_up: Requests before those that count.
        counted: Requests that count. Others follow until they are complete.
    """

    def requests() -> Iterator[Request]:
        at = 0.0
        for number, draw in enumerate(workload.draws(seed)):
            at += draw.gap / rate
            yield _request(workload, number, at, draw)

    return fleet.run(requests(), range(warm_up, warm_up + counted))


def replay(
    fleet: Fleet, workload: Workload, arrivals: Iterable[Arrival], *, seconds: float, seed: int = 0
) -> Run:
    """Run given requests, such as those that a service got, in place of random ones.

    Args:
        fleet: The replicas.
        workload: The requests, for the share of a prompt that is in the prefix cache.
        arrivals: The requests, in the order in which they are sent; each reserves what its answer takes.
        seconds: Requests that are sent before this time count; the others follow until these are complete.
        seed: Seed of the random numbers for the choice of a replica.

    Raises:
        ValueError: No request counts.
    """
    source = iter(arrivals)
    first: list[Arrival] = []
    for arrival in source:
        first.append(arrival)
        if arrival.at_s >= seconds:
            break
    counted = sum(each.at_s < seconds for each in first)
    if not counted:
        raise ValueError(f"no request is sent in the first {seconds:g} s; raise the rate or the seconds")
    numbers = random.Random(seed)
    requests = (
        Request(number, at, prompt, workload.computed(prompt), output, prompt + output, numbers.random())
        for number, (at, prompt, output) in enumerate(chain(first, source))
    )
    return fleet.run(requests, range(counted))


def closed_loop(
    fleet: Fleet,
    workload: Workload,
    seed: int,
    *,
    streams: int,
    requests: int,
    chunk: int = 1,
    warm_up: int = 0,
) -> Run:
    """Run clients that send the next call when the call before is answered.

    Args:
        fleet: The replicas.
        workload: The requests; their rate doesn't matter.
        seed: Seed of the random numbers.
        streams: Clients.
        requests: Requests of all clients, with those of the warm-up.
        chunk: Requests in a call, which is answered when all of them are.
        warm_up: Number of the first requests, which don't count.
    """
    draws = enumerate(islice(workload.draws(seed), requests))
    calls: dict[Request, list[int]] = {}

    def call(at: float) -> list[Request]:
        made = [_request(workload, number, at, draw) for number, draw in islice(draws, chunk)]
        left = [len(made)]
        calls.update((request, left) for request in made)
        return made

    def follow(request: Request, now: float) -> list[Request]:
        left = calls.pop(request)
        left[0] -= 1
        return [] if left[0] else call(now)

    first = [request for _ in range(streams) for request in call(0.0)]
    return fleet.run(first, range(warm_up, requests), follow)


def _rows(workload: Workload, settings: ReplicaSettings, seed: str) -> Iterator[Request] | None:
    """Return the rows of a batch, without end; None: there is no batch."""
    batch = workload.batch
    if batch is None:
        return None
    numbers = random.Random(seed)
    answer = math.ceil(batch.output.expected) if settings.overcommit else batch.output.most

    def draw() -> Iterator[Request]:
        while True:
            prompt, output = batch.input.draw(numbers), batch.output.draw(numbers)
            yield Request(-1, 0.0, prompt, prompt, output, prompt + answer, 0.0)

    return draw()


def _request(workload: Workload, number: int, at: float, draw: Draw) -> Request:
    reserved = draw.prompt + workload.max_tokens
    return Request(number, at, draw.prompt, workload.computed(draw.prompt), draw.output, reserved, draw.route)
