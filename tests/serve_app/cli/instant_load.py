"""A service whose load steps take no time, for runs of a tuning."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Self

from serve_app.cli.tune_config import RunningConfig
from serve_app.cli.tune_run import TuneOptions, TuneRun
from serve_app.client import ServiceError
from serve_app.system.progress import Progress
from serve_app.tuning.goals import parse_goals
from serve_app.tuning.load import LoadLevel, LoadStep, Requests
from serve_app.tuning.service import ModelFacts, Service
from serve_app.tuning.workload import TokenLengths
from tests.serve_app.tuning.doubles import VirtualEngine, profile
from tests.serve_app.tuning.load_results import step

# Of a median, few requests are enough.
GOALS = parse_goals("ttft_p50<0.5")

QUESTION = TuneOptions(
    url="http://virtual",
    model=None,
    key=None,
    input=TokenLengths(512.0),
    output=TokenLengths(128.0),
    prompts=(),
    ledger=None,
    goals=GOALS,
    seconds=0.01,
    loop="both",
    rate=None,
    concurrency=None,
    seed=0,
    beside_batch=False,
)


@dataclass
class Bench:
    """A service, and generators whose steps hold the goals up to a limit.

    Attributes:
        engine: The service.
        limit: The highest load that holds the goals.
        change: Changes each step.
        facts: Changes the facts.
        loads: The loads of the steps, each with the tier of its requests.
        warm_ups: Their warm-ups.
        clients: Clients of batch work.
        closed: Generators that were closed.
        sent: Requests that a generator says it has sent.
        refused: Loads that the service doesn't take.
        stuck: Set by the first step that never ends; None: all end.
    """

    engine: VirtualEngine = field(default_factory=lambda: VirtualEngine(profile()))
    limit: float = 20.0
    change: Callable[[LoadStep], LoadStep] = lambda step: step
    facts: Callable[[ModelFacts], ModelFacts] = lambda facts: facts
    loads: list[tuple[LoadLevel, str]] = field(default_factory=list)
    warm_ups: list[float] = field(default_factory=list)
    clients: list[int] = field(default_factory=list)
    closed: int = 0
    sent: int = 0
    refused: tuple[LoadLevel, ...] = ()
    stuck: asyncio.Event | None = None

    def service(self, url: str, *, api_key: str | None) -> Service:
        return Service(url, api_key=api_key, clock=lambda: self.engine.now, transport=self.engine)

    def generator(self, service: Service, requests: Requests, goals: Any) -> "InstantGenerator":
        return InstantGenerator(self, service, requests)

    def run(self, config: RunningConfig | None = None, **changes: Any) -> TuneRun:
        question = replace(QUESTION, **changes)
        generator: Any = self.generator
        return TuneRun(question, config, Progress(), service=self.service, generator=generator)

    async def found(self, **changes: Any) -> Any:
        run = self.run(**changes)
        await run.run()
        return run.found


class InstantGenerator:
    """Stands for a load generator; its steps take no time."""

    def __init__(self, bench: Bench, service: Service, requests: Requests) -> None:
        self._bench = bench
        self._service = service
        self._requests = requests
        self.sent = bench.sent

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._bench.closed += 1

    async def facts(self) -> ModelFacts:
        return self._bench.facts(await self._service.facts("m"))

    async def step(self, load: LoadLevel, *, warm_up: float, **options: Any) -> LoadStep:
        bench = self._bench
        bench.loads.append((load, self._requests.tier))
        bench.warm_ups.append(warm_up)
        if load in bench.refused:
            raise ServiceError("the service is gone")
        if bench.stuck and load.value > 1:
            bench.stuck.set()
            await asyncio.Event().wait()
        late = load.value > bench.limit
        return bench.change(step(load.value, 0.7 if late else 0.2, load.loop, goals=GOALS))

    def start(self, clients: int, seed: int) -> None:
        assert self._requests.tier == "flex"
        self._bench.clients.append(clients)

    def tokens_between(self, begin: float, end: float) -> float:
        return 0.0
