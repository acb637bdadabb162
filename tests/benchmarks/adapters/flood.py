"""A flood on one adapter beside light traffic on the others, all through one service."""

import asyncio
import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from batcher.stats import percentiles
from tests.benchmarks.adapters.files import with_adapters
from tests.benchmarks.adapters.traffic import Arrival, Traffic
from tests.benchmarks.measuring import Row, Table, progress, ratios
from tests.benchmarks.serve.client import Answer, Connections, Request, run
from tests.benchmarks.serve.loads import Prompt
from tests.benchmarks.serve.models import Model
from tests.benchmarks.serve.running import with_log
from tests.benchmarks.serve.servers import saturate
from tests.benchmarks.serve.ways import chat, completion, for_model
from tests.e2e.waiting import wait_until_idle

ADAPTERS = 8
"""Adapters of the model; each has a slot."""

GOAL = 1.2
"""The goal for the p99 of the others beside a flood, in relation to the p99 without."""

ALONE, FLOOD, BEYOND, ARRIVAL = "alone", "flood", "beyond capacity", "beyond capacity, one tenant"

LATE_S = 30.0
"""Seconds that the flood goes on after the measurement, for the light requests that still wait."""

IDLE_S = 120.0
"""Most seconds until the service is idle again."""

QUANTITIES = {"total": "time of an answer", "ttft": "time to first token"}


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan of a measurement.

    Attributes:
        model: The model without adapters.
        adapters: Folders of the adapters, by name.
        rounds: Number of rounds.
        running: Requests that the engine runs at once.
        tokens: Tokens of an answer.
        light: Light traffic of all adapters together, as a share of the capacity.
        times: Requests of the flood for each request of another adapter.
        beyond: The same of the flood that exceeds the capacity.
        seconds: Seconds of a measurement.
    """

    model: Model
    adapters: Mapping[str, Path]
    rounds: int
    running: int
    tokens: int
    light: float
    times: float
    beyond: float
    seconds: float

    def phases(self, capacity: float) -> dict[str, Traffic]:
        """Return the traffic of each phase of a round, for a capacity in requests per second."""
        rate = self.light * capacity / (len(self.adapters) - 1)

        def traffic(times: float, tenant: str = "") -> Traffic:
            return Traffic(rate, times, self.tokens, tenant, self.seconds / 6, self.seconds)

        return {
            ALONE: traffic(0.0),
            FLOOD: traffic(self.times),
            BEYOND: traffic(self.beyond),
            ARRIVAL: traffic(self.beyond, "all"),
        }


@dataclass(slots=True)
class Seen:
    """Answers of a phase.

    Attributes:
        light: Answers to the light requests of the measurement.
        flood: Ended answers of the flood, by status.
        sent: Requests of the flood.
    """

    light: list[Answer] = field(default_factory=list)
    flood: Counter[int] = field(default_factory=Counter)
    sent: int = 0

    def figures(self) -> dict[str, float]:
        """Return the percentiles of the light answers, in milliseconds, by quantity and percentile."""
        found = {}
        for quantity in QUANTITIES:
            values = [getattr(answer, f"{quantity}_s") * 1e3 for answer in self.light]
            found[f"{quantity} p50"], found[f"{quantity} p99"] = percentiles(values, (0.5, 0.99))
        return found


def capacity_of(answers: Sequence[Answer]) -> float:
    """Return the answers per second of a closed loop, in the middle half of them."""
    ended = sorted(answer.ended_at for answer in answers)
    first, last = len(ended) // 4, 3 * len(ended) // 4
    return (last - first) / (ended[last] - ended[first])


def question(number: int, tokens: int) -> Prompt:
    """Return a short prompt that shares no prefix with that of another number."""
    return Prompt(f"{number:06} What is 1+1?", tokens)


async def send(
    port: int, traffic: Traffic, adapters: Sequence[str], seed: int, numbers: Iterator[int]
) -> Seen:
    """Send a phase's traffic to a server on this machine; return what was seen.

    Args:
        port: The server's port.
        traffic: The traffic.
        adapters: Names of the adapters; the flood is on the last one.
        seed: Seed of the times and the adapters.
        numbers: Numbers of the prompts, none of which comes twice: it could be in a prefix cache.

    Raises:
        RuntimeError: A light request was not answered with success.
        TimeoutError: A light request was not answered in time.
    """
    seen = Seen()
    connections = Connections(port)
    header = f"x-tenant: {traffic.tenant}\r\n" if traffic.tenant else ""
    light: set[asyncio.Task[None]] = set()
    others: set[asyncio.Task[None]] = set()

    async def ask(arrival: Arrival) -> None:
        prompt = question(next(numbers), arrival.tokens)
        request = for_model(completion(prompt) if arrival.flood else chat(prompt), arrival.adapter)
        answer = Answer(request.tokens, 1, 0.0)
        body = json.dumps(request.body).encode()
        if arrival.flood:
            # One that gets no answer isn't counted as answered.
            with suppress(OSError):
                await connections.post(request.path, body, answer, header)
                seen.flood[answer.status] += 1
            return
        await connections.post(request.path, body, answer, header)
        answer.check()
        if traffic.warm_up_s <= arrival.at < traffic.ends_s:
            seen.light.append(answer)

    began = time.monotonic()
    for arrival in traffic.arrivals(adapters, seed):
        # The load goes on until the last light request of the measurement is answered.
        late = arrival.at - traffic.ends_s
        if late >= LATE_S or (late >= 0 and not light):
            break
        await asyncio.sleep(max(0.0, began + arrival.at - time.monotonic()))
        counts = not arrival.flood and late < 0
        tasks = light if counts else others
        task = asyncio.create_task(ask(arrival))
        tasks.add(task)
        seen.sent += arrival.flood
        if not counts:
            task.add_done_callback(others.discard)
        for each in [each for each in light if each.done()]:
            each.result()
            light.discard(each)
    for each in others:
        each.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    async with asyncio.timeout(IDLE_S):
        await asyncio.gather(*light)
    connections.close()
    return seen


def find_capacity(port: int, plan: Plan, numbers: Iterator[int]) -> float:
    """Return the requests per second that a service answers, of all adapters in turn."""
    draw = random.Random(0)
    adapters = list(plan.adapters)

    def request(number: int) -> Request:
        prompt = question(number, draw.randint(1, 2 * plan.tokens))
        return for_model(completion(prompt), adapters[number % len(adapters)])

    requests = [request(number) for number in itertools.islice(numbers, 4 * plan.running)]
    return capacity_of(asyncio.run(run(port, 3 * plan.running // 2, requests)))


def measure(plan: Plan, folder: Path) -> Table:
    """Return the table: each round has all phases once, in another order each time.

    Raises:
        UnavailableError: The service did not start, or a light request failed.
    """
    found: dict[str, list[dict[str, float]]] = {}
    served: dict[str, list[float]] = {}
    adapters = list(plan.adapters)
    model = with_adapters(plan.model, plan.adapters, len(adapters))
    with (
        saturate(model, folder, {"max_running": plan.running, "max_queue_size": 50_000}) as server,
        httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=60) as http,
        with_log(server, "the flood"),
    ):
        progress("flood: the capacity")
        numbers = itertools.count()
        capacity = find_capacity(server.port, plan, numbers)
        phases = plan.phases(capacity)
        names = list(phases)
        for number in range(plan.rounds):
            turn = number % len(names)
            for name in [*names[turn:], *names[:turn]]:
                progress(f"flood: round {number + 1} of {plan.rounds}, {name}")
                wait_until_idle(http, IDLE_S)
                # The light requests of a round come at the same times in each of its phases.
                seen = asyncio.run(send(server.port, phases[name], adapters, number, numbers))
                found.setdefault(name, []).append(seen.figures())
                served.setdefault(name, []).append(seen.flood[200] / max(seen.sent, 1))
    progress("")
    setting = (
        f"{plan.model.about}; {len(adapters)} adapters with a slot each; the engine runs {plan.running} "
        f"requests at once, and answers {capacity:.1f}/s; streams of {plan.tokens} tokens on "
        f"{len(adapters) - 1} adapters, {phases[ALONE].rate:.2f}/s on each; the flood on the other one: "
        f"{plan.times:g} times as many ({FLOOD}), {plan.beyond:g} times ({BEYOND}). One tenant: all requests "
        "name the same, so they go in order of arrival; what still waits at the end is cut off."
    )
    return Table(setting, rows(found, served))


def rows(
    found: Mapping[str, Sequence[Mapping[str, float]]], served: Mapping[str, Sequence[float]]
) -> list[Row]:
    """Return the lines of the table.

    Args:
        found: Figures of each round, by phase.
        served: Share of the flood's requests that were answered, by phase.
    """
    made = []
    for quantity, label in QUANTITIES.items():
        for percentile in ("p50", "p99"):
            for name, rounds in found.items():
                samples = [figures[f"{quantity} {percentile}"] for figures in rounds]
                made.append(Row(f"{name}: {label}, {percentile}", "ms", samples))
    for quantity, label in QUANTITIES.items():
        alone = [figures[f"{quantity} p99"] for figures in found[ALONE]]
        for name in (FLOOD, BEYOND, ARRIVAL):
            beside = [figures[f"{quantity} p99"] for figures in found[name]]
            goal = GOAL if name == FLOOD else None
            made.append(Row(f"{label}, p99: {name} / {ALONE}", "x", ratios(beside, alone), at_most=goal))
    for name in (FLOOD, BEYOND, ARRIVAL):
        made.append(Row(f"{name}: share of the flood that was answered", "", list(served[name])))
    return made
