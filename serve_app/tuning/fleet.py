"""The service on a virtual clock: vLLM's engines, their batchers and the choice of a replica.

The product runs, without its processes: vLLM's engine core with the service's scheduler, the batcher of each
engine, and the rule by which an Ingress chooses the replica of a request. Simulated are:

- the device: a step takes the time that its profile says;
- the way of a request to its replica: `request_ms`, of which `serial_ms` one request after the other;
- prompts: all have a part of one text, which the prefix cache finds; the rest of each is like no other;
- the clients: requests at random times, or one after the other;
- a batch: each replica always has rows that wait.

HTTP, the tokenizer and the CPU time of all processes are left out. The clocks of replicas differ by a step at
most, so the choice of a replica may see the end of a request a step late.
"""

import asyncio
import logging
import math
import multiprocessing
import os
import random
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, islice
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from operator import attrgetter
from typing import Any, Literal

from batcher import Slot
from serve_app.api.scheduling import FLEX
from serve_app.ingress.replica_choice import ReplicaCharge, ReplicaChoice, ReplicaState
from serve_app.settings.models import LLMSettings
from serve_app.simulation.profiles import BLOCK, Profile
from serve_app.system.limits import available_cores
from serve_app.system.parent_death import end_with
from serve_app.tuning.workload import BatchWork, Workload

Routing = Literal["prefix", "least_loaded"]

SAME, TOKENS = 33, range(34, 127)
"""Token of the text that prompts share, and tokens of the numbers that tell prompts apart."""

ROWS_WAITING = 32
"""Rows of a batch that wait at each replica, always."""

SAMPLED = 16
"""Steps between two looks at the tokens that are reserved."""

QUEUE = 1_000_000
"""Requests that may wait at a replica: without bound, so that a plan sees how long they wait."""


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """Settings of a replica, by their names in a config.

    Attributes:
        max_num_batched_tokens: `engine.max_num_batched_tokens`.
        max_num_seqs: `engine.max_num_seqs`.
        overcommit: Whether `batcher.policy` is `max_utilization`: rows reserve the usual length of answers.
        live_first: Whether `engine.scheduling_policy` is `priority`, the default; else it is `fcfs`.
    """

    max_num_batched_tokens: int
    max_num_seqs: int
    overcommit: bool = False
    live_first: bool = True

    @classmethod
    def of(cls, profile: Profile, *, live_first: bool = True) -> "ReplicaSettings":
        """Return the settings of a replica whose config states none of them."""
        return cls(profile.max_num_batched_tokens, profile.max_num_seqs, live_first=live_first)

    def config(self, profile: Profile, workload: Workload) -> LLMSettings:
        """Return the settings of a model whose engine has this device."""
        goals = {"ttft_p99_s": workload.goals.ttft_s, "tpot_p99_s": workload.goals.tpot_s}
        known = {name: each for name, each in goals.items() if each < math.inf}
        engine = {
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "max_num_seqs": self.max_num_seqs,
            # Without a text that prompts share, the cache finds nothing, and takes CPU time for each token.
            "enable_prefix_caching": bool(workload.prefix_share or workload.batch),
            **({} if self.live_first else {"scheduling_policy": "fcfs"}),
        }
        batcher = {
            "max_queue_size": QUEUE,
            "policy": "max_utilization" if self.overcommit else "guaranteed_no_evict",
            **({"goals": known} if known else {}),
        }
        device = profile.model_dump() | {"load_s": 0.0}
        return LLMSettings.model_validate(
            {"id": "demo", "simulate": device, "engine": engine, "batcher": batcher}
        )


