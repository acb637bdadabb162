"""The base of all replicas of models: the way of a call, and the entry in `/stats`."""

import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from functools import partial, reduce
from typing import Any

from ray import serve
from ray.serve.exceptions import RayServeException

from batcher import ContinuousBatcher, DynamicBatcher
from serve_app.api.errors import FAULT, RequestError, internal_error
from serve_app.api.headers import request_id
from serve_app.api.protocol import JSON
from serve_app.engine.accounts import Accounts
from serve_app.engine.answer import Answer
from serve_app.engine.job import Job
from serve_app.engine.watchdog import LoopWatch
from serve_app.ledger.calls import OTHER, CallBook, Sums
from serve_app.ledger.metrics import UsageMetrics
from serve_app.quotas.client import Handle
from serve_app.settings.telemetry import TelemetrySettings
from serve_app.settings.usage import UsageSettings
from serve_app.stats import replica_body
from serve_app.system.serve_logging import flush_warnings
from serve_app.telemetry.catalogue import LOOP_HELD, QUOTA_UNLIMITED
from serve_app.telemetry.engine import EngineTelemetry
from serve_app.telemetry.meters import Meters
from serve_app.wire.frame import pack
from serve_app.wire.request import RelayRequest

logger = logging.getLogger("ray.serve")

DRAIN_S = 30.0
"""Seconds that a replica which stops gives to the requests that it has admitted."""


SAMPLES = 3
"""Samples of the counters, one a second: rates are taken over the last two to three seconds."""


