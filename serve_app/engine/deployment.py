"""The Engine deployment: a language model and its batcher, behind a handle."""

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import ray
from msgspec import structs

from serve_app.api.errors import EngineLostError, RequestError, engine_failed
from serve_app.api.facts import facts_of_call
from serve_app.api.protocol import JSON, GenerateRequest, GenerateResponse, parse_generate
from serve_app.api.routes import GENERATE, unserved
from serve_app.engine.adapters import AdapterError
from serve_app.engine.answer import Answer
from serve_app.engine.autoscaling import autoscaling_stats
from serve_app.engine.job import Job
from serve_app.engine.openai import run, too_many_ids
from serve_app.engine.replica import (
    DRAIN_S,
    Replica,
    routing_stats,
)
from serve_app.engine.turns import EngineTurns
from serve_app.engine.watchdog import EngineWatch
from serve_app.quotas.client import Handle
from serve_app.settings.adapters import AdapterSettings
from serve_app.settings.models import LLMSettings
from serve_app.settings.telemetry import SILENT, TelemetrySettings
from serve_app.settings.turns import ShareSettings
from serve_app.settings.usage import NO_USAGE, UsageSettings
from serve_app.settings.user_config import parse_user_config
from serve_app.system.cpu_scheduling import RELAY_NICE, use_batch_scheduling
from serve_app.system.garbage_collection import collect_rarely
from serve_app.system.parent_death import tie_children
from serve_app.system.serve_logging import preserved_handlers
from serve_app.telemetry.catalogue import (
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    ROWS_DISPLACED,
    ROWS_LEFT_OUT,
    STEP_BOUND,
    STEP_SECONDS,
)
from serve_app.telemetry.meters import Meters
from serve_app.turns.board import LOCKED, Board
from serve_app.wire.request import RelayRequest

logger = logging.getLogger("ray.serve")

EXPIRED = 408
"""Status of a request or a prompt that can't start in time."""