@dataclass(slots=True, eq=False)
class Request:
    """A request or a row; times are seconds of virtual time.

    Attributes:
        number: Place in the order in which requests are sent; -1: a row.
        sent_at: When the client sends it.
        prompt: Tokens of the prompt.
        output: Tokens of the answer.
        reserved: Most tokens of the answer, which the batcher reserves.
        route: Random number from 0 to 1 for the choice of a replica.
        shared: Tokens of the prompt that are the same in all prompts.
        first_at: When the client has the first token; 0 before.
        ended_at: When the client has the last token; 0 before.
        made: Tokens of the answer so far.
        slot: Its place in the batcher.
        charge: Its load for the choice of replicas; None: it is on no replica.
    """

    number: int
    sent_at: float
    prompt: int
    output: int
    reserved: int
    route: float = 0.0
    shared: int = 0
    first_at: float = 0.0
    ended_at: float = 0.0
    made: int = 0
    slot: Slot | None = None
    charge: ReplicaCharge | None = None

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


@dataclass(frozen=True, slots=True)
class Run:
    """The result of a run.

    Attributes:
        requests: The requests that count and are complete, in the order in which they were sent.
        seconds: Virtual time from the start to the end of the last of these requests.
        busy: Share of the time in which engines had work, mean of the replicas.
        held: Share of the KV cache that was reserved, mean of the replicas and of the time.
        most_running: The most requests in an engine.
        row_tokens_per_s: Tokens of rows' answers per second of all replicas, since the first request that
            counts.
    """

    requests: Sequence[Request]
    seconds: float
    busy: float
    held: float
    most_running: int
    row_tokens_per_s: float


