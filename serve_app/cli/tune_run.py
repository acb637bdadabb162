"""One run of `saturate tune`: the load steps, the choice, and what is done with it."""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import click

from serve_app.cli.tune_config import RunningConfig
from serve_app.client import ServiceError
from serve_app.relay.usage import Tokens
from serve_app.system.progress import Progress
from serve_app.tuning.choice import MARGIN, choose
from serve_app.tuning.generator import Generator
from serve_app.tuning.goals import Goal
from serve_app.tuning.load_report import Batch, Tuning, line
from serve_app.tuning.load_step import Load, Step
from serve_app.tuning.requests import Prompt, Requests
from serve_app.tuning.service import Facts, Service
from serve_app.tuning.tuner import Tuner, is_small
from serve_app.tuning.workload import Lengths

STEPS_DOWN = 4
"""Times that the rate is lowered where the goals don't hold with the settings."""

IDLE_LOOKS, IDLE_S = 10, 0.2
"""Looks at a service before the first step, and the seconds between them."""

OTHERS = 0.02
"""Requests of others, as a share of those that were sent, from which on they are told."""

LATE_S = 0.1
"""Seconds by which a request may be sent too late before that is told."""

AT_THE_LIMIT = 0.9
"""Share of `max_running` that runs from which on the limit itself may have bounded the load."""

BATCH_CLIENTS = 2
"""Clients of the batch load, for each request that may run."""


@dataclass(frozen=True, slots=True)
class TuneOptions:
    """The question of a run.

    Attributes:
        url: URL of the service.
        model: The model; None: the only one.
        key: The API key; None: there is none.
        input: Tokens of a prompt.
        output: Tokens of an answer.
        prompts: Prompts of a dataset; empty: random ones.
        ledger: Lengths of calls by model, in place of `input` and `output`; None: those.
        goals: The goals.
        seconds: Length of a step.
        loop: Which edges are looked for.
        rate: The one rate to measure; None: the highest.
        concurrency: The one number of clients to measure; None: the highest.
        seed: Of the random numbers.
        beside_batch: Measure `rate` beside batch work.
    """

    url: str
    model: str | None
    key: str | None
    input: Lengths
    output: Lengths
    prompts: Sequence[Prompt]
    ledger: Mapping[str, Sequence[Tokens]] | None
    goals: tuple[Goal, ...]
    seconds: float
    loop: Literal["both", "open", "closed"]
    rate: float | None
    concurrency: int | None
    seed: int
    beside_batch: bool

    def requests(self, model: str, tier: str = "default") -> Requests:
        """Return the requests to a model.

        Raises:
            click.UsageError: The ledger has no calls of it.
        """
        if self.ledger is None:
            return Requests(model, self.input, self.output, self.prompts, tier=tier)
        calls = self.ledger.get(model)
        if not calls:
            others = ", ".join(sorted(self.ledger)) or "none"
            raise click.UsageError(
                f"--ledger: it has no answered call of {model} in this time (models with calls: {others}); "
                "take an earlier --since, or --input and --output"
            )
        input, output = (
            Lengths(sum(getattr(call, part) for call in calls) / len(calls)) for part in ("prompt", "output")
        )
        return Requests(model, input, output, calls=calls, tier=tier)

    def __str__(self) -> str:
        if self.ledger is not None:
            return "lengths of calls in the ledger"
        if self.prompts:
            return f"{len(self.prompts):,} prompts of a dataset, answers of at most {self.output} tokens"
        return f"{self.input} tokens in, {self.output} out"


MakeService = Callable[..., Service]
MakeGenerator = Callable[..., Generator]