class Engine(Replica):
    """One copy of a model: a vLLM engine and its batcher, built once, in the constructor.

    Args:
        settings: The model.
        max_prompts: Maximum prompts that one call may carry.
        telemetry: What is measured and logged.
        usage: Accounting of the calls, and the quotas of tenants.
        quotas: The handle of the Quotas deployment; None: there is none.
        share: The turns of the model's group; None: the model has a device of its own.
        salts: Whether each tenant has a part of the prefix cache of its own.
    """

    _turns: EngineTurns | None = None
    """Turns on a shared device; None: the model has a device of its own."""

    _multimodal = False
    """Whether the model takes media."""

    # Serve awaits a constructor that is a coroutine.
    async def __init__(  # type: ignore[misc]
        self,
        settings: LLMSettings,
        max_prompts: int,
        telemetry: TelemetrySettings = SILENT,
        usage: UsageSettings = NO_USAGE,
        quotas: Handle | None = None,
        share: ShareSettings | None = None,
        salts: bool = False,
    ) -> None:
        tie_children()
        if settings.simulate:
            logger.warning(
                "%s is simulated (%s): no model runs, and answers are letters without sense",
                settings.id,
                settings.simulate.name,
            )
        self._open(settings.id, telemetry, usage, quotas)
        self._max_prompts = max_prompts
        self._multimodal = settings.multimodal
        with preserved_handlers():
            # Imported only where a model is held: vLLM takes seconds and a gigabyte.
            from serve_app.engine.vllm.engine import VLLMEngine
            from serve_app.engine.vllm.sleep import check_sleep_mode, shared_devices

            if share is not None and settings.share is not None:
                check_sleep_mode(settings)
                devices = shared_devices(settings, ray.get_runtime_context().get_node_id())
                board = Board()
                os.environ[LOCKED] = str(board.file)
                self._turns = EngineTurns(settings.id, settings.share, devices, share, board)
                await self._turns.first()
            if settings.nodes > 1:
                from serve_app.engine.vllm.nodes import prepare

                prepare(settings)
            self._engine = VLLMEngine(
                settings,
                max_prompts=max_prompts,
                book=self._accounts.book,
                telemetry=telemetry,
                salts=salts,
            )
            self._app, self._routes = await self._engine.start()
            if share is not None and self._turns is not None:
                sleeper = await self._engine.sleeper(share)
                await self._turns.rehearse(sleeper, self._engine.batcher)
                self._turns.run(sleeper, self._engine.batcher)
        self._engine.door.unfit = self._unfit
        self._watch = EngineWatch(
            self._engine, settings.engine_hang_timeout_s, excused=self._ended, last=self._flush
        ).start()
        self._observe(telemetry, self._engine.batcher)
        # The engine's own processes are started by now, and keep the scheduling that they have.
        use_batch_scheduling(RELAY_NICE)
        collect_rarely()

    async def reconfigure(self, user_config: JSON) -> None:
        """Apply the `user_config` of the deployment: at the start, and whenever it alone has changed.

        Args:
            user_config: The fields of a `UserConfig`.

        Raises:
            SettingsError: It is wrong; the settings before it stay.
        """
        config = parse_user_config(user_config)
        await self._engine.adapters.declare(config.adapters)
        self._engine.tune(config.batcher)

    async def prepare_adapter(self, id: str, settings: AdapterSettings) -> str:
        """Load an adapter that `refresh_adapters` serves, if it is in the folder by then.

        Returns:
            The reason why it can't be; empty: it is loaded.
        """
        try:
            await self._engine.adapters.prepare(id, settings)
        except AdapterError as error:
            return str(error)
        return ""

    async def keep_adapter(self, id: str, settings: AdapterSettings | None) -> str:
        """Write an adapter to the folder, or remove it from there (None).

        Returns:
            The reason why it can't be; empty: it is done, durably.
        """
        return await self._engine.adapters.keep(id, settings)

    async def refresh_adapters(self) -> list[JSON]:
        """Take over the adapters of the folder, and return the served adapters.

        Raises:
            FolderError: It can't be read.
        """
        await self._engine.adapters.refresh()
        return self._engine.adapters.report()

    async def generate(self, request: GenerateRequest | JSON) -> JSON:
        """Complete a list of prompts.

        Args:
            request: A `GenerateRequest`, or an object with its fields.

        Returns:
            The fields of a `GenerateResponse`: what `POST /generate` answers.

        Raises:
            RequestError: The request is wrong, or can't be served now.
            EngineLostError: vLLM's engine died while it had the request.
        """
        if not isinstance(request, GenerateRequest):
            request = parse_generate(request, max_prompts=self._max_prompts)
        call = request
        adapter = "" if request.model in (None, self._id) else request.model
        facts = facts_of_call(request, self._engine.default_output)
        scheduling = request.scheduling()
        job = self._job(
            RelayRequest(
                "POST", GENERATE, b"", [], b"", scheduling, facts=facts, adapter=adapter, source="handle"
            )
        )
        try:
            with self._accounted(job):
                self._check(job)
                if self._limited(job):
                    await self._reserve(job)
                response = await self._generated(job, lambda: call)
        except RequestError:
            if self._lost(job):
                raise EngineLostError from None
            raise
        return response.model_dump(exclude_unset=True)

    async def stats(self) -> JSON:
        """Return the batcher's statistics, rates, the engine's limits and goals, and the usage so far."""
        turn = {} if self._turns is None else {"turn": self._turns.stats()}
        return self._entry(
            max_model_len=self._engine.max_model_len,
            max_num_batched_tokens=self._engine.max_num_batched_tokens,
            load_s=self._engine.load_s,
            goals=self._engine.goals,
            scheduler=self._engine.scheduler,
            adapters=self._engine.adapters.report(),
            **turn,
        )

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the tokens that this replica holds; Serve calls the method by this name."""
        return autoscaling_stats(self._engine.batcher.stats)

    def record_routing_stats(self) -> dict[str, Any]:
        """Return what this replica holds, by which callers choose; Serve calls it by this name."""
        asleep = self._turns is not None and self._turns.asleep
        return routing_stats(self._held, self._engine.adapters.slots.resident, asleep=asleep)

    def record_replica_metadata(self) -> dict[str, int]:
        """Return the size of the KV cache in tokens, and the slots; Serve calls it by this name, once."""
        return {
            "token_capacity": self._engine.batcher.capacity,
            "adapter_slots": self._engine.adapters.slots.count,
        }

    def _job(self, request: RelayRequest) -> Job:
        facts = request.facts
        if request.path == GENERATE and facts.output is None:
            request = replace(request, facts=structs.replace(facts, output=self._engine.default_output))
        return Job(request)

    async def _answer(self, job: Job, answer: Answer) -> None:
        if job.request.path == GENERATE:
            body, most = job.request.body, self._max_prompts
            response = await self._generated(job, lambda: parse_generate(body, max_prompts=most))
            answer.complete(response.model_dump_json(exclude_unset=True).encode())
        else:
            await self._engine.door.admit(job)
            await run(self._app, job, answer)

    async def _generated(self, job: Job, parse: Callable[[], GenerateRequest]) -> GenerateResponse:
        """Return the answer to a call of `/generate`, or of the handle.

        Args:
            job: The job.
            parse: Returns the request; a large one takes time, so it is not parsed before it has entered.
        """
        late = None
        try:
            await self._engine.door.enter(job)
        except RequestError as error:
            if error.status != EXPIRED:
                raise
            # A call may be `partial`: then the error is the prompt's.
            late = error
        return await self._engine.generate.run(job, parse(), late)

    def _check(self, job: Job) -> None:
        """Raise a RequestError for a job that this model doesn't serve, or that is too large for it."""
        most = self._engine.max_tokenize_tokens
        if refusal := self._unserved(job.request.path) or too_many_ids(job.request, most):
            raise refusal
        # A chat with media fails alone in a call of `/generate`.
        if (kind := job.facts.media) and not self._multimodal and job.request.path != GENERATE:
            message = (
                f"{kind!r} parts are not taken by this model, whose setting `multimodal` is not true; "
                "send text alone"
            )
            raise RequestError(400, "invalid_request_error", message)

    def _refusal(self, job: Job) -> RequestError | None:
        if self._engine.died:
            return engine_failed()
        # A call of `/generate` may be `partial`: then a failure is a prompt's.
        return None if job.request.path == GENERATE else job.failure

    @property
    def _died(self) -> bool:
        return self._engine.died

    @property
    def _counted(self) -> Mapping[str, int]:
        counts = self._engine.stats
        return {"prompt": counts.prompt, "output": counts.output, "preempted": counts.preemptions}

    @property
    def _context(self) -> int | None:
        return self._engine.max_model_len

    def _unfit(self) -> RequestError | None:
        """Return why no request can be served here; None: they can."""
        if self._turns is not None and (refusal := self._turns.refusal):
            return refusal
        return engine_failed() if self._engine.died else None

    def _unserved(self, path: str) -> RequestError | None:
        """Return why a route is not served by this model; None: it is."""
        return None if path in self._routes else unserved(self._id, path, self._routes)

    def _ended(self) -> bool:
        """Return whether the engine was ended on purpose."""
        return self._turns is not None and self._turns.refusal is not None

    def _flush(self) -> None:
        """Write the rows that the ledger doesn't have yet."""
        self._accounts.flush()

    async def check_health(self) -> None:
        """Raise if the engine or its watchdog has died, so that Serve replaces this replica."""
        self._watch.check()
        if self._turns is not None:
            self._turns.check_health()
            if self._turns.refusal:
                return
        await self._engine.check_health()

    async def __del__(self) -> None:
        if engine_watch := getattr(self, "_watch", None):
            engine_watch.stop()
        if self._turns is not None:
            self._turns.stop()
        if engine := getattr(self, "_engine", None):
            await engine.stop(DRAIN_S)
        await self._close()

    def _metrics(self, meters: Meters) -> Callable[[], None]:
        counters, shared = self._engine.stats, super()._metrics(meters)

        def report() -> None:
            shared()
            meters.count(PROMPT_TOKENS, counters.prompt, self._id)
            meters.count(OUTPUT_TOKENS, counters.output, self._id)
            counters.report()
            self._engine.check_goals()
            if (figures := self._engine.scheduler) is not None:
                meters.record(STEP_BOUND, figures.bound_s or 0.0, self._id)
                meters.count(ROWS_LEFT_OUT, figures.left_out, self._id)
                meters.count(ROWS_DISPLACED, figures.displaced, self._id)
                for part, seconds in figures.step_s:
                    meters.record(STEP_SECONDS, seconds, self._id, part)
            if (turns := self._turns) is not None:
                turns.report(meters)

        return report