class _Replica:
    """An engine and its batcher, on a clock of their own.

    Args:
        config: The settings.
        rows: The rows of a batch, without end; None: there is no batch.
        names: Names of requests in the engine.
    """

    def __init__(self, config: LLMSettings, rows: Iterator[Request] | None, names: Iterator[int]) -> None:
        # The import of vLLM takes ten seconds, and plans that arithmetic refuses don't need it.
        from serve_app.engine.vllm.virtual import VirtualClock, VirtualEngine

        self.engine = VirtualEngine(VirtualClock(), config)
        self.batcher = self.engine.batcher()
        self.coming: deque[tuple[float, Request]] = deque()
        self.idle_s = self.held_s = 0.0
        self.row_tokens = self.most_running = 0
        self.started = 0  # slots that the batcher has started
        self._overcommits = config.batcher.policy == "max_utilization"
        self._rows = rows
        self._rows_waiting = 0
        self._names = names
        # Requests that the batcher has started, and since when.
        self._inputs: deque[tuple[float, Request]] = deque()
        self._running: dict[str, Request] = {}
        self._steps, self._held_at = 0, 0.0

    @property
    def now(self) -> float:
        """Its time, in seconds."""
        return self.engine.time.now

    def due(self) -> float:
        """Return the time of its next step; infinite: it has nothing to do."""
        if self._running or self._inputs:
            return self.now
        return max(self.now, self.coming[0][0]) if self.coming else math.inf

    def hold(self) -> None:
        """Wait as the scheduler does before a step, so that a request may come meanwhile."""
        _ = self.engine.busy

    def fill(self) -> None:
        """Let rows wait in the batcher."""
        while self._rows is not None and self._rows_waiting < ROWS_WAITING:
            self._rows_waiting += 1
            self._enter(next(self._rows), FLEX)

    def take(self) -> None:
        """Enter requests that have come into the batcher, and give started requests to the engine."""
        now, works = self.now, bool(self._running)
        while self.coming and self.coming[0][0] <= now:
            self._enter(self.coming.popleft()[1], 0)
        # When the batcher hears of an end and starts a request, the engine has decided on its next step.
        while self._inputs and (self._inputs[0][0] < now or not works):
            self._submit(self._inputs.popleft()[1])

    def step(self) -> list[Request]:
        """Make a step; return the requests that have ended, without rows."""
        engine = self.engine
        self.most_running = max(self.most_running, len(self._running))
        self._steps += 1
        if self._steps % SAMPLED == 0:
            self.held_s += self.batcher.stats.running_cost * (self.now - self._held_at)
            self._held_at = self.now
        ended, preempted = [], 0
        for output in engine.step():
            request = self._running[output.request_id]
            if not request.first_at:
                request.first_at = self.now
            request.made += len(output.new_token_ids)
            if request.number < 0:
                self.row_tokens += len(output.new_token_ids)
                if self._overcommits:
                    assert request.slot is not None
                    request.slot.report(request.made)
                    preempted += sum(each.type.name == "PREEMPTED" for each in output.events or ())
            if output.finish_reason is not None:
                del self._running[output.request_id]
                request.ended_at = self.now
                ended.append(request)
        if preempted and engine.is_full:
            self.batcher.overcommitted(preempted)
        for request in ended:
            assert request.slot is not None
            request.slot.report(request.made)
            request.slot.release()
            request.slot = None
        return [request for request in ended if request.number >= 0]

    def wait(self, until: float) -> None:
        """Let time pass without work."""
        if until > self.now:
            self.idle_s += until - self.now
            self.engine.time.now = until

    def held(self) -> float:
        """Return the mean share of the KV cache that was reserved."""
        return self.held_s / self._held_at / self.batcher.capacity if self._held_at else 0.0

    def _enter(self, request: Request, priority: int) -> None:
        """Enter a request into the batcher; it starts at once, or later."""
        slot = self.batcher.slot_nowait(
            prompt_tokens=request.prompt, max_tokens=request.reserved, priority=priority
        )
        request.slot = slot
        if slot.running:
            self._begin(request, slot, -1.0)
        else:
            slot.add_done_callback(lambda _: self._begin_later(request, slot))

    def _begin(self, request: Request, slot: Slot, at: float) -> None:
        """Note that the batcher has started a request."""
        slot.correct(request.prompt, request.reserved)
        self._inputs.append((at, request))
        if request.number < 0:
            self._rows_waiting -= 1

    def _begin_later(self, request: Request, slot: Slot) -> None:
        """Note the start of a request that has waited; at the end of the run the request doesn't start."""
        if slot.running:
            self.started += 1
            self._begin(request, slot, self.now)
            self.fill()

    def _submit(self, request: Request) -> None:
        """Give a request to the engine."""
        number = next(self._names)
        name = str(number)
        distinct = []
        for _ in range(min(4, request.prompt - request.shared)):
            number, digit = divmod(number, len(TOKENS))
            distinct.append(TOKENS[digit])
        rest = request.prompt - request.shared - len(distinct)
        prompt = [SAME] * request.shared + distinct + [SAME] * rest
        self._running[name] = request
        assert request.slot is not None
        live = request.number >= 0 or request.slot.promoted
        age_s = self.now - request.sent_at if request.number >= 0 else request.slot.waited_s
        self.engine.add(
            name, prompt, request.output, priority=0 if live else FLEX, **self.engine.goals(age_s, live=live)
        )


# A run in virtual time


class _Loop(asyncio.SelectorEventLoop):
    """An event loop on the time of the fleet; no task sleeps in it."""

    now = 0.0

    def time(self) -> float:
        return self.now


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the logs of vLLM away from a command's output."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(before)


