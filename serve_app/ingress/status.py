"""Status of the service: health from Ray Serve's controller, and the statistics of replicas."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import ApplicationStatusOverview, DeploymentStatusOverview
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from serve_app.api.protocol import JSON
from serve_app.auth.key_store import Caller
from serve_app.ingress.context import context_of
from serve_app.ingress.pages import to_live_view, wants_page
from serve_app.quotas.counters import key_subject, tenant_subject
from serve_app.stats import ModelHealth, ReplicaStats, total_of, uses_of
from serve_app.system import cancellation

logger = logging.getLogger("ray.serve")

MAX_AGE_S = 2.0
"""Seconds for which a status is used again, so that probes don't load the controller."""

MAX_AGE_AWAITED_S = 0.5
"""The same while a model is not ready."""

ANSWER_S = 10.0
"""Seconds that Ray Serve's controller has to answer."""

TIMEOUT_S = 5.0
"""Seconds that a replica has to answer."""

BATCHES = "Batches"
"""Name of the deployment of files and batches."""

QUOTAS = "Quotas"
"""Name of the deployment of the quotas."""


def engine_name(model: str) -> str:
    """Return the name of a model's deployment."""
    return f"Engine:{model}"


@dataclass(slots=True, frozen=True)
class ModelState:
    """The health of one model.

    Attributes:
        running: Replicas that can serve.
        asleep: It is scaled to zero; the next request starts a replica.
        awaits: The missing part, in Serve's words; empty when ready.
    """

    running: int
    asleep: bool
    awaits: str

    @property
    def ready(self) -> bool:
        """True if a request would be served."""
        return self.running > 0 or self.asleep


@dataclass(slots=True, frozen=True)
class HealthReport:
    """The health of all models of the application.

    Attributes:
        models: The models by name.
        simulated: Profiles of models on a simulated device, by name.
        others: Replicas that can serve of the deployments `BATCHES` and `QUOTAS`, by name.
    """

    models: dict[str, ModelState]
    simulated: Mapping[str, str] = field(default_factory=dict)
    others: Mapping[str, int] = field(default_factory=dict)

    @property
    def ready(self) -> bool:
        """True if any model would serve a request."""
        return any(model.ready for model in self.models.values())

    @property
    def all_ready(self) -> bool:
        """True if every model would serve a request."""
        return all(model.ready for model in self.models.values())

    def replicas(self, model: str) -> int:
        """Return how many replicas of a model can serve."""
        return self.models[model].running

    def body(self) -> JSON:
        """Return the report as JSON; `status` is "ok" when all models are ready, "partial" when some are."""
        models: JSON = {}
        for name, model in self.models.items():
            state = "ready" if model.running else "asleep" if model.asleep else "starting"
            models[name] = {"state": state, "replicas": model.running}
            if name in self.simulated:
                models[name]["simulated"] = self.simulated[name]
            if not model.ready:
                models[name]["awaits"] = model.awaits
        return {
            "status": "ok" if self.all_ready else "partial" if self.ready else "starting",
            "models": models,
        }


class Health:
    """Reads the state of the models' deployments.

    Args:
        app: The Serve application.
        models: The ids of its models.
        simulated: Profiles of models on a simulated device, by id.
    """

    def __init__(self, app: str, models: list[str], simulated: Mapping[str, str] | None = None) -> None:
        self._app = app
        self._models = models
        self._simulated = simulated or {}
        self._report: HealthReport | None = None
        self._read_at = float("-inf")
        self._asking: asyncio.Future[HealthReport] | None = None

    async def read(self) -> HealthReport:
        """Return a report that is at most `MAX_AGE_S` old, or `MAX_AGE_AWAITED_S`.

        Raises:
            TimeoutError: The controller has not answered for `ANSWER_S`.
        """
        age = time.monotonic() - self._read_at
        if self._report is not None and age <= (MAX_AGE_S if self._report.all_ready else MAX_AGE_AWAITED_S):
            return self._report
        if self._asking is None:
            self._asking = asyncio.ensure_future(self._ask())
        async with asyncio.timeout(ANSWER_S):
            # A reader that leaves ends no question: a thread goes on with it, and others wait for the answer.
            return await asyncio.shield(self._asking)

    async def _ask(self) -> HealthReport:
        try:
            status = await asyncio.to_thread(serve.status)
            self._report = self._judge(status.applications.get(self._app))
            self._read_at = time.monotonic()
            return self._report
        finally:
            self._asking = None

    async def running(self, model: str) -> int:
        """Return how many replicas of a model can serve, by such a report."""
        return (await self.read()).replicas(model)

    async def running_other(self, name: str) -> int:
        """Return how many replicas of the deployment `BATCHES` or `QUOTAS` can serve, by such a report."""
        return (await self.read()).others.get(name, 0)

    def _judge(self, app: ApplicationStatusOverview | None) -> HealthReport:
        models = {}
        for model in self._models:
            deployment = app and app.deployments.get(engine_name(model))
            if not deployment:
                models[model] = ModelState(0, False, "the deployment")
                continue
            running = _running(deployment)
            healthy = deployment.status == "HEALTHY"
            awaits = deployment.message or f"an Engine replica (deployment {deployment.status.lower()})"
            models[model] = ModelState(running, healthy and not running, awaits)
        others = {
            name: _running(deployment)
            for name in (BATCHES, QUOTAS)
            if (deployment := app and app.deployments.get(name))
        }
        return HealthReport(models, self._simulated, others)


