"""The Engine deployment: a language model and its batcher, behind a handle."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager, nullcontext
from typing import Any

from serve_app.api.errors import EngineLostError, RequestError, engine_failed
from serve_app.api.protocol import JSON, GenerateRequest, parse_generate
from serve_app.api.routes import GENERATE, unserved
from serve_app.api.token_bound import NOTHING
from serve_app.api.token_estimate import estimate_call
from serve_app.engine.adapters import AdapterError
from serve_app.engine.autoscaling import autoscaling_stats
from serve_app.engine.engine_watch import EngineWatch
from serve_app.engine.generation import Generation
from serve_app.engine.grammar_check import GrammarCheck
from serve_app.engine.loop_watch import LoopWatch
from serve_app.engine.openai_answers import OpenAIAnswers
from serve_app.engine.quotas import CallQuotas, generate_demand
from serve_app.engine.replica import (
    DRAIN_S,
    answer,
    device_name,
    origin_of,
    replica_name,
    replica_stats,
    replica_tag,
    routing_stats,
    usage_stats,
)
from serve_app.engine.turns import EngineTurns, Place, asking
from serve_app.engine.usage_metrics import UsageMetrics
from serve_app.ledger.calls import Call, Origin
from serve_app.ledger.writer import ledger_of, new_book, start_writer
from serve_app.quotas.handle import Handle
from serve_app.relay.frame import LOST, pack_error, split
from serve_app.relay.keepalive import with_keepalive
from serve_app.relay.request import RelayRequest
from serve_app.relay.usage import RequestUsage
from serve_app.settings.adapters import AdapterSettings
from serve_app.settings.models import LLMSettings
from serve_app.settings.telemetry import SILENT, TelemetrySettings
from serve_app.settings.turns import ShareSettings
from serve_app.settings.usage import NO_USAGE, UsageSettings
from serve_app.settings.user_config import parse_user_config
from serve_app.system.cpu_scheduling import RELAY_NICE, use_batch_scheduling
from serve_app.system.garbage_collection import collect_rarely
from serve_app.system.parent_death import tie_children
from serve_app.system.serve_logging import flush_warnings, preserved_handlers
from serve_app.telemetry.catalogue import LOOP_HELD, OUTPUT_TOKENS, PROMPT_TOKENS
from serve_app.telemetry.engine import EngineTelemetry
from serve_app.telemetry.meters import Meters

logger = logging.getLogger("ray.serve")


class Engine:
    """One copy of a model: a vLLM engine and its batcher, built once, in the constructor.

    Args:
        settings: The model.
        max_prompts: Most prompts that one call may carry.
        telemetry: What is measured and logged.
        usage: Accounting of the calls, and the quotas of tenants.
        quotas: The handle of the Quotas deployment; None: there is none.
        share: The turns of the model's group; None: it has a device of its own.
        turns: The handle of the Turns deployment, if it shares one.
    """

    _held = 0
    """Tokens of the calls that this replica answers, as their callers estimate them."""

    _quotas = CallQuotas()
    """Quotas of tenants; by default there are none."""

    _turns: EngineTurns | None = None
    """Turns on a shared device; None: it has one of its own."""

    # Serve awaits a constructor that is a coroutine.
    async def __init__(  # type: ignore[misc]
        self,
        settings: LLMSettings,
        max_prompts: int,
        telemetry: TelemetrySettings = SILENT,
        usage: UsageSettings = NO_USAGE,
        quotas: Handle | None = None,
        share: ShareSettings | None = None,
        turns: Handle | None = None,
    ) -> None:
        tie_children()
        flush_warnings()
        if settings.simulate:
            logger.warning(
                "%s is simulated (%s): no model runs, and answers are letters without sense",
                settings.id,
                settings.simulate.name,
            )
        self._id = settings.id
        self._max_prompts = max_prompts
        self._tenants = telemetry.tenants
        self._book = new_book(settings.id, replica_tag())
        self._writer = start_writer(usage, self._book)
        self._default_output = settings.sampling.max_tokens
        self._quotas = CallQuotas(usage.quotas, quotas, replica_tag())
        with preserved_handlers():
            # Imported only where a model is held: vLLM takes seconds and a gigabyte.
            from serve_app.engine.vllm.engine import VLLMEngine
            from serve_app.engine.vllm.sleep import check_sleep_mode

            if share is not None and turns is not None and settings.share is not None:
                check_sleep_mode(settings)
                place = Place(settings.share, device_name(), replica_name(), settings.id)
                self._turns = EngineTurns(place, asking(turns))
                await self._turns.first()
            with self._turns.loading() if self._turns is not None else nullcontext():
                self._engine = VLLMEngine(
                    settings,
                    max_prompts=max_prompts,
                    book=self._book,
                    metrics=telemetry.metrics and telemetry.engine_metrics,
                    exact=usage.ledger is not None,
                )
                app, self._routes = await self._engine.start()
                if share is not None and self._turns is not None:
                    sleeper = await self._engine.sleeper(share)
                    await self._turns.rehearse(sleeper)
            if share is not None and self._turns is not None:
                self._turns.run(sleeper, self._engine.batcher)
        vocabulary = await asyncio.to_thread(self._engine.grammar_vocabulary)
        self._grammars = GrammarCheck(settings.grammar_cpu_s, settings.grammar_compile_cpu_s, vocabulary)
        self._engine.check_grammars(self._grammars)
        self._starting = asyncio.create_task(self._grammars.start())
        # Bound methods: one step less for each request.
        self._generate = Generation(self._engine.prompts, self._engine.completions).run
        self._answer_openai = OpenAIAnswers(
            app, self._engine, self._grammars, ready_at=time.monotonic()
        ).answer
        self._watch = EngineWatch(
            self._engine, settings.engine_hang_timeout_s, excused=self._ended, last=self._flush
        )
        self._loop_watch = LoopWatch().start()
        self._telemetry = EngineTelemetry(telemetry, settings.id, self._engine.batcher, self._engine_metrics)
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
        """Take over the adapters that the folder has, and return those that are served.

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
        with self._holding(estimate_call(request)):
            if not isinstance(request, GenerateRequest):
                request = parse_generate(request, max_prompts=self._max_prompts)
            if refusal := self._unfit() or self._unserved(GENERATE):
                raise refusal
            adapter = "" if request.model in (None, self._id) else request.model
            if adapter:
                await self._engine.adapters.check(adapter)
            usage, scheduling = RequestUsage(), request.scheduling()
            demand = generate_demand(request, self._default_output) if self._quotas.on else NOTHING
            context = self._engine.max_model_len
            origin = Origin(
                tenant=scheduling.tenant,
                priority=scheduling.priority,
                endpoint="generate",
                source="handle",
                adapter=adapter,
            )
            try:
                async with self._quotas.reserved(scheduling.tenant, demand, context, usage):
                    with self._accounted(origin) as call:
                        response = await self._generate(request, scheduling, usage, call, adapter)
            except RequestError:
                if self._engine.died:
                    raise EngineLostError from None
                raise
            return response.model_dump(exclude_unset=True)

    async def relay(self, request: RelayRequest) -> AsyncGenerator[bytes, None]:
        """Answer an HTTP request, as relay messages."""
        began = time.monotonic()
        usage = RequestUsage()
        if refusal := self._unfit():
            # The request was not there when it happened, so it may be tried on any other engine.
            yield pack_error(refusal, request.path)
            return
        if request.adapter:
            try:
                await self._engine.adapters.check(request.adapter)
            except RequestError as error:
                yield pack_error(error, request.path)
                return
        try:
            with self._holding(request.tokens), self._accounted(origin_of(request)) as call:
                if refusal := self._unserved(request.path):
                    yield pack_error(refusal, request.path)
                    return
                if request.path == GENERATE:
                    messages = with_keepalive(self._answer_generate(request, usage, call))
                else:
                    messages = self._answer_openai(request, began, usage, call)
                async with aclosing(messages):
                    async for message in messages:
                        for part in split(message, request.path):
                            yield part
        finally:
            self._telemetry.answered(request.headers, began, usage)

    async def stats(self) -> JSON:
        """Return the batcher's statistics, the engine's limits, and the usage since the start."""
        usage: JSON = usage_stats(self._book, self._tenants)
        if counters := self._engine.counters:
            # For a comparison: the ledger counts by call, vLLM by step.
            usage["engine"] = {"prompt": counters.prompt, "output": counters.output}
        turn = {} if self._turns is None else {"turn": self._turns.stats()}
        return replica_stats(
            self._engine.batcher.stats,
            max_model_len=self._engine.max_model_len,
            usage=usage,
            adapters=self._engine.adapters.report(),
            **turn,
        )

    async def describe(self) -> JSON:
        """Return the version of vLLM, and the OpenAPI document of its routes that clients may call."""
        return await asyncio.to_thread(self._engine.describe)

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
        """Write what the ledger has not got yet."""
        if self._writer is not None:
            self._writer.flush()

    @contextmanager
    def _holding(self, tokens: int) -> Iterator[None]:
        self._held += tokens
        try:
            yield
        finally:
            self._held -= tokens

    @contextmanager
    def _accounted(self, origin: Origin) -> Iterator[Call]:
        """Account for the work of a call."""
        call = self._book.open(origin)
        try:
            yield call
        finally:
            call.close("lost" if self._engine.died else "ok")

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
            self._starting.cancel()
            await self._grammars.stop()
        if watch := getattr(self, "_loop_watch", None):
            watch.stop()
        if self._turns is not None:
            self._turns.stop()
        if engine := getattr(self, "_engine", None):
            await engine.stop(DRAIN_S)
        if writer := getattr(self, "_writer", None):
            await asyncio.to_thread(writer.stop)
        if telemetry := getattr(self, "_telemetry", None):
            telemetry.stop()
        if quotas := getattr(self, "_quotas", None):
            quotas.stop()

    def _engine_metrics(self, meters: Meters) -> Callable[[], None]:
        engine, model, watch = self._engine, self._id, self._loop_watch

        usage = UsageMetrics(self._book, ledger_of(self._writer), meters, self._tenants)

        def report() -> None:
            usage()
            meters.count(PROMPT_TOKENS, engine.llm.prompt_tokens, model)
            meters.count(OUTPUT_TOKENS, engine.batcher.stats.output_tokens, model)
            meters.record(LOOP_HELD, watch.take_longest(), model)
            engine.report_metrics()

        return report

    async def _answer_generate(self, relayed: RelayRequest, usage: RequestUsage, call: Call) -> bytes:
        message = await answer(self._generate_json(relayed, usage, call), usage, relayed)
        return LOST if self._engine.died else message

    async def _generate_json(self, relayed: RelayRequest, usage: RequestUsage, call: Call) -> bytes:
        request = parse_generate(relayed.body, max_prompts=self._max_prompts)
        response = await self._generate(
            request,
            relayed.scheduling_now(),
            usage,
            call,
            relayed.adapter,
            relayed.max_tokens,
            len(relayed.body),
        )
        return response.model_dump_json(exclude_unset=True).encode()
