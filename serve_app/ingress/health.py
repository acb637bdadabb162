"""Health of the models, from Ray Serve's controller."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from ray import serve
from ray.serve.schema import ApplicationStatusOverview, DeploymentStatusOverview

from serve_app.api.protocol import JSON

MAX_AGE_S = 2.0
"""Seconds for which a status is used again, so that probes don't load the controller."""

MAX_AGE_AWAITED_S = 0.5
"""The same while a model is not ready."""

ANSWER_S = 10.0
"""Seconds that Ray Serve's controller has to answer."""


BATCHES = "Batches"
"""Name of the deployment of files and batches."""

QUOTAS = "Quotas"
"""Name of the deployment of the quotas."""


TURNS = "Turns"
"""Name of the deployment that gives turns to models which share a device."""


def engine_name(model: str) -> str:
    """Return the name of a model's deployment."""
    return f"Engine:{model}"


@dataclass(slots=True, frozen=True)
class ModelHealth:
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
class Report:
    """The health of all models of the application.

    Attributes:
        models: The models by name.
        simulated: Profiles of those on a simulated device, by name.
        others: Replicas that can serve of the deployments `BATCHES` and `QUOTAS`, by name.
    """

    models: dict[str, ModelHealth]
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
        simulated: Profiles of those on a simulated device, by id.
    """

    def __init__(self, app: str, models: list[str], simulated: Mapping[str, str] | None = None) -> None:
        self._app = app
        self._models = models
        self._simulated = simulated or {}
        self._report: Report | None = None
        self._read_at = float("-inf")
        self._asking: asyncio.Future[Report] | None = None

    async def read(self) -> Report:
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

    async def _ask(self) -> Report:
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

    def _judge(self, app: ApplicationStatusOverview | None) -> Report:
        models = {}
        for model in self._models:
            deployment = app and app.deployments.get(engine_name(model))
            if not deployment:
                models[model] = ModelHealth(0, False, "the deployment")
                continue
            running = _running(deployment)
            healthy = deployment.status == "HEALTHY"
            awaits = deployment.message or f"an Engine replica (deployment {deployment.status.lower()})"
            models[model] = ModelHealth(running, healthy and not running, awaits)
        others = {
            name: _running(deployment)
            for name in (BATCHES, QUOTAS)
            if (deployment := app and app.deployments.get(name))
        }
        return Report(models, self._simulated, others)


def _running(deployment: DeploymentStatusOverview) -> int:
    return sum(count for state, count in deployment.replica_states.items() if state == "RUNNING")