class Fleet:
    """Replicas with the same settings, and the rule that chooses one for a request. A fleet runs once.

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
        self._numbers = random.Random(seed)
        self._free_at = 0.0
        names = count()
        config = settings.config(profile, workload)
        with _quiet():
            self._replicas = [
                _Replica(config, _rows(workload.batch, f"{seed} {number}"), names)
                for number in range(replicas)
            ]
        self._by_name = {f"{number:06}": each for number, each in enumerate(self._replicas)}
        self._choice = ReplicaChoice(prefixes=routing == "prefix", draw=random.Random(seed))
        self._choice.update({name: ReplicaState(capacity=profile.kv_tokens) for name in self._by_name})
        # Requests on their way to a replica, with the times of their arrival; then the requests sent later.
        self._coming: deque[tuple[float, Request]] = deque()
        self._source: Iterator[Request] = iter(())

    def run(
        self,
        requests: Iterable[Request],
        counts: range,
        follow: Callable[[Request, float], Iterable[Request]] | None = None,
    ) -> Run:
        """Run requests until all requests that count are complete.

        Args:
            requests: The requests, in the order in which they are sent.
            counts: The numbers of the requests that count.
            follow: Returns the requests that are sent at the end of a request, by this request and the time.
        """
        try:
            with _quiet(), asyncio.Runner(loop_factory=_Loop) as runner:
                return runner.run(self._run(requests, counts, follow))
        finally:
            for replica in self._replicas:
                replica.engine.stop()

    async def _run(
        self,
        requests: Iterable[Request],
        counts: range,
        follow: Callable[[Request, float], Iterable[Request]] | None,
    ) -> Run:
        replicas, loop = self._replicas, asyncio.get_running_loop()
        assert isinstance(loop, _Loop)
        self._source = iter(requests)
        for request in self._source if follow else islice(self._source, 1):
            self._send(request)
        for replica in replicas:
            await replica.batcher.start()
            replica.fill()
        found: list[Request] = []
        rows_since: tuple[float, int] | None = None
        while len(found) < len(counts):
            replica = min(replicas, key=_Replica.due)
            due = replica.due()
            if self._coming and self._coming[0][0] <= due:
                if rows_since is None and self._coming[0][1].number == counts.start:
                    rows_since = self._coming[0][0], sum(each.row_tokens for each in replicas)
                self._route()
                continue
            assert due < math.inf, "requests that count were never sent"
            replica.wait(due)
            replica.hold()
            while self._coming and self._coming[0][0] <= replica.now:
                self._route()
            replica.take()
            loop.now = replica.now
            for request in replica.step():
                assert request.charge is not None
                request.charge.release()
                request.charge = None
                if request.number in counts:
                    found.append(request)
                for other in follow(request, request.ended_at) if follow else ():
                    self._send(other)
            await self._settle(replica)
        for replica in replicas:
            await replica.batcher.stop(drain=False, timeout=0)
        return self._result(found, rows_since or (0.0, 0))

    def _result(self, found: list[Request], rows_since: tuple[float, int]) -> Run:
        replicas = self._replicas
        now = max(each.now for each in replicas)
        found.sort(key=attrgetter("number"))
        rows = sum(each.row_tokens for each in replicas) - rows_since[1]
        count = len(replicas)
        return Run(
            requests=found,
            seconds=now,
            busy=max(0.0, 1 - sum(each.idle_s + now - each.now for each in replicas) / (now * count)),
            held=sum(each.held() for each in replicas) / count,
            most_running=max(each.most_running for each in replicas),
            row_tokens_per_s=rows / max(now - rows_since[0], 1e-9),
        )

    @staticmethod
    async def _settle(replica: _Replica) -> None:
        """Let the batcher's callbacks run until none has started another request."""
        before = -1
        while replica.started != before:
            before = replica.started
            await asyncio.sleep(0)

    def _send(self, request: Request) -> None:
        """Put a request on its way to a replica."""
        at = request.sent_at
        if self._serial_s:
            at = self._free_at = max(self._free_at, at) + self._serial_s * self._numbers.uniform(0.5, 1.5)
        self._coming.append((at + self._way_s, request))

    def _route(self) -> None:
        """Choose the replica of the first request on its way."""
        at, request = self._coming.popleft()
        prefix = (int(request.route * 2**32),)
        tokens = request.prompt + request.reserved
        name = self._choice.choose(prefix)
        request.charge = ReplicaCharge()
        self._choice.send(request.charge, name, prefix, tokens)
        self._by_name[name].coming.append((at, request))
        if not self._coming:
            for following in islice(self._source, 1):
                self._send(following)


