"""A client of a service, synchronous and asynchronous: base URL, key, errors, retries, typed answers."""

import asyncio
import random
import ssl
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from ipaddress import ip_address
from typing import Any, NamedTuple, Self, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies

import httpx
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from serve_app.api.protocol import JSON
from serve_app.stats import ServiceHealth, ServiceStats

CONNECT_S, ANSWER_S = 5.0, 10.0
"""Seconds to get a connection, and the longest silence: replicas have 5 s for their statistics."""

RETRYABLE = {408, 425, 429, 500, 502, 503, 504}
"""Statuses after which another try may succeed."""

KEY_HELP = "name the environment variable that holds your API key: --api-key-env NAME"
BUSY_HELP = "the service is busy, or the key has reached a limit"

PartT = TypeVar("PartT", bound=BaseModel)


class ServiceError(Exception):
    """A service can't be used; the message begins with its URL and says why.

    Args:
        message: The message.
        status: Status of the answer; None: there is no answer, or saturate didn't send it.
        retry_after_s: Seconds after which another try may succeed, from the service; None: not stated.
        unreachable: Whether there is no answer at all.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        retry_after_s: float | None = None,
        unreachable: bool = False,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.retry_after_s = retry_after_s
        self.unreachable = unreachable

    @property
    def retryable(self) -> bool:
        """Whether another try may succeed."""
        return self.unreachable or self.status in RETRYABLE


@dataclass(slots=True, frozen=True)
class Backoff:
    """Exponential backoff with jitter, so that callers don't retry in step.

    Attributes:
        first_s: Longest wait before the first retry, in seconds.
        most_s: Longest wait of all, in seconds.
    """

    first_s: float = 0.5
    most_s: float = 60.0
    _random: random.Random = field(default_factory=random.Random, repr=False, compare=False)

    def wait_s(self, failures: int, retry_after_s: float | None = None) -> float:
        """Return the seconds to wait before the next try.

        Args:
            failures: Number of failed tries, at least 1.
            retry_after_s: Seconds from the service's `Retry-After`; the wait is never shorter.
        """
        # The exponent is bounded because a large power would overflow.
        ceiling = min(self.most_s, self.first_s * 2.0 ** min(failures - 1, 60))
        wait = ceiling * self._random.uniform(0.5, 1.0)
        if retry_after_s is None:
            return wait
        # Jitter, since all callers with the same Retry-After would return at once.
        return max(wait, retry_after_s * self._random.uniform(1.0, 1.25))


class Retries(NamedTuple):
    """Number of further tries of a call, and the waits between them.

    Attributes:
        most: Further tries; None: without end.
        backoff: Waits between two tries.
        tell: Gets each error after which another try follows.
    """

    most: int | None = 0
    backoff: Backoff = Backoff()
    tell: Callable[[ServiceError], None] = lambda error: None


class _Tries:
    """The tries of one call."""

    def __init__(self, retries: Retries | None) -> None:
        self._retries = retries or Retries()
        self._failed = 0

    def wait_s(self, error: ServiceError) -> float:
        """Return the seconds until the next try.

        Raises:
            ServiceError: No try follows.
        """
        most, backoff, tell = self._retries
        self._failed += 1
        if not error.retryable or (most is not None and self._failed > most):
            raise error
        tell(error)
        return backoff.wait_s(min(self._failed, 8), error.retry_after_s)


class Card(BaseModel):
    """A model in `GET /v1/models`.

    Attributes:
        id: The name that clients put in `model`.
        owned_by: "saturate".
        kind: "llm" or "function".
        parent: The model of an adapter; None: not an adapter.
        max_model_len: Context in tokens; None: unknown.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    id: str
    owned_by: str = ""
    kind: str = "llm"
    parent: str | None = None
    max_model_len: int | None = None


class _Cards(BaseModel):
    data: list[Card] = Field(description="The models.")