def _running(deployment: DeploymentStatusOverview) -> int:
    return sum(count for state, count in deployment.replica_states.items() if state == "RUNNING")


async def broadcast(
    handle: Any,
    running: Callable[[], Awaitable[int]],
    method: str,
    *arguments: Any,
    timeout_s: float,
) -> list[Any]:
    """Return the answer of each replica of a model; none if it has no replica now.

    Args:
        handle: The handle of the model's Engine.
        running: Returns the number of its replicas.
        method: The method of the Engine.
        arguments: Its arguments.
        timeout_s: Seconds until all have answered.

    Raises:
        Exception: A replica, or Ray Serve's controller, didn't answer.
    """
    # The limit that Ray offers uses `asyncio.wait_for`: see `pyproject.toml`.
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            # A broadcast to a model without replicas waits for one to start.
            if not await running():
                return []
            answers: list[Any] = await (
                handle.options(_by_reference=True).broadcast(method, *arguments).results_async()
            )
            return answers
    except asyncio.CancelledError:
        if cancellation.is_own():
            raise
        raise ConnectionError("a replica stopped while it was asked") from None
    except TimeoutError:
        if limit.expired():
            raise TimeoutError(f"no answer in {timeout_s:g} s") from None
        raise


async def replica_stats(
    handle: DeploymentHandle[Any], running: Callable[[], Awaitable[int]], timeout_s: float = TIMEOUT_S
) -> list[ReplicaStats]:
    """Return the statistics of each replica of a model.

    Args:
        handle: The handle of the model's Engine.
        running: Returns the number of its replicas.
        timeout_s: Seconds that they have.

    Raises:
        Exception: A replica, or Ray Serve's controller, didn't answer.
    """
    found = await broadcast(handle, running, "stats", timeout_s=timeout_s)
    return [ReplicaStats.model_validate(entry) for entry in found]


class Waker:
    """Has replicas of models that are scaled to zero started: a call waits for one.

    Args:
        engines: The handle of each model's Engine, by model id.
    """

    def __init__(self, engines: Mapping[str, DeploymentHandle[Any]]) -> None:
        self._engines = engines
        self._calls: dict[str, asyncio.Task[None]] = {}

    def wake(self, model: str) -> None:
        """Call a model, unless a call waits already."""
        if model not in self._calls or self._calls[model].done():
            self._calls[model] = asyncio.create_task(self._call(model))

    async def _call(self, model: str) -> None:
        try:
            await self._engines[model].options(method_name="stats", _by_reference=False).remote()
        except Exception as error:
            # The next request for the model asks again.
            logger.warning("%s was not woken: %r", model, error)


async def deployment_stats(name: str, handle: Any, running: Callable[[], Awaitable[int]]) -> JSON:
    """Return the answer of one replica of a deployment, its statistics, or `error`: why there is none.

    Args:
        name: The deployment.
        handle: Its handle.
        running: Returns the number of its replicas.
    """
    try:
        # Without a replica, a call would wait for one.
        if not await running():
            return {"error": f"the {name} deployment has no replica now"}
        async with asyncio.timeout(TIMEOUT_S):
            found: JSON = await handle.options(method_name="stats", _by_reference=False).remote()
        return found
    except asyncio.CancelledError:
        if cancellation.is_own():
            raise
        return {"error": "the replica stopped while it was asked"}
    except Exception as error:
        # The caller gets the reason; what the replica raises, Ray Serve has logged there with its stack.
        return {"error": str(error) or type(error).__name__}


def own_part(stats: JSON, caller: Caller | None) -> JSON:
    """Return the statistics without the usage and the quotas of other keys and tenants, and without adapters
    that the caller may not use.

    An administrator sees all, and so does a client of a service without keys.

    Args:
        stats: The body of `/stats`.
        caller: The caller; None: the service has no keys.
    """
    if caller is None or caller.key.admin:
        return stats
    key = caller.key
    for report in stats["models"].values():
        for replica in report["replicas"]:
            if usage := replica.get("usage"):
                usage["tenants"] = _only(usage["tenants"], {key.tenant})
            if caller.models is not None and (adapters := replica.get("adapters")):
                replica["adapters"] = [one for one in adapters if one["id"] in caller.models]
    if limits := stats.get("quotas", {}).get("limits"):
        stats["quotas"]["limits"] = _only(limits, {key_subject(key.name), tenant_subject(key.tenant)})
    return stats