def open_loop(
    fleet: Fleet,
    workload: Workload,
    seed: int,
    *,
    rate: float,
    warm_up: int,
    counted: int,
) -> Run:
    """Run requests that come at random, independently of the answers.

    Args:
        fleet: The replicas.
        workload: The requests.
        seed: Seed of the random numbers; the same numbers are drawn for every fleet and every rate.
        rate: Requests per second, in place of the rate of the workload.
        warm_up: Requests before the requests that count.
        counted: Requests that count. Further requests follow until these are complete.
    """

    def requests() -> Iterator[Request]:
        at = 0.0
        for number, draw in enumerate(workload.draws(seed)):
            at += draw.gap / rate
            yield _request(workload, number, at, draw)

    return fleet.run(requests(), range(warm_up, warm_up + counted))


def closed_loop(
    fleet: Fleet, workload: Workload, seed: int, *, streams: int, requests: int, warm_up: int = 0
) -> Run:
    """Run clients that send the next request when the request before is answered.

    Args:
        fleet: The replicas.
        workload: The requests; their rate doesn't matter.
        seed: Seed of the random numbers.
        streams: Clients.
        requests: Requests of all clients, including the warm-up.
        warm_up: Number of the first requests, which don't count.
    """
    draws = enumerate(islice(workload.draws(seed), requests))

    def send(at: float, most: int = 1) -> list[Request]:
        return [_request(workload, number, at, draw) for number, draw in islice(draws, most)]

    return fleet.run(send(0.0, streams), range(warm_up, requests), follow=lambda request, now: send(now))


def _rows(batch: BatchWork | None, seed: str) -> Iterator[Request] | None:
    """Return the rows of a batch, without end; None: there is no batch."""
    if batch is None:
        return None
    numbers = random.Random(seed)

    def draw(work: BatchWork) -> Iterator[Request]:
        while True:
            prompt, output = work.input.draw(numbers), work.output.draw(numbers)
            yield Request(-1, 0.0, prompt, output, work.output.most)

    return draw(batch)


def _request(workload: Workload, number: int, at: float, draw: Any) -> Request:
    shared = int(draw.prompt * workload.prefix_share) // BLOCK * BLOCK
    return Request(number, at, draw.prompt, draw.output, workload.max_tokens, draw.route, shared)


# Processes


def load() -> None:
    """Import vLLM, which takes ten seconds; the processes of `in_processes` inherit the modules."""
    with _quiet():
        import serve_app.engine.vllm.virtual  # noqa: F401


def in_processes(jobs: Sequence[Callable[[], Run]], ended: Callable[[], None] = lambda: None) -> list[Run]:
    """Return the results of functions, each in a process of its own, as many at once as there are cores.

    The processes end with this function, however it ends, and with this process.

    Args:
        jobs: The functions.
        ended: Called whenever a function has ended.
    """
    load()
    context, parent, cores = multiprocessing.get_context("fork"), os.getpid(), int(available_cores())
    waiting, found = deque(enumerate(jobs)), dict[int, Run]()
    running: dict[Any, tuple[int, BaseProcess]] = {}
    ready: Any

    def work(job: Callable[[], Run], writer: Connection) -> None:
        end_with(parent, signal.SIGKILL)
        try:
            writer.send(job())
        except Exception as error:
            # The parent raises it.
            writer.send(error)

    try:
        while waiting or running:
            while waiting and len(running) < max(1, cores):
                number, job = waiting.popleft()
                reader, writer = context.Pipe(duplex=False)
                process = context.Process(target=work, args=(job, writer), daemon=True)
                # Ctrl-C is for this process; the new one begins with the signal blocked.
                signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
                try:
                    process.start()
                    running[reader] = number, process
                finally:
                    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
                writer.close()
            for ready in wait(list(running)):
                number, done = running.pop(ready)
                try:
                    result = ready.recv()
                except EOFError:
                    result = RuntimeError("a process of the simulation was killed")
                done.join()
                if isinstance(result, Exception):
                    raise result
                found[number] = result
                ended()
    finally:
        for _, each in running.values():
            each.kill()
            each.join()
    return [found[number] for number in range(len(jobs))]
