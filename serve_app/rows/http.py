"""A service over HTTP: sends rows, and interprets the answers."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Self

import httpx

from serve_app.api.errors import RequestError
from serve_app.api.headers import KEEP_ALIVE
from serve_app.client import ServiceError, base_url, connection, error_of, json_of, retry_after_s
from serve_app.rows.errors import RunError
from serve_app.rows.rows import RowAnswer, RowRequest
from serve_app.stats import ReplicaStats, ServiceStats

STATS_TIMEOUT_S = 10.0

POOL_CALLS = 16
"""Calls at once over one pool of connections: httpx's work per call grows with the square of their number."""

HEADERS = {"content-type": "application/json", KEEP_ALIVE: "1"}
"""The read timeout is a limit on the silence of the service, not on the time that a call waits."""


@dataclass(slots=True)
class _Pool:
    """A pool of connections, and the number of calls that use it."""

    http: httpx.AsyncClient
    calls: int = 0


class HTTPClient:
    """A service behind a URL.

    Args:
        url: Base URL of the service; `/v1` at its end is left out.
        model: Model to read statistics of; None: the first one.
        api_key: Sent as a bearer token.
        connect_s: Seconds to get a connection.
        read_s: Longest silence of the service, in seconds; a call that waits or runs gets a byte every 5 s.
        write_s: Seconds to send a row.
        pool_s: Seconds to wait for one of the connections.
        transport: Another transport, for tests.

    Raises:
        RunError: The URL isn't the URL of a service.
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
            way = connection(self.url)
        except (ValueError, ServiceError) as error:
            raise RunError(f"--url {error}") from None
        self._model = model
        self._pool = partial(
            httpx.AsyncClient,
            timeout=httpx.Timeout(connect=connect_s, read=read_s, write=write_s, pool=pool_s),
            headers={"authorization": f"Bearer {api_key}"} if api_key else {},
            transport=transport,
            # All pools share the certificates, which take 20 ms to read.
            **way,
        )
        self._pools = [_Pool(self._pool())]

    async def send(self, request: RowRequest) -> RowAnswer:
        """Send a row and return its answer. The service itself counts the engines that a request loses."""
        try:
            with self._pooled() as http:
                response = await http.post(
                    f"{self.url}{request.endpoint}", content=request.text, headers=HEADERS
                )
        except httpx.HTTPError as error:
            # Timeouts and broken connections have no message.
            return _failed(503, f"{self.url}: {str(error) or type(error).__name__}")
        return answer_of(response)

    async def replicas(self) -> list[ReplicaStats] | None:
        """Return the statistics of the model's replicas; None if unavailable."""
        with suppress(httpx.HTTPError, ValueError):
            with self._pooled() as http:
                response = await http.get(f"{self.url}/stats", timeout=STATS_TIMEOUT_S)
            stats = ServiceStats.model_validate_json(response.raise_for_status().content)
            model = stats.model_or_base(self._model)
            if model is not None and not model.error:
                return model.replicas
        return None

    async def close(self) -> None:
        """Close the connections."""
        for pool in self._pools:
            await pool.http.aclose()

    @contextmanager
    def _pooled(self) -> Iterator[httpx.AsyncClient]:
        """Return the context of a call over a pool with room. The run bounds the calls."""
        pool = next((pool for pool in self._pools if pool.calls < POOL_CALLS), None)
        if pool is None:
            pool = _Pool(self._pool())
            self._pools.append(pool)
        pool.calls += 1
        try:
            yield pool.http
        finally:
            pool.calls -= 1

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


def answer_of(response: httpx.Response) -> RowAnswer:
    """Return a response as the answer to a row: the service's answer, or an error in the service's form."""
    status = response.status_code
    # A row may be sent again after a 408: it has no deadline of its own.
    final = status >= 500 and response.headers.get("x-should-retry") == "false"
    if status == 200:
        body = json_of(response)
        if body is None:
            return _failed(502, f"{response.url}: the answer is no JSON object")
        if not (error := body.get("error")):
            return RowAnswer(200, body)
        # The call failed after its answer had begun.
        code = error.get("code") if isinstance(error, dict) else None
        if not isinstance(code, int) or not 400 <= code < 600:
            return _failed(502, f"{response.url}: the answer is an error of another form: {error!r:.200}")
        return RowAnswer(code, body, final=error.get("should_retry") is False)
    retry_after = retry_after_s(response)
    if error := error_of(response):
        return RowAnswer(status, {"error": error}, retry_after, final)
    text = response.text.strip()[:200]
    message = f"{response.url}: {status} {response.reason_phrase}: {text}"
    # Ray Serve's proxy answers 404 in its own words while the application isn't deployed yet.
    return _failed(503 if status == 404 else status, message)._replace(retry_after_s=retry_after)


def _failed(status: int, message: str) -> RowAnswer:
    return RowAnswer.of(RequestError(status, "service_unavailable", message))