class _Address:
    """The common part of both clients: the address, and the interpretation of answers.

    Raises:
        ServiceError: The URL isn't the URL of a service.
    """

    def __init__(self, url: str, api_key: str | None, timeout: httpx.Timeout | None) -> None:
        try:
            self.url = base_url(url)
        except ValueError as error:
            raise ServiceError(str(error)) from None
        self.timeout = timeout or httpx.Timeout(ANSWER_S, connect=CONNECT_S)
        # /stats is a page for a browser, and JSON for a client that asks for JSON.
        self.headers = {"accept": "application/json"}
        if api_key:
            self.headers["authorization"] = f"Bearer {api_key}"

    def read(self, response: httpx.Response, schema: type[PartT]) -> PartT:
        """Return a typed answer.

        Raises:
            ServiceError: The answer is of another form, such as the page of a proxy that asks for a login.
        """
        try:
            return schema.model_validate_json(response.content)
        except ValidationError:
            path = response.request.url.path
            raise self.foreign(f"the answer to {path} is of another form") from None

    def foreign(self, reason: str, *, unreachable: bool = False) -> ServiceError:
        """Return the error of an answer that saturate didn't send."""
        return ServiceError(
            f"{self.url}: something answers there, but not as saturate does ({reason}); check the port and "
            "the route_prefix, or wait if the service only just starts",
            unreachable=unreachable,
        )

    def unreachable(self, error: Exception) -> ServiceError:
        """Return the error of a call without an answer."""
        # Timeouts and broken connections have no message.
        reason = str(error) or type(error).__name__
        tls = _tls_error(error) if isinstance(error, httpx.ConnectError) else None
        if isinstance(tls, ssl.SSLCertVerificationError):
            reason = f"its certificate is not trusted here ({reason}); SSL_CERT_FILE can name its authority's"
        elif tls is not None:
            reason = f"no TLS is spoken there ({reason}); is it http://?"
        elif isinstance(error, httpx.ConnectError):
            reason = f"no service is there ({reason}); `saturate serve` starts one"
        elif isinstance(error, httpx.TimeoutException):
            connects = isinstance(error, httpx.ConnectTimeout)
            seconds = self.timeout.connect if connects else self.timeout.read
            reason = f"no {'connection' if connects else 'answer'} within {seconds or 0:g} s"
        return ServiceError(f"{self.url}: {reason}", unreachable=True)

    def refusal(self, response: httpx.Response) -> ServiceError:
        """Return the error of an answer other than a success."""
        status = response.status_code
        error = error_of(response)
        if error is None and status < 500:
            # Ray Serve's proxy answers 404 in its own words while the application isn't deployed yet.
            reason = f"{response.request.url.path}: {status} {response.reason_phrase}"
            return self.foreign(reason, unreachable=status == 404)
        # A proxy in front may answer in plain text.
        plain = "" if json_of(response) is not None else response.text.strip()[:200]
        message = str(error["message"]) if error else plain or response.reason_phrase
        hint = {401: KEY_HELP, 403: KEY_HELP, 429: BUSY_HELP}.get(status, "")
        return ServiceError(
            f"{self.url}: the service answers {status} ({message}){hint and f'; {hint}'}",
            status=status,
            retry_after_s=retry_after_s(response),
        )


class Client(_Address):
    """A service behind a URL; a context manager.

    Attributes:
        url: Base URL of the service, without a slash at its end.

    Args:
        url: URL of the service, with or without `/v1`.
        api_key: Sent as a bearer token.
        timeout: Seconds to connect, read, write, and to get a connection.
        sleep: Waits some seconds between two tries.
        transport: Another transport, for tests.

    Raises:
        ServiceError: The URL isn't the URL of a service.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        timeout: httpx.Timeout | None = None,
        sleep: Callable[[float], None] = time.sleep,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        super().__init__(url, api_key, timeout)
        self._sleep = sleep
        self.http = httpx.Client(
            base_url=self.url,
            headers=self.headers,
            timeout=self.timeout,
            transport=transport,
            **connection(self.url),
        )

    def stats(self) -> ServiceStats:
        """Return the statistics.

        Raises:
            ServiceError: There is no service, it isn't saturate, or it refuses the key.
        """
        return self.read(self.ask("GET", "/stats"), ServiceStats)

    def health(self) -> ServiceHealth:
        """Return the health of the models, also while the service starts.

        Raises:
            ServiceError: There is no service, or it isn't saturate.
        """
        return self.read(self.call(lambda: self.http.get("/health"), ok={503}), ServiceHealth)

    def ask(self, method: str, path: str, retries: Retries | None = None, **content: Any) -> httpx.Response:
        """Return the answer to a request; see `call`.

        Args:
            method: Method of the request.
            path: Path of the request.
            retries: Further tries; by default none.
            content: Body and parameters of the request, as httpx takes them.
        """
        return self.call(lambda: self.http.request(method, path, **content), retries)

    def call(
        self,
        send: Callable[[], httpx.Response],
        retries: Retries | None = None,
        *,
        ok: frozenset[int] | set[int] = frozenset(),
    ) -> httpx.Response:
        """Make a call until it is answered with a success.

        Args:
            send: Makes the call once.
            retries: Further tries; by default none.
            ok: Other statuses that are a success.

        Raises:
            ServiceError: The call failed, and no further try follows.
        """
        tries = _Tries(retries)
        while True:
            try:
                response = send()
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                failure = self.unreachable(error)
            else:
                if response.is_success or response.status_code in ok:
                    return response
                failure = self.refusal(response)
            self._sleep(tries.wait_s(failure))

    def close(self) -> None:
        """Close the connections."""
        self.http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class AsyncClient(_Address):
    """A service behind a URL; an asynchronous context manager. See `Client`.

    The caller bounds the number of calls at once. The CPU of a call grows with them only behind a proxy.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        timeout: httpx.Timeout | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        super().__init__(url, api_key, timeout)
        self._sleep = sleep
        options = connection(self.url)
        if transport is None and not (options["trust_env"] and getproxies().keys() - {"no"}):
            # Most commands need no asynchronous client, and aiohttp takes 0.1 s to import.
            from serve_app.system.http_transport import AiohttpTransport

            transport = AiohttpTransport(options["verify"])
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers=self.headers,
            timeout=self.timeout,
            limits=httpx.Limits(max_connections=None),
            transport=transport,
            **options,
        )

    async def stats(self, **options: Any) -> ServiceStats:
        """Return the statistics; see `Client.stats`.

        Args:
            options: Options of the request, as httpx takes them.
        """
        return self.read(await self.ask("GET", "/stats", **options), ServiceStats)

    async def cards(self) -> list[Card]:
        """Return the models and adapters that the key may use.

        Raises:
            ServiceError: There is no service, it isn't saturate, or it refuses the key.
        """
        cards = self.read(await self.ask("GET", "/v1/models"), _Cards).data
        if not all(card.owned_by == "saturate" for card in cards):
            raise self.foreign("its models are not of saturate")
        return cards

    async def ask(
        self, method: str, path: str, retries: Retries | None = None, **content: Any
    ) -> httpx.Response:
        """Return the answer to a request; see `Client.ask`."""
        tries = _Tries(retries)
        while True:
            try:
                response = await self.request(method, path, **content)
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                failure = self.unreachable(error)
            else:
                if response.is_success:
                    return response
                failure = self.refusal(response)
            await self._sleep(tries.wait_s(failure))

    async def request(self, method: str, path: str, **content: Any) -> httpx.Response:
        """Return the answer to a request, whatever its status; raise an httpx.HTTPError if there is none."""
        return await self._http.request(method, path, **content)

    def stream(self, method: str, path: str, **content: Any) -> AbstractAsyncContextManager[httpx.Response]:
        """Return a context with the answer to a request as it comes; see `request`."""
        return self._http.stream(method, path, **content)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


