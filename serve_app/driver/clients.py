"""Clients of a service: over HTTP, and over a deployment handle."""

import asyncio
import os
from contextlib import suppress
from typing import Any, Protocol, Self

import httpx
from pydantic_core import from_json, to_json

from serve_app.api.errors import EngineLostError, RequestError
from serve_app.api.headers import KEEP_ALIVE
from serve_app.api.protocol import JSON
from serve_app.client import base_url
from serve_app.dataset.errors import DriverError
from serve_app.system import cancellation

STATS_TIMEOUT_S = 10.0

MESSAGE_BYTES = 64 << 20
"""Most bytes of an answer over the handle, unless the environment sets it; gRPC's default is 4 MiB."""


class Client(Protocol):
    """A service, as a run uses it."""

    async def generate(self, body: JSON) -> JSON:
        """Send one `/generate` call and return its answer.

        Args:
            body: The call's body.

        Raises:
            RequestError: The call failed. Another try may succeed if the status is 408, 425, 429 or at
                least 500, and the error isn't final.
        """

    async def replicas(self) -> list[JSON] | None:
        """Return the statistics of the model's replicas; None where they can't be had now."""

    async def close(self) -> None:
        """Close the connections."""


class HTTPClient:
    """A service behind a URL.

    Args:
        url: Base URL of the service; `/v1` at its end is left out.
        model: Model to read statistics of; None: the first one.
        api_key: Sent as a bearer token.
        connect_s: Seconds to get a connection.
        read_s: Longest silence of the service, in seconds; a call that waits or runs gets a byte every 5 s.
        write_s: Seconds to send a chunk.
        pool_s: Seconds to wait for one of the connections.
        transport: Another transport, for tests.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        connect_s: float = 60.0,
        read_s: float = 600.0,
        write_s: float = 30.0,
        pool_s: float = 10.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        try:
            self.url = base_url(url)
        except ValueError as error:
            raise DriverError(f"--url {error}") from None
        self._model = model
        self._read_s = read_s
        self._http = httpx.AsyncClient(
            timeout=httpx.Timeout(connect=connect_s, read=read_s, write=write_s, pool=pool_s),
            # The run itself bounds its calls.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            headers={"authorization": f"Bearer {api_key}"} if api_key else {},
            transport=transport,
        )

    async def generate(self, body: JSON) -> JSON:
        """Send one `/generate` call and return its answer."""
        # The read timeout is a limit on the silence of the service, not on the time that a call waits.
        headers = {"content-type": "application/json", KEEP_ALIVE: "1"}
        try:
            response = await self._http.post(
                f"{self.url}/generate",
                content=to_json(body),
                headers=headers,
            )
        except httpx.HTTPError as error:
            # Timeouts and broken connections have no message.
            reason = str(error) or type(error).__name__
            raise RequestError(503, "service_unavailable", f"{self.url}: {reason}") from None
        if response.status_code != 200:
            raise _refusal(response)
        try:
            answer: JSON = from_json(response.content)
        except ValueError:
            raise RequestError(502, "service_unavailable", f"{self.url}: the answer is not JSON") from None
        if not isinstance(answer, dict):
            raise RequestError(502, "service_unavailable", f"{self.url}: the answer is no JSON object")
        if failed := answer.get("error"):
            # The answer had begun before the call failed.
            try:
                raise RequestError(
                    int(failed["code"]),
                    failed["type"],
                    str(failed["message"]),
                    param=failed.get("param"),
                    final=failed.get("should_retry") is False,
                )
            except (KeyError, TypeError, ValueError, AttributeError):
                message = f"{self.url}: the answer is an error of another form: {failed!r:.200}"
                raise RequestError(502, "service_unavailable", message) from None
        return answer

    async def replicas(self) -> list[JSON] | None:
        """Return the statistics of the model's replicas; None where they can't be had now."""
        with suppress(httpx.HTTPError, ValueError, KeyError, TypeError, AttributeError):
            response = await self._http.get(f"{self.url}/stats", timeout=STATS_TIMEOUT_S)
            models = response.raise_for_status().json()["models"]
            report = _report_of(models, self._model)
            if not report.get("error"):
                replicas: list[JSON] = report["replicas"]
                return replicas
        return None

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


def _report_of(models: JSON, name: str | None) -> JSON:
    """Return the part of `/stats` of a model, or of the model of an adapter; None: the first one."""
    found: JSON
    if name is None or name in models:
        found = models[name or next(iter(models))]
        return found
    for found in models.values():
        if name in (one["id"] for replica in found["replicas"] for one in replica.get("adapters", ())):
            return found
    raise KeyError(name)


class HandleClient:
    """An Engine in the Ray cluster of this process.

    Args:
        app: The Serve application.
        model: The model's id.
        read_s: Seconds after which a call without an answer is given up, unless all replicas report that they
            work.

    Raises:
        DriverError: There is no cluster, or no such Engine in it.
    """

    def __init__(self, app: str, model: str, *, read_s: float = 600.0) -> None:
        # Ray Serve reads this variable once, at import.
        os.environ.setdefault("RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH", str(MESSAGE_BYTES))
        import ray
        from ray import serve

        from serve_app.ingress.status import engine_name

        if not ray.is_initialized():
            try:
                ray.init(address="auto", log_to_driver=False)
            except ConnectionError:
                raise DriverError(
                    "no Ray cluster here: run this inside a Ray job (`ray job submit -- saturate batch ...`) "
                    "or on a machine of the cluster, or reach the service with --url"
                ) from None
        application = serve.status().applications.get(app)
        name = engine_name(model)
        if application is not None and name not in application.deployments:
            # The id of an adapter begins with that of its model, unless the config gives it another.
            name = engine_name(model.partition(":")[0])
        if application is None or name not in application.deployments:
            there = [
                f"--app {app_name} --model {deployment.partition(':')[2]}"
                for app_name, found in serve.status().applications.items()
                for deployment in found.deployments
                if deployment.startswith("Engine:")
            ]
            known = ", ".join(there) or "none"
            raise DriverError(
                f"no deployment {engine_name(model)} in the application {app!r}; this cluster has: {known}"
            )
        self._app, self._name = app, name
        self._read_s = read_s
        self._handle: Any = serve.get_deployment_handle(name, app_name=app)

    async def generate(self, body: JSON) -> JSON:
        """Send one `generate` call and return its answer; ask a second engine if the first one is lost."""
        from serve_app.ingress.relay import Losses, back_off

        losses = Losses()
        while True:
            try:
                return await self._generate(body)
            except EngineLostError as error:
                if not await losses.add(error):
                    raise
                await back_off(losses.count)

    async def _generate(self, body: JSON) -> JSON:
        """Send one call to one engine.

        Raises:
            EngineLostError: The engine was lost while it had the call.
            RequestError: The call failed otherwise.
        """
        import grpc
        from ray.exceptions import RayError
        from ray.serve.exceptions import BackPressureError, RayServeException

        from serve_app.ingress.relay import ran_there

        # By value, that is over gRPC: Ray's object store costs the driver more CPU. Options are set here,
        # since setting them starts the handle's router, which may need the running loop.
        response = self._handle.options(_by_reference=False).generate.remote(body)
        answering: asyncio.Future[JSON] = asyncio.ensure_future(response)
        try:
            while not (await asyncio.wait([answering], timeout=self._read_s))[0]:
                # A call behind live traffic may wait for long; given up, it would go to the end of the queue.
                if not await self.replicas():
                    message = f"{self._name}: no answer in {self._read_s:g} s"
                    raise RequestError(503, "service_unavailable", message)
            answer = answering.result()
        except asyncio.CancelledError:
            if not cancellation.is_own():
                message = f"{self._name}: its replica was removed"
                raise RequestError(503, "service_unavailable", message) from None
            raise
        except (RequestError, EngineLostError):
            raise
        except BackPressureError as error:
            raise RequestError(429, "rate_limit_error", str(error), retry_after_s=1.0) from None
        except grpc.RpcError as error:
            if ran_there(error):
                raise EngineLostError from error
            raise self._broken(error) from None
        except (RayError, RayServeException, ConnectionError) as error:
            if ran_there(error):
                raise EngineLostError from error
            message = f"{self._name}: {type(error).__name__}: {str(error).strip().splitlines()[0]}"
            raise RequestError(503, "service_unavailable", message) from None
        finally:
            if not answering.done():
                response.cancel()
                answering.cancel()
        return answer

    def _broken(self, error: Any) -> RequestError:
        """Return the error of a failed gRPC call."""
        import grpc

        reason = f"{self._name}: {error.code().name}: {error.details()}"
        if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
            reason += "; lower --chunk-size, or raise RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH"
            return RequestError(413, "invalid_request_error", reason)
        return RequestError(503, "service_unavailable", reason)

    async def replicas(self) -> list[JSON] | None:
        """Return the statistics of the model's replicas; None where they can't be had now."""
        from serve_app.ingress.status import replica_stats

        try:
            return await replica_stats(self._handle, self._running, STATS_TIMEOUT_S)
        except Exception:
            # Statistics are optional: a run goes on without them.
            return None

    async def close(self) -> None:
        """Do nothing: the handle belongs to the process."""

    async def _running(self) -> int:
        from ray import serve

        status = await asyncio.to_thread(serve.status)
        states = status.applications[self._app].deployments[self._name].replica_states
        return sum(count for state, count in states.items() if state == "RUNNING")


def _refusal(response: httpx.Response) -> RequestError:
    """Return the error in an HTTP response."""
    retry_after_s = None
    with suppress(ValueError):
        retry_after_s = max(0.0, float(response.headers.get("retry-after", "")))
    # A run may send a 408 again: its rows have no deadline of their own.
    final = response.status_code >= 500 and response.headers.get("x-should-retry") == "false"
    try:
        error = response.json()["error"]
        return RequestError(
            response.status_code,
            error["type"],
            str(error["message"]),
            param=error.get("param"),
            retry_after_s=retry_after_s,
            final=final,
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        text = response.text.strip()[:200]
        message = f"{response.url}: {response.status_code} {response.reason_phrase}: {text}"
        status = response.status_code
        if status == 404:
            # Ray Serve's proxy answers 404 while the application isn't deployed yet.
            status = 503
        return RequestError(status, "service_unavailable", message, retry_after_s=retry_after_s)
