"""An Engine in the Ray cluster of this process, over its deployment handle: for Ray jobs."""

import asyncio
import os
from typing import Any

from serve_app.api.errors import RequestError
from serve_app.api.facts import facts_of_call
from serve_app.api.protocol import parse_body
from serve_app.api.scheduling import SchedulingFields
from serve_app.rows.errors import RunError
from serve_app.rows.rows import RowAnswer, RowRequest
from serve_app.settings.environment import MESSAGES
from serve_app.stats import ReplicaStats
from serve_app.wire.request import RelayRequest

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
        model: The model's id, or the id of an adapter.

    Raises:
        RunError: There is no cluster, or it has no such Engine.
    """

    def __init__(self, app: str, model: str) -> None:
        self._app = app
        self._handle = engine_handle(app, model)
        self._model = self._handle.deployment_name.partition(":")[2]
        self._engines: Any = None

    async def send(self, request: RowRequest) -> RowAnswer:
        """Send a call of `/generate`, with the scheduling of its body.

        Raises:
            RequestError: The call failed.
        """
        from ray.exceptions import RayError
        from ray.serve.exceptions import RayServeException

        from serve_app.ingress.engine_call import EngineCall, Engines, is_expected, unavailable
        from serve_app.rows.engines import HEADERS, answer_of

        if self._engines is None:
            # This starts the handle's router, which may need the running loop.
            self._engines = Engines(self._handle, self._running)
        body = request.body
        named = body.get("model")
        fields = {name: body[name] for name in SchedulingFields.model_fields if name in body}
        call = RelayRequest(
            "POST",
            request.endpoint,
            b"",
            HEADERS,
            request.text,
            parse_body(SchedulingFields, fields).scheduling(),
            facts=facts_of_call(body),
            adapter="" if named in (None, self._model) else named,
            source="handle",
        )
        try:
            return await answer_of(EngineCall(self._engines.ask, call, lost=request.lost))
        except RequestError:
            raise
        except Exception as error:
            if isinstance(error, RayError | RayServeException | OSError) and not is_expected(error):
                message = f"{type(error).__name__}: {error}".splitlines()[0]
                raise RequestError(503, "service_unavailable", message) from error
            raise unavailable(error) from error

    async def replicas(self) -> list[ReplicaStats] | None:
        """Return the statistics of the Engine's replicas; None if unavailable."""
        from serve_app.ingress.status import replica_stats

        try:
            return await replica_stats(self._handle, self._running, STATS_TIMEOUT_S)
        except Exception:
            # A run continues without statistics.
            return None

    async def close(self) -> None:
        """Do nothing: the handle belongs to the process."""

    async def _running(self) -> int:
        from ray import serve

        status = await asyncio.to_thread(serve.status)
        states = status.applications[self._app].deployments[self._handle.deployment_name].replica_states
        return sum(count for state, count in states.items() if state == "RUNNING")