def json_of(response: httpx.Response) -> JSON | None:
    """Return the JSON object in a response; None: it is no JSON object, for example a page of a proxy."""
    try:
        body: Any = from_json(response.content)
    except ValueError:
        return None
    return body if isinstance(body, dict) else None


def error_of(response: httpx.Response) -> JSON | None:
    """Return the error in a response, in the form of this service's errors; None: there is no such error."""
    error = (json_of(response) or {}).get("error")
    return error if isinstance(error, dict) and "message" in error else None


def retry_after_s(response: httpx.Response) -> float | None:
    """Return the seconds of `Retry-After`; None: the response has no such header."""
    with suppress(ValueError):
        return max(0.0, float(response.headers.get("retry-after", "")))
    return None


def _tls_error(error: BaseException | None) -> ssl.SSLError | None:
    """Return the error of TLS behind a connection that failed; None: there is none."""
    while error is not None and not isinstance(error, ssl.SSLError):
        error = error.__cause__ or error.__context__
    return error


def connection(url: str) -> dict[str, Any]:
    """Return the options of httpx for the way to a URL.

    A proxy of the environment can't reach this machine's own interfaces, so requests to them take none.

    Args:
        url: The URL.

    Raises:
        ServiceError: The proxy of the environment needs a package that is missing.
    """
    host = httpx.URL(url).host
    here = host == "localhost"
    with suppress(ValueError):
        address = ip_address(host)
        here = address.is_loopback or address.is_unspecified
    socks = any(proxy.startswith("socks") for proxy in getproxies().values())
    if socks and not here and find_spec("socksio") is None:
        raise ServiceError(
            f"{url}: the environment names a SOCKS proxy, which needs the package socksio; install it, or "
            "unset the variable, such as ALL_PROXY"
        )
    # Certificates that the environment names count for any host; httpx would read them with the proxies.
    return {"trust_env": not here, "verify": httpx.create_ssl_context()}


def base_url(url: str) -> str:
    """Return the base URL of a service, without a slash at its end.

    Args:
        url: The URL. A `/v1` at its end, which OpenAI's clients need, is left out. An address without a
            scheme, such as localhost:8000, gets http://.

    Raises:
        ValueError: The URL isn't the URL of a service; the message begins with the URL.
    """
    if url and "://" not in url:
        url = f"http://{url}"
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{url}: must begin with http:// or https://")
    try:
        parts = urlsplit(url)
        # `parts.port` raises for an invalid port, which httpx takes.
        named = bool(parts.hostname) and parts.port != 0
        httpx.URL(url)
    except (ValueError, httpx.InvalidURL) as error:
        raise ValueError(f"{url}: is no URL: {error}") from None
    if not named:
        raise ValueError(f"{url}: must have a host, and a port from 1 to 65535 if any")
    if parts.query or parts.fragment:
        raise ValueError(f"{url}: must have nothing behind the path")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")