class TuneRun:
    """Runs a tuning.

    Attributes:
        found: The result, as far as it came.

    Args:
        question: The question.
        config: The config to apply the settings to; None: they aren't applied.
        progress: The progress.
    """

    def __init__(
        self,
        question: TuneOptions,
        config: RunningConfig | None,
        progress: Progress,
        *,
        service: MakeService = Service,
        generator: MakeGenerator = Generator,
    ) -> None:
        self._question = question
        self._config = config
        self._progress = progress
        self._service = service
        self._generator = generator
        self._requests: Requests | None = None
        self._warnings: list[str] = []
        self._late_s = 0.0
        self._small = False
        self.found = Tuning(question.model or "", str(question), question.goals)

    async def run(self) -> None:
        """Run it.

        Raises:
            ServiceError: The service can't be measured.
            LoneMissError: A lone request misses the goals.
        """
        try:
            await self._run()
        finally:
            self._note()

    async def _run(self) -> None:
        question = self._question
        async with self._service(question.url, api_key=question.key) as service:
            model = self.found.model = await service.find(question.model)
            requests = self._requests = question.requests(model)
            if requests.calls:
                self.found.question = _lengths(requests.calls)
            async with self._generator(service, requests, question.goals) as generator:
                # A model without replicas starts one for the first request.
                self._progress.show(f"the first answer of {model}")
                await service.streams(model, [16], 2)
                facts = await self._idle(generator)
                await self._steps(generator, facts)
                await self._end(generator, facts)
                if question.beside_batch:
                    await self._beside(service, generator, facts)

    async def _steps(self, generator: Generator, facts: Facts) -> None:
        """Make the load steps, and choose."""
        question, found = self._question, self.found
        tuner = self._tuner(generator)
        found.lone = await tuner.lone()
        single = []
        if question.concurrency is not None:
            single.append(Load("closed", question.concurrency))
        if question.rate is not None:
            single.append(Load("open", question.rate))
        if single:
            for load in single:
                if not (question.beside_batch and load.loop == "open"):
                    found.single = (*found.single, await tuner.measure(load))
        else:
            if question.loop != "open":
                found.closed = await tuner.highest_concurrency()
            if question.loop != "closed":
                found.open = await tuner.highest_rate(found.closed)
        best = found.best
        if best is not None:
            found.choice = choose(best, facts, question.goals, question.rate, question.beside_batch)
            if best.peak >= AT_THE_LIMIT * facts.max_num_seqs * facts.replicas:
                self._warnings.append(
                    f"max_running, now {facts.max_num_seqs}, may bound the load: with more of it, or without "
                    "it, the service may hold more"
                )
        if self._config is not None and found.choice is not None:
            await self._apply(self._config, generator, tuner)

    async def _apply(self, config: RunningConfig, generator: Generator, tuner: Tuner) -> None:
        """Apply the settings, and lower the rate until the goals hold with them."""
        choice = self.found.choice
        assert choice is not None
        self._progress.show("applying the settings")
        change = await config.apply(generator, self.found.model, choice)
        self._warnings += [f"not applied: {each}" for each in change.left_out]
        for _ in range(STEPS_DOWN + 1):
            step = await tuner.measure(Load("open", choice.rate))
            self.found.applied = (*self.found.applied, step)
            if step.holds:
                break
            target = max(1, round(choice.target_ongoing_requests * MARGIN))
            choice = replace(choice, rate=choice.rate * MARGIN, target_ongoing_requests=target)
        else:
            return
        if choice != self.found.choice:
            self.found.choice = choice
            await config.apply(generator, self.found.model, choice)

    async def _beside(self, service: Service, generator: Generator, facts: Facts) -> None:
        """Measure live traffic at the given rate beside batch work."""
        question = self._question
        assert question.rate is not None
        requests = question.requests(self.found.model, tier="flex")
        clock = service.clock
        async with self._generator(service, requests, question.goals) as batch:
            batch.start(BATCH_CLIENTS * facts.replicas * facts.max_num_seqs, question.seed + 1_000_000)
            self._progress.show("batch work fills the service")
            tuner = self._tuner(generator)
            tuner.life_s = 2 * self._life_s()
            # The first requests of batch work all have their prompts before them.
            await asyncio.sleep(min(question.seconds, 10.0))
            began = clock()
            live = await tuner.measure(Load("open", question.rate))
            ended = clock()
            # Answers that are still on their way belong to the time before.
            await asyncio.sleep(min(question.seconds, 2 * self._life_s()))
            tokens = batch.tokens_between(began, ended)
        self.found.batch = Batch(live, tokens / max(ended - began, 1e-9))

    def _life_s(self) -> float:
        """Return the seconds of an answer that is alone; 0: none has ended."""
        life = math.nan if self.found.lone is None else self.found.lone.figure("latency", 50)
        return life if math.isfinite(life) else 0.0

    def _tuner(self, generator: Generator) -> Tuner:
        question, requests = self._question, self._requests
        assert requests is not None
        return Tuner(
            generator,
            requests.input.expected + requests.output.expected,
            question.goals,
            seconds=question.seconds,
            seed=question.seed,
            progress=self._tell,
        )

    def _tell(self, load: Load, step: Step | None) -> None:
        if step is None:
            self._progress.show(f"{load}, {self._question.seconds:g} s")
            return
        self._progress.end(line(step))
        self._late_s = max(self._late_s, step.late_s)
        self._small |= is_small(step) and step.load.loop == "open"

    async def _idle(self, generator: Generator) -> Facts:
        """Return the facts, with a warning where the service has other work."""
        for _ in range(IDLE_LOOKS):
            facts = await generator.facts()
            if not facts.in_flight:
                return facts
            await asyncio.sleep(IDLE_S)
        self._warnings.append(
            f"{facts.in_flight} requests of others run or wait: the figures are of what is left beside them"
        )
        return facts

    async def _end(self, generator: Generator, before: Facts) -> None:
        """Note the requests of others."""
        try:
            after = await generator.facts()
        except ServiceError:
            return
        others = after.submitted - before.submitted - generator.sent
        if others > OTHERS * generator.sent:
            self._warnings.append(f"{others} requests of others ran meanwhile, and made the load higher")
        if after.replicas != before.replicas:
            self._warnings.append(
                f"the model had {before.replicas} replicas at first and has {after.replicas} now: measure "
                "with a fixed number, and scale by target_ongoing_requests"
            )

    def _note(self) -> None:
        if self._late_s > LATE_S:
            self._warnings.append(
                f"requests were sent up to {self._late_s:.2f} s late: this machine is too slow for the load; "
                "run the command on another one, or use a generator with several processes"
            )
        if self._small:
            self._warnings.append(
                "steps had too few requests for the percentiles of the goals; a longer --seconds makes them "
                "sure"
            )
        self.found.warnings = tuple(self._warnings)


def _lengths(calls: Sequence[Tokens]) -> str:
    """Return the lengths of calls in words."""
    prompt, cached, output = (sum(part) for part in zip(*calls, strict=True))
    return (
        f"lengths of {len(calls):,} calls in the ledger, on average {prompt / len(calls):.0f} tokens in "
        f"({cached / prompt:.0%} of them from the prefix cache), {output / len(calls):.0f} out"
    )
