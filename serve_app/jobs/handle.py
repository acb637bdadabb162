"""An Engine in the Ray cluster of this process, over its deployment handle: for Ray jobs."""

import asyncio
import os
from collections.abc import Collection
from typing import Any

from serve_app.api.errors import EngineLostError, RequestError
from serve_app.api.protocol import JSON
from serve_app.api.scheduling import Scheduling
from serve_app.jobs.errors import RunError
from serve_app.jobs.rows import RowAnswer
from serve_app.settings.environment import MESSAGES
from serve_app.stats import ReplicaStats
from serve_app.system import cancellation

STATS_TIMEOUT_S = 10.0


def engine_handle(app: str, model: str) -> Any:
    """Return the deployment handle of an Engine.

    Args:
        app: The Serve application.
        model: Id of a model, or of an adapter whose id begins with the model's.

    Raises:
        RunError: There is no cluster, or it has no such Engine.
    """
    # Ray Serve reads this variable once, at import.
    os.environ.setdefault(MESSAGES.name, MESSAGES.value)
    import ray
    from ray import serve

    from serve_app.ingress.status import engine_name

    if not ray.is_initialized():
        try:
            ray.init(address="auto", log_to_driver=False)
        except ConnectionError:
            raise RunError(
                "no Ray cluster here: run this inside a Ray job (`ray job submit -- saturate batch ...`) "
                "or on a machine of the cluster, or reach the service with --url"
            ) from None
    applications = serve.status().applications
    there = applications[app].deployments if app in applications else {}
    for name in (engine_name(model), engine_name(model.partition(":")[0])):
        if name in there:
            return serve.get_deployment_handle(name, app_name=app)
    known = [
        f"--app {app_name} --model {name.partition(':')[2]}"
        for app_name, found in applications.items()
        for name in found.deployments
        if name.startswith("Engine:")
    ]
    raise RunError(
        f"no deployment {engine_name(model)} in the application {app!r}; this cluster has: "
        f"{', '.join(known) or 'none'}"
    )


class HandleClient:
    """Sends rows of `/generate` to an Engine.

    Args:
        app: The Serve application.
        model: The model's id.
        silence_s: Seconds after which a call without an answer fails, unless all replicas report their
            statistics: a call behind live traffic may wait long, and a retry would go to the end of the
            queue.

    Raises:
        RunError: There is no cluster, or it has no such Engine.
    """

    def __init__(self, app: str, model: str, *, silence_s: float = 600.0) -> None:
        self._app = app
        self._silence_s = silence_s
        self._handle = engine_handle(app, model)

    async def send(
        self, endpoint: str, body: JSON, scheduling: Scheduling, models: Collection[str] | None = None
    ) -> RowAnswer:
        """Send a call of `/generate`; if its engine is lost, send the call to another engine.

        Raises:
            RequestError: The call failed.
        """
        from serve_app.ingress.relay import Losses

        losses = Losses()
        while True:
            try:
                return RowAnswer(200, await self._generate(body))
            except EngineLostError as error:
                if not losses.add(error):
                    raise
            except RequestError as error:
                if error.status != 503 or not losses.refused():
                    raise
            await losses.back_off()

    async def replicas(self) -> list[ReplicaStats] | None:
        """Return the statistics of the Engine's replicas; None if unavailable."""
        from serve_app.ingress.status import replica_stats

        try:
            return await replica_stats(self._handle, self._running, STATS_TIMEOUT_S)
        except Exception:
            # Statistics are optional: a run continues without them.
            return None

    async def close(self) -> None:
        """Do nothing: the handle belongs to the process."""

    async def _generate(self, body: JSON) -> JSON:
        """Send one call to one engine.

        Raises:
            EngineLostError: The engine was lost while it had the call.
            RequestError: The call failed otherwise.
        """
        from ray.exceptions import RayError
        from ray.serve.exceptions import RayServeException

        from serve_app.ingress.relay import is_expected, ran_there, unavailable

        # By value, that is over gRPC: Ray's object store costs the caller more CPU. Options are set here,
        # since setting them starts the handle's router, which may need the running loop.
        response = self._handle.options(_by_reference=False).generate.remote(body)
        answering: asyncio.Future[JSON] = asyncio.ensure_future(response)
        try:
            while not (await asyncio.wait([answering], timeout=self._silence_s))[0]:
                if not await self.replicas():
                    raise RequestError(503, "service_unavailable", f"no answer in {self._silence_s:g} s")
            return answering.result()
        except asyncio.CancelledError:
            if cancellation.is_own():
                raise
            raise RequestError(503, "service_unavailable", "the engine's replica was removed") from None
        except (RequestError, EngineLostError):
            raise
        except Exception as error:
            if ran_there(error):
                raise EngineLostError from error
            if isinstance(error, RayError | RayServeException | OSError) and not is_expected(error):
                message = f"{type(error).__name__}: {error}".splitlines()[0]
                raise RequestError(503, "service_unavailable", message) from error
            raise unavailable(error) from error
        finally:
            if not answering.done():
                response.cancel()
                answering.cancel()

    async def _running(self) -> int:
        from ray import serve

        status = await asyncio.to_thread(serve.status)
        states = status.applications[self._app].deployments[self._handle.deployment_name].replica_states
        return sum(count for state, count in states.items() if state == "RUNNING")