class Growth:
    """Growth of counters per second, since the oldest of the last samples.

    Args:
        count: Returns the counters by name.
        clock: Monotonic clock, in seconds.
    """

    def __init__(
        self, count: Callable[[], Mapping[str, float]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._count = count
        self._clock = clock
        self._samples = deque([(clock(), count())], maxlen=SAMPLES)

    def sample(self) -> None:
        """Keep the counters as they are now; called once a second."""
        self._samples.append((self._clock(), self._count()))

    def per_s(self) -> tuple[float, dict[str, float]]:
        """Return the seconds since the oldest sample, and the growth per second by counter, at least 0."""
        then, before = self._samples[0]
        passed = self._clock() - then
        grown = {name: max(0.0, value - before.get(name, 0)) for name, value in self._count().items()}
        return passed, {name: more / passed if passed > 0 else 0.0 for name, more in grown.items()}


class Replica:
    """A replica of a model: accounts, quotas and answers, whatever runs the model.

    A subclass calls `_open` when it begins to start, and `_observe` once it has a batcher.
    """

    _held = 0
    """Tokens of the calls that this replica answers, as their callers estimate them."""

    def _open(
        self, model: str, telemetry: TelemetrySettings, usage: UsageSettings, quotas: Handle | None
    ) -> None:
        """Open the accounts.

        Args:
            model: Id of the model.
            telemetry: What is measured and logged.
            usage: Accounting of the calls, and the quotas of tenants.
            quotas: The handle of the Quotas deployment; None: there is none.
        """
        flush_warnings()
        self._id = model
        self._tenants = telemetry.tenants
        self._accounts = Accounts(model, replica_tag(), usage, quotas)

    def _observe(
        self, telemetry: TelemetrySettings, batcher: ContinuousBatcher | DynamicBatcher[Any, Any]
    ) -> None:
        """Begin to measure."""
        self._loop_watch = LoopWatch().start()
        self._observed = batcher
        self._growth = Growth(self._counters)
        self._telemetry = EngineTelemetry(
            telemetry, self._id, batcher, self._metrics, tick=self._growth.sample
        )

    async def _close(self) -> None:
        """Write the remaining rows, as far as the replica has been built."""
        if watch := getattr(self, "_loop_watch", None):
            watch.stop()
        if accounts := getattr(self, "_accounts", None):
            await accounts.stop()
        if telemetry := getattr(self, "_telemetry", None):
            telemetry.stop()

    # Decisions of a subclass

    async def _answer(self, job: Job, answer: Answer) -> None:
        """Make the answer to a job that its quotas allow.

        Raises:
            RequestError: The job can't be served.
        """
        raise NotImplementedError

    def _job(self, request: RelayRequest) -> Job:
        """Return a new job."""
        return Job(request)

    def _check(self, job: Job) -> None:
        """Raise a RequestError for a job that needs no quota to be refused."""

    def _refusal(self, job: Job) -> RequestError | None:
        """Return why a job has failed, whatever its answer says; None: it hasn't."""
        return None

    def _lost(self, job: Job) -> bool:
        """Return whether the engine has died while it had the job; a job that it never had is not suspect."""
        return self._died and job.admitted

    @property
    def _died(self) -> bool:
        """Whether the engine has died."""
        return False

    @property
    def _context(self) -> int | None:
        """Context of the model, in tokens; None: it has none."""
        return None

    @property
    def _counted(self) -> Mapping[str, int] | None:
        """The counts of the engine since its start, the fields of `EngineTokens`; None: a function."""
        return None

    def _metrics(self, meters: Meters) -> Callable[[], None]:
        """Return a job of the telemetry, which is called once a second."""
        usage = UsageMetrics(self._accounts.book, self._accounts.ledger, meters, self._tenants)

        def report() -> None:
            usage()
            if self._accounts.unlimited is not None:
                meters.count(QUOTA_UNLIMITED, self._accounts.unlimited, self._id)
            meters.record(LOOP_HELD, self._loop_watch.take_longest(), self._id)

        return report

    # Statistics

    def _counters(self) -> dict[str, float]:
        """Return the counters that have rates in `/stats`."""
        stats = self._observed.stats
        tenants = self._accounts.book.by_tenant()
        return {
            "requests": stats.total_completed,
            "busy": stats.busy_time_s,
            **(self._counted or {}),
            **{f"tenant {name}": sums.prompt + sums.output for name, sums in tenants.items()},
        }

    def _entry(self, **more: Any) -> JSON:
        """Return the entry of `/stats`.

        Args:
            more: Other fields of `ReplicaStats`.
        """
        over_s, growth = self._growth.per_s()
        rates = {"over_s": over_s, "requests_per_s": growth["requests"], "busy": min(1.0, growth["busy"])}
        usage = usage_stats(self._accounts.book, self._tenants, growth)
        if counted := self._counted:
            rates |= {f"{name}_tokens_per_s": growth[name] for name in ("prompt", "output")}
            # For a comparison: the ledger counts by call, vLLM by step.
            usage["engine"] = dict(counted)
        return replica_body(replica_tag(), self._observed.stats, rates=rates, usage=usage, **more)

    # The way of a call

    async def relay(self, request: RelayRequest) -> AsyncGenerator[bytes, None]:
        """Answer an HTTP request, as messages."""
        job = self._job(request)
        answer = Answer(request, job.usage, refusal=lambda: self._refusal(job), lost=lambda: self._lost(job))
        with self._accounted(job):
            async with aclosing(answer.pieces(self._make(job, answer))) as pieces:
                async for piece in pieces:
                    for message in pack(piece, request.path):
                        yield message

    async def _make(self, job: Job, answer: Answer) -> None:
        """Make the answer to a job, or its error."""
        try:
            self._check(job)
            if self._limited(job):
                try:
                    await self._reserve(job)
                finally:
                    assert job.call is not None
                    answer.headers = self._accounts.headers(job.call)
            await self._answer(job, answer)
        except RequestError as error:
            answer.fail(error)
        except Exception as error:
            # The answer fails with it, and a fault of the service is logged with its stack.
            if answer.ended:
                # A failure behind the answer is not the answer's.
                return
            if self._refusal(job) is None:
                # Logged with its stack below. The application fails too where a job was refused.
                job.fault = job.fault or error
            if not self._died and not answer.fail(job.failure or internal_error(error)):
                raise
        finally:
            if job.fault is not None and not self._died:
                id = request_id(job.request.headers)
                logger.error(FAULT, id, job.request.path, exc_info=job.fault)
            # Its frames hold what the request holds, a slot of the batcher among it.
            job.fault = None

    def _limited(self, job: Job) -> bool:
        """Return whether a job may have a quota."""
        assert job.call is not None
        return self._accounts.limits(job.call)

    async def _reserve(self, job: Job) -> None:
        """Reserve the quotas that a job needs.

        Raises:
            RequestError: They don't allow it.
        """
        assert job.call is not None
        await self._accounts.reserve(job.call, self._context)
        job.more = partial(self._accounts.reserve_more, job.call)

    @contextmanager
    def _accounted(self, job: Job) -> Iterator[None]:
        """Account for a job, and end its remaining work."""
        tokens = job.facts.tokens
        self._held += tokens
        call = job.call = self._accounts.open(job.request, job.usage)
        failure: BaseException | None = None
        try:
            yield
        except BaseException as raised:
            # GeneratorExit or CancelledError: the client has left.
            failure = raised
            raise
        finally:
            self._held -= tokens
            if job.slot is not None and not job.placed:
                # The slot of a prompt is given back at the prompt's end, which may come later.
                job.slot.release(failure or job.failure)
            call.admitted = job.admitted and job.failure is None
            call.close("lost" if self._died else "ok")


def replica_tag() -> str:
    """Return the name of this replica; empty outside Ray Serve."""
    try:
        return str(serve.get_replica_context().replica_tag)
    except RayServeException:
        return ""


def usage_stats(book: CallBook, tenants: int, growth: Mapping[str, float]) -> JSON:
    """Return the usage in a replica's entry of `/stats`: sums since its start.

    Args:
        book: Its calls.
        tenants: Maximum tenants with sums of their own; tenants with less share `other`.
        growth: Tokens per second, by `tenant NAME`.
    """
    sums = book.by_tenant()
    # Work that nobody has asked for, such as the warm-up, has no tenant.
    own = sums.pop("", Sums())
    rates = {name: growth.get(f"tenant {name}", 0.0) for name in sums}
    largest = sorted(sums, key=lambda name: -_size(sums[name]))
    shown = {name: sums[name] for name in largest[:tenants] if name != OTHER}
    rest = [name for name in sums if name not in shown]
    if rest:
        shown[OTHER] = reduce(Sums.plus, map(sums.__getitem__, rest))
        rates[OTHER] = sum(map(rates.__getitem__, rest))
    return {
        "tenants": {name: each._asdict() | {"tokens_per_s": rates[name]} for name, each in shown.items()},
        "own": own._asdict(),
    }


def _size(sums: Sums) -> int:
    return sums.prompt + sums.output + sums.cost


def routing_stats(tokens: int, adapters: Sequence[str] = (), *, asleep: bool = False) -> dict[str, Any]:
    """Return a replica's report, by which Ingresses choose between replicas.

    Ray Serve sends a report that has changed to every process with a handle, so the tokens are rounded to
    three binary digits: a steady load changes nothing.

    Args:
        tokens: Tokens that it holds, as their callers estimate them.
        adapters: Adapters that are loaded.
        asleep: Whether it sleeps, while another model has its device.
    """
    step = 1 << max(0, tokens.bit_length() - 3)
    report: dict[str, Any] = {"tokens": (tokens + step // 2) // step * step}
    return report | ({"adapters": sorted(adapters)} if adapters else {}) | ({"asleep": 1} if asleep else {})
