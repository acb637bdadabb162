"""A fleet of simulated replicas behind Ingresses: discrete events, no wall clock, no Ray.

A replica works as vLLM does: continuous batching, chunked prefill, and a prefix cache of blocks that forgets
the least recently used. Its steps take the time of a device.
"""

import heapq
import random
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

from serve_app.api.facts import prefix_hashes
from serve_app.ingress.replica_choice import ReplicaCharge, ReplicaChoice, ReplicaState

BLOCK = 64
"""Tokens of a block of the simulated KV cache."""

REPORT_S = 2.0
REPORT_DELAY_S = 0.5


@dataclass(frozen=True)
class Device:
    """The time of a step, and the sizes of an engine."""

    base_s: float
    prefill_token_s: float
    sequence_s: float
    step_tokens: int = 8_192
    sequences: int = 256
    capacity: int = 400_000


H100_8B = Device(base_s=0.010, prefill_token_s=0.000_03, sequence_s=0.000_04)
L4_7B = Device(
    base_s=0.050, prefill_token_s=0.000_25, sequence_s=0.000_2, step_tokens=2_048, capacity=100_000
)


@dataclass
class Prompt:
    """A prompt whose first blocks others may share."""

    blocks: tuple[object, ...]
    hashes: tuple[int, ...]
    output: int

    @property
    def tokens(self) -> int:
        return len(self.blocks) * BLOCK + self.output


class Traffic:
    """Prompts, of which a part begins with one of several prefixes; a prefix may be drawn more often.

    Args:
        draw: Random numbers.
        prefixes: How many prefixes there are; 0: no two prompts share anything.
        shared: Tokens of a prefix.
        length: Tokens of a prompt.
        output: Tokens of an answer: a number, or the least and the most.
        header: Tokens that all prefixes begin with.
        skew: Exponent of Zipf's law for the prefixes' frequency; 0: all are as frequent.
    """

    def __init__(
        self,
        draw: random.Random,
        prefixes: int = 64,
        shared: int = 896,
        length: int = 1_024,
        output: int | tuple[int, int] = 16,
        header: int = 0,
        skew: float = 0.0,
    ) -> None:
        self._draw = draw
        self._prefixes = range(prefixes)
        self._weights = [1 / (rank + 1) ** skew for rank in self._prefixes]
        self._shared, self._length, self._header = shared // BLOCK, length // BLOCK, header // BLOCK
        self._output = (output, output) if isinstance(output, int) else output
        self._number = count()

    def prompt(self) -> Prompt:
        unique = next(self._number)
        blocks: list[object] = []
        if self._prefixes:
            (prefix,) = self._draw.choices(self._prefixes, self._weights)
            blocks = [("header", i) for i in range(self._header)]
            blocks += [(prefix, i) for i in range(self._header, self._shared)]
        blocks += [(-1 - unique, i) for i in range(self._length - len(blocks))]
        # Four bytes a token, behind the start of a JSON text, so that nothing falls on a chunk's border.
        text = b'[{"role":' + b"".join(str(block).encode().ljust(4 * BLOCK, b".") for block in blocks)
        return Prompt(tuple(blocks), prefix_hashes(text), self._draw.randint(*self._output))