def _only(items: JSON, names: set[str]) -> JSON:
    return {name: item for name, item in items.items() if name in names}


def with_totals(stats: JSON, health: JSON) -> JSON:
    """Return the statistics with the state and the sums of each model, and the use of all tenants.

    Args:
        stats: The body of `/stats`, with the replicas alone. A caller's part: the sums have no more.
        health: `models` of `/health`; empty: unknown.
    """
    uses = []
    for name, report in stats["models"].items():
        replicas = [ReplicaStats.model_validate(one) for one in report["replicas"]]
        known = ModelHealth.model_validate(health.get(name, {}))
        error = report.get("error") or ""
        state = _state(known, replicas, error)
        causes = [one.turn.cause for one in replicas if one.turn and one.turn.cause]
        awaits = {"starting": known.awaits, "failed": next(iter(causes), None)}
        total = total_of(replicas)
        uses.append(total.tenants)
        stats["models"][name] = {
            "state": state,
            "detail": error or awaits.get(state) or "",
            "simulated": known.simulated,
            "ready_replicas": known.replicas,
            "total": total.body(),
            **report,
        }
    return stats | {"tenants": {name: use.body() for name, use in uses_of(uses).items()}}


def _state(health: ModelHealth, replicas: Sequence[ReplicaStats], error: str) -> str:
    """Return the state of a model, by Ray Serve's controller and the turns of its replicas."""
    if error and not replicas:
        return "error"
    if not replicas:
        # A model without replicas and without a known health is scaled to zero.
        return (health.state or "asleep") if health.state != "ready" else "starting"
    turns = {one.turn.state for one in replicas if one.turn}
    if any(one.turn is None for one in replicas) or turns & {"awake", "draining"}:
        return "ready"
    if turns & {"starting", "loading", "waking"}:
        return "starting"
    return "asleep" if "asleep" in turns else "failed"


class Status:
    """The routes that tell what the service does.

    Args:
        health: The state of the models' deployments.
        engines: The handle of each model's Engine, by model id.
        others: Returns the statistics of another part of the service, by its key in the answer.
    """

    def __init__(
        self,
        health: Health,
        engines: Mapping[str, DeploymentHandle[Any]],
        others: Mapping[str, Callable[[], Awaitable[JSON]]],
    ) -> None:
        self._health = health
        self._engines = engines
        self._others = others

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            Route("/health", self._report_health),
            Route("/ping", self._report_health, methods=["GET", "POST"]),
            Route("/stats", self._stats),
        ]

    async def replicas(self, model: str) -> Sequence[ReplicaStats]:
        """Return the statistics of the replicas of a model; none if they can't be had now."""
        return [ReplicaStats.model_validate(entry) for entry in (await self._entries(model))["replicas"]]

    async def _report_health(self, request: Request) -> Response:
        try:
            health = await self._health.read()
        except Exception as error:
            # Probes ask every few seconds; the stack would be that of Ray Serve's client.
            logger.warning("Ray Serve's controller doesn't answer: %r", error)
            body = {"status": "unknown", "awaits": "Ray Serve's controller"}
            return JSONResponse(body, status_code=503)
        return JSONResponse(health.body(), status_code=200 if health.ready else 503)

    async def _stats(self, request: Request) -> Response:
        if wants_page(request.scope):
            return await to_live_view(request)
        names = [model for model in self._engines if _may_use(request, model)]
        health, *reports = await asyncio.gather(self._known(), *map(self._entries, names))
        body: JSON = {"models": dict(zip(names, reports, strict=True))}
        for name, stats in self._others.items():
            body[name] = await stats()
        return JSONResponse(with_totals(own_part(body, context_of(request.scope).caller), health))

    async def _known(self) -> JSON:
        """Return the health of the models; empty if Ray Serve's controller doesn't answer."""
        try:
            models: JSON = (await self._health.read()).body()["models"]
            return models
        except Exception:
            # The entries of the models have the reason.
            return {}

    async def _entries(self, model: str) -> JSON:
        """Return what `ModelStats` reads, as the replicas have written it."""
        try:
            running = partial(self._health.running, model)
            return {"replicas": await broadcast(self._engines[model], running, "stats", timeout_s=TIMEOUT_S)}
        except Exception as error:
            # The caller gets the reason, every second while a model starts.
            return {"replicas": [], "error": str(error) or type(error).__name__}


def _may_use(request: Request, model: str) -> bool:
    """Return whether the caller of a request may use a model."""
    models = context_of(request.scope).models
    return models is None or model in models
