"""One run of `saturate tune`: the load steps, the choice of settings, and their application."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import click

from serve_app.cli.tune_config import RunningConfig
from serve_app.client import ServiceError
from serve_app.system.progress import Progress
from serve_app.tuning.goals import Goal
from serve_app.tuning.load import Generator, LoadLevel, LoadStep, Prompt, Requests
from serve_app.tuning.service import ModelFacts, Service
from serve_app.tuning.tune_report import BesideBatch, Tuning, line
from serve_app.tuning.tuner import MARGIN, Tuner, choose, is_small
from serve_app.tuning.workload import TokenLengths
from serve_app.wire.usage import Tokens

STEPS_DOWN = 4
"""Most times that the rate is lowered while the goals don't hold with the settings."""

IDLE_LOOKS, IDLE_S = 10, 0.2
"""Most polls for an idle service before the first step, and the seconds between polls."""

OTHERS = 0.02
"""Other requests as a share of the sent requests, above which a warning reports them."""

LATE_S = 0.1
"""Delay of a request's send time above which a warning reports it, in seconds."""

AT_THE_LIMIT = 0.9
"""Running requests as a share of `max_running`, from which the limit itself may have bounded the load."""

BATCH_CLIENTS = 2
"""Clients of the batch load per request that may run."""


@dataclass(frozen=True, slots=True)
class TuneOptions:
    """The options of a run.

    Attributes:
        url: URL of the service.
        model: The model; None: the service's only model.
        key: The API key; None: no key.
        input: Tokens of a prompt.
        output: Tokens of an answer.
        prompts: Prompts of a dataset; empty: random prompts.
        ledger: Lengths of calls by model, in place of `input` and `output`; None: use `input` and `output`.
        goals: The goals.
        seconds: Length of a step.
        loop: Kinds of load to search: open, closed or both.
        rate: The rate to measure; None: search for the highest rate.
        concurrency: The number of clients to measure; None: search for the highest number.
        seed: Seed of the random numbers.
        beside_batch: Whether to measure `rate` beside batch work.
    """

    url: str
    model: str | None
    key: str | None
    input: TokenLengths
    output: TokenLengths
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
            click.UsageError: The ledger has no calls of the model.
        """
        if self.ledger is None:
            return Requests(model, self.input, self.output, self.prompts, tier=tier)
        calls = self.ledger.get(model)
        if not calls:
            others = ", ".join(sorted(self.ledger)) or "none"
            raise click.UsageError(
                f"--ledger: no answered call of {model} in this time (models with calls: {others}); use an "
                "earlier --since, or --input and --output"
            )
        input, output = (
            TokenLengths(sum(getattr(call, part) for call in calls) / len(calls))
            for part in ("prompt", "output")
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
    """A run of `saturate tune`.

    Attributes:
        found: The result so far.

    Args:
        question: The options.
        config: The config to apply the settings to; None: don't apply them.
        progress: Shows the progress.
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
        """Run the tuning.

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
                self.found.requests = _lengths(requests.calls)
            async with self._generator(service, requests, question.goals) as generator:
                # A model without replicas starts a replica for the first request.
                self._progress.show(f"the first answer of {model}")
                await service.first_answer(model)
                facts = await self._idle(generator)
                await self._steps(generator, facts)
                await self._end(generator, facts)
                if question.beside_batch:
                    await self._beside(service, generator, facts)

    async def _steps(self, generator: Generator, facts: ModelFacts) -> None:
        """Run the load steps, and choose the settings."""
        question, found = self._question, self.found
        tuner = self._tuner(generator)
        found.lone = await tuner.lone()
        single = []
        if question.concurrency is not None:
            single.append(LoadLevel("closed", question.concurrency))
        if question.rate is not None:
            single.append(LoadLevel("open", question.rate))
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
                    f"max_running, now {facts.max_num_seqs}, may bound the load; the service may hold more "
                    "with a higher max_running, or without it"
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
            step = await tuner.measure(LoadLevel("open", choice.rate))
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

    async def _beside(self, service: Service, generator: Generator, facts: ModelFacts) -> None:
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
            # At first all requests of the batch work process their prompts.
            await asyncio.sleep(min(question.seconds, 10.0))
            began = clock()
            live = await tuner.measure(LoadLevel("open", question.rate))
            ended = clock()
            # Wait for the answers in flight: their tokens belong to the measured time.
            await asyncio.sleep(min(question.seconds, 2 * self._life_s()))
            tokens = batch.tokens_between(began, ended)
        self.found.batch = BesideBatch(live, tokens / max(ended - began, 1e-9))

    def _life_s(self) -> float:
        """Return the seconds of a lone request; 0 if unknown."""
        return 0.0 if self.found.lone is None else self.found.lone.median("latency")

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

    def _tell(self, load: LoadLevel, step: LoadStep | None) -> None:
        if step is None:
            self._progress.show(f"{load}, {self._question.seconds:g} s")
            return
        self._progress.end(line(step))
        self._late_s = max(self._late_s, step.late_s)
        self._small |= is_small(step) and step.load.loop == "open"

    async def _idle(self, generator: Generator) -> ModelFacts:
        """Return the facts; add a warning if the service has other work."""
        for _ in range(IDLE_LOOKS):
            facts = await generator.facts()
            if not facts.in_flight:
                return facts
            await asyncio.sleep(IDLE_S)
        self._warnings.append(
            f"{facts.in_flight} other requests run or wait; the figures are for the remaining capacity"
        )
        return facts

    async def _end(self, generator: Generator, before: ModelFacts) -> None:
        """Add warnings about other requests and changed replicas."""
        try:
            after = await generator.facts()
        except ServiceError:
            return
        others = after.submitted - before.submitted - generator.sent
        if others > OTHERS * generator.sent:
            self._warnings.append(f"{others} other requests ran during the steps, which raised the load")
        if after.replicas != before.replicas:
            self._warnings.append(
                f"the model had {before.replicas} replicas at first and has {after.replicas} now: measure "
                "with a fixed number, and scale by target_ongoing_requests"
            )

    def _note(self) -> None:
        if self._late_s > LATE_S:
            self._warnings.append(
                f"requests were sent up to {self._late_s:.2f} s late: this machine is too slow for the load; "
                "run the command on another machine, or use a generator with several processes"
            )
        if self._small:
            self._warnings.append(
                "steps had too few requests for the percentiles of the goals; use a longer --seconds"
            )
        self.found.warnings = tuple(self._warnings)


def _lengths(calls: Sequence[Tokens]) -> str:
    """Return a text about the lengths of calls."""
    prompt, cached, output = (sum(part) for part in zip(*calls, strict=True))
    return (
        f"lengths of {len(calls):,} calls in the ledger, on average {prompt / len(calls):.0f} tokens in "
        f"({cached / prompt:.0%} from the prefix cache), {output / len(calls):.0f} out"
    )