class Cache:
    """KV blocks of a replica: those in use, and those that may be used again."""

    def __init__(self, capacity: int) -> None:
        self._room = capacity // BLOCK
        self._used: Counter[object] = Counter()
        self._idle: OrderedDict[object, None] = OrderedDict()
        self._outputs = 0

    def take(self, prompt: Prompt) -> int | None:
        """Reserve the blocks of a prompt; return how many were there, or None if there is no room."""
        hits = 0
        for block in prompt.blocks:
            if block not in self._used and block not in self._idle:
                break
            hits += 1
        idle = sum(block in self._idle for block in prompt.blocks[:hits])
        output = -(-prompt.output // BLOCK)
        if len(self._used) + self._outputs + idle + len(prompt.blocks) - hits + output > self._room:
            return None
        for block in prompt.blocks:
            self._idle.pop(block, None)
            self._used[block] += 1
        self._outputs += output
        while len(self._used) + self._outputs + len(self._idle) > self._room:
            self._idle.popitem(last=False)
        return hits

    def give_back(self, prompt: Prompt) -> None:
        self._outputs -= -(-prompt.output // BLOCK)
        for block in reversed(prompt.blocks):
            self._used[block] -= 1
            if not self._used[block]:
                del self._used[block]
                self._idle[block] = None


@dataclass
class Job:
    """A request on its way."""

    prompt: Prompt
    began: float
    client: int
    done: Callable[[], None] = field(default=lambda: None)
    prefill: int = 0
    left: int = 0
    first_token: bool = False


class Replica:
    """An engine that batches continuously."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.cache = Cache(device.capacity)
        self.waiting: deque[Job] = deque()
        self.running: list[Job] = []
        self.stepping = False
        self.held = 0
        self.served = 0
        self.busy_s = 0.0
        self.prompt_tokens = 0
        self.hit_tokens = 0

    def step(self) -> float | None:
        """Begin a step; return its seconds, or None if there is no work."""
        device = self.device
        while self.waiting and len(self.running) < device.sequences:
            job = self.waiting[0]
            hits = self.cache.take(job.prompt)
            if hits is None:
                break
            self.waiting.popleft()
            # The last token of a prompt is always computed.
            job.prefill = max(1, (len(job.prompt.blocks) - hits) * BLOCK)
            job.left = job.prompt.output
            self.prompt_tokens += len(job.prompt.blocks) * BLOCK
            self.hit_tokens += hits * BLOCK
            self.running.append(job)
        if not self.running:
            return None
        budget = device.step_tokens
        prefilled = 0
        for job in self.running:
            if job.prefill:
                tokens = min(job.prefill, budget)
                job.prefill -= tokens
                budget -= tokens
                prefilled += tokens
        seconds = device.base_s + prefilled * device.prefill_token_s + len(self.running) * device.sequence_s
        self.busy_s += seconds
        return seconds

    def end_step(self) -> list[Job]:
        """End a step; return the requests that it completed."""
        ended = []
        for job in self.running:
            if not job.prefill:
                job.left -= 1
                job.first_token = True
                if job.left <= 0:
                    ended.append(job)
        if ended:
            self.running = [job for job in self.running if job.left > 0 or job.prefill]
            for job in ended:
                self.cache.give_back(job.prompt)
        return ended


class Router(Protocol):
    """Chooses replicas for one Ingress."""

    def update(self, states: dict[str, ReplicaState]) -> None: ...

    def send(self, prompt: Prompt) -> tuple[str, Callable[[], None]]:
        """Return the replica for a prompt, and what to call when it ends."""


class Ours:
    """The policy of the product."""

    def __init__(self, draw: random.Random, clock: Callable[[], float], **options: float) -> None:
        self.choice = ReplicaChoice(draw=draw, **options)  # type: ignore[arg-type]

    def update(self, states: dict[str, ReplicaState]) -> None:
        self.choice.update(states)

    def send(self, prompt: Prompt) -> tuple[str, Callable[[], None]]:
        charge = ReplicaCharge()
        name = self.choice.choose(prompt.hashes)
        self.choice.send(charge, name, prompt.hashes, prompt.tokens)
        return name, charge.release


class PowerOfTwo:
    """Ray Serve's default: the one of two with fewer requests."""

    def __init__(self, draw: random.Random, clock: Callable[[], float]) -> None:
        self._draw = draw
        self._requests: Counter[str] = Counter()
        self._names: list[str] = []

    def update(self, states: dict[str, ReplicaState]) -> None:
        self._names = list(states)

    def send(self, prompt: Prompt) -> tuple[str, Callable[[], None]]:
        two = self._draw.sample(self._names, min(2, len(self._names)))
        name = min(two, key=lambda one: self._requests[one])
        self._requests[name] += 1

        def done() -> None:
            self._requests[name] -= 1

        return name, done


class Random(PowerOfTwo):
    """One at random."""

    def send(self, prompt: Prompt) -> tuple[str, Callable[[], None]]:
        return self._draw.choice(self._names), lambda: None


@dataclass(frozen=True)
class Result:
    """The result of a run."""

    tokens_per_s: float
    hit_rate: float
    spread: float
    most_over_mean: float
    ttft_p50_s: float
    ttft_p99_s: float

    def __str__(self) -> str:
        return (
            f"{self.tokens_per_s:9,.0f} tokens/s  hits {self.hit_rate:.3f}  load most/least "
            f"{self.spread:.2f} most/mean {self.most_over_mean:.2f}  TTFT p50 "
            f"{1000 * self.ttft_p50_s:,.0f} ms p99 {1000 * self.ttft_p99_s:,.0f} ms"
        )


class Fleet:
    """Replicas, the Ingresses in front of them, and clients that send one request after the other.

    Args:
        make: Makes the router of an Ingress.
        traffic: The prompts.
        replicas: How many replicas there are.
        device: What they run on.
        clients: How many clients there are.
        ingresses: How many Ingresses there are; each request goes through one at random.
        seed: Of the random numbers.
    """

    def __init__(
        self,
        make: Callable[[random.Random, Callable[[], float]], Router],
        traffic: Callable[[random.Random], Traffic],
        *,
        replicas: int,
        device: Device = H100_8B,
        clients: int = 64,
        ingresses: int = 1,
        seed: int = 1,
    ) -> None:
        self.now = 0.0
        self._draw = random.Random(seed)
        self._traffic = traffic(random.Random(seed + 1))
        self._device = device
        self.replicas = {f"r{i}": Replica(device) for i in range(replicas)}
        self.routers = [make(random.Random(seed + 2 + i), lambda: self.now) for i in range(ingresses)]
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._clients = clients
        self._to_send = 0
        self._ended = 0
        self._output = 0
        self._ttfts: list[float] = []
        self._jobs_waiting: dict[int, Job] = {}

    def run(self, requests: int, *, events: Sequence[tuple[float, Callable[["Fleet"], None]]] = ()) -> Result:
        """Run so many requests; `events` change the fleet at times."""
        self._to_send = requests
        self.report()
        for at, change in events:
            self._at(at, lambda change=change: change(self))  # type: ignore[misc]
        for client in range(self._clients):
            self._at(0.0, lambda client=client: self._send(client))  # type: ignore[misc]
        self._at(REPORT_S, self._tick)
        while self._ended < requests:
            self.now, _, act = heapq.heappop(self._events)
            act()
        return self._result()

    def report(self) -> None:
        """Tell the Ingresses which replicas there are, and what these hold."""
        states = {
            name: ReplicaState(replica.held, self._device.capacity) for name, replica in self.replicas.items()
        }
        for router in self.routers:
            router.update(states)

    def add(self, name: str) -> None:
        self.replicas[name] = Replica(self._device)
        self.report()

    def remove(self, name: str) -> None:
        """End a replica; its requests begin again elsewhere."""
        replica = self.replicas.pop(name)
        self.report()
        for job in [*replica.running, *replica.waiting]:
            job.done()
            self._assign(job)
        replica.running.clear()
        replica.waiting.clear()

    def _at(self, when: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), act))

    def _tick(self) -> None:
        held = {name: replica.held for name, replica in self.replicas.items()}

        def deliver() -> None:
            states = {name: ReplicaState(held.get(name, 0), self._device.capacity) for name in self.replicas}
            for router in self.routers:
                router.update(states)

        self._at(self.now + REPORT_DELAY_S, deliver)
        self._at(self.now + REPORT_S, self._tick)

    def _send(self, client: int) -> None:
        if self._to_send:
            self._to_send -= 1
            self._assign(Job(self._traffic.prompt(), self.now, client))

    def _assign(self, job: Job) -> None:
        router = self._draw.choice(self.routers)
        name, done = router.send(job.prompt)
        replica = self.replicas[name]
        replica.held += job.prompt.tokens
        replica.served += job.prompt.tokens

        def end() -> None:
            done()
            replica.held -= job.prompt.tokens

        job.done = end
        job.prefill = job.left = 0
        replica.waiting.append(job)
        if not replica.stepping:
            self._step(replica)

    def _step(self, replica: Replica) -> None:
        seconds = replica.step()
        replica.stepping = seconds is not None
        if seconds is not None:
            self._at(self.now + seconds, lambda: self._end_step(replica))

    def _end_step(self, replica: Replica) -> None:
        new = [job for job in replica.running if not job.first_token and not job.prefill]
        ended = replica.end_step()
        self._ttfts += [self.now - job.began for job in new]
        for job in ended:
            job.done()
            self._ended += 1
            self._output += job.prompt.output
        self._step(replica)
        for job in ended:
            self._send(job.client)

    def _result(self) -> Result:
        replicas = self.replicas.values()
        loads = [replica.served for replica in replicas]
        ttfts = sorted(self._ttfts)
        prompts = sum(replica.prompt_tokens for replica in replicas)
        return Result(
            tokens_per_s=(prompts + self._output) / self.now,
            hit_rate=sum(replica.hit_tokens for replica in replicas) / prompts,
            spread=max(loads) / max(1, min(loads)),
            most_over_mean=max(loads) * len(loads) / sum(loads),
            ttft_p50_s=ttfts[len(ttfts) // 2],
            ttft_p99_s=ttfts[int(len(ttfts) * 0.99)],
        )
