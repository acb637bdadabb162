"""Authentication: the valid API keys, and the ASGI middleware that requires one."""

import hmac
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from serve_app.api.errors import RequestError, error_response
from serve_app.api.headers import Headers, bearer_token
from serve_app.api.scheduling import TIER_PRIORITY, Scheduling, SchedulingFields, scheduling_of
from serve_app.auth.keys import Key, check_together, hash_key, plain_keys, read_keys
from serve_app.auth.rate_limit import RateLimit
from serve_app.settings.schema import AccessSettings, SettingsError

logger = logging.getLogger("ray.serve")

POLL_S = 2.0
"""Seconds between two looks at the keys file."""

OPEN = "/health"
"""The one path that needs no key: load balancers have none."""


class Caller:
    """A valid key and its rate limit in this process."""

    __slots__ = ("_priorities", "_usual", "key", "rate_limit")

    def __init__(self, key: Key, rate_limit: RateLimit) -> None:
        self.key = key
        self.rate_limit = rate_limit
        self._priorities = key.priorities()
        usual = TIER_PRIORITY["default"]
        self._usual = usual if usual in self._priorities else TIER_PRIORITY[key.tiers[0]]

    def scheduling(self, headers: Headers, fields: SchedulingFields) -> Scheduling:
        """Return the scheduling of a request with this key; see `scheduling_of`.

        Raises:
            RequestError: 403, the key doesn't allow it; 400, a header is wrong.
        """
        key = self.key
        scheduling = scheduling_of(headers, fields, tenant=key.tenant)
        if scheduling.tenant != key.tenant and not key.any_tenant:
            message = f"tenant: this API key is for {key.tenant!r}; leave the field and x-tenant out"
            raise RequestError(403, "permission_error", message, param="tenant")
        if scheduling.priority not in self._priorities:
            if fields.service_tier not in (None, "auto"):
                message = (
                    f"service_tier: this API key may use {', '.join(key.tiers)}, not {fields.service_tier!r}"
                )
                raise RequestError(403, "permission_error", message, param="service_tier")
            scheduling = scheduling._replace(priority=self._usual)
        # The weight is that of the key's own tenant.
        return (
            scheduling._replace(weight=key.weight)
            if key.weight and scheduling.tenant == key.tenant
            else scheduling
        )


class KeyStore:
    """The valid API keys, by hash.

    Args:
        settings: Sources of the keys.
        environment: Environment variables, for `keys_env`.
        clock: Monotonic clock of the rate limits, in seconds.
        quotas: The service keeps quotas: without it, a key that has one is refused.

    Raises:
        SettingsError: The keys can't be read.
    """

    def __init__(
        self,
        settings: AccessSettings,
        *,
        environment: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic,
        quotas: bool = True,
    ) -> None:
        self._quotas = quotas
        self._file = Path(settings.keys_file) if settings.keys_file else None
        self._clock = clock
        self._fixed: list[Key] = []
        if name := settings.keys_env:
            if name not in environment:
                raise SettingsError(f"access.keys_env: the environment has no variable {name}")
            self._fixed = _read(environment[name], f"access.keys_env ({name})")
        self._seen: object = None
        self._callers: dict[str, Caller] = {}
        if self._file:
            self._seen = _signature(self._file)
        self._load()

    def refresh(self) -> None:
        """Read the file again if it has changed. The keys stay as they were if it can't be read."""
        if self._file is None or (signature := _signature(self._file)) == self._seen:
            return
        self._seen = signature
        try:
            self._load()
        except SettingsError as error:
            logger.warning("the API keys stay as they were: %s", error)
        else:
            logger.info("read the API keys again: %d hold now", len(self._callers))

    def watch(self) -> None:
        """Refresh periodically, in a thread that ends when this object is garbage-collected."""
        if self._file:
            threading.Thread(target=_watch, args=(weakref.ref(self),), name="api-keys", daemon=True).start()

    def find(self, headers: Headers) -> Caller:
        """Return the caller whose key the headers of a request hold.

        Raises:
            RequestError: 401, there is no key, or it isn't valid.
        """
        if not (key := _api_key(headers)):
            message = "An API key is required: send the header `Authorization: Bearer KEY`."
            raise RequestError(401, "authentication_error", message)
        # The look-up's duration depends on the hash, which an attacker can't steer by the choice of a key.
        digest = hash_key(key)
        caller = self._callers.get(digest)
        if caller is None or not hmac.compare_digest(caller.key.sha256, digest):
            raise RequestError(401, "authentication_error", "This API key is not valid here.")
        return caller

    def _load(self) -> None:
        keys = self._fixed
        if self._file:
            try:
                text = self._file.read_text()
            except (OSError, ValueError) as error:
                reason = (isinstance(error, OSError) and error.strerror) or "it is not UTF-8"
                raise SettingsError(f"access.keys_file ({self._file}): {reason}") from None
            keys = keys + _read(text, f"access.keys_file ({self._file})")
        check_together(keys, "access: keys_file and keys_env together")
        if not self._quotas and (limited := [key.name for key in keys if key.quota]):
            raise SettingsError(f"access: the quota of the key {limited[0]!r} needs args.usage.quotas")
        # One assignment, since other threads read it meanwhile.
        self._callers = {key.sha256: Caller(key, self._rate_limit(key)) for key in keys}

    def _rate_limit(self, key: Key) -> RateLimit:
        """Return the key's rate limit: the one in use, if any, so that its state survives a reload."""
        old = self._callers.get(key.sha256)
        rate_limit = old.rate_limit if old else RateLimit(self._clock)
        rate_limit.rate_per_minute = key.requests_per_minute
        rate_limit.max_concurrency = key.max_concurrency
        return rate_limit


def _read(text: str, source: str) -> list[Key]:
    """Read a list of keys; log a warning if the text has one of them in plain.

    Such a text is not refused: a key that has just been revoked in it would stay valid.
    """
    keys = read_keys(text, source)
    if names := plain_keys(text, keys):
        logger.warning(
            "%s: has the key of %s in plain text; remove it, the hash is enough", source, ", ".join(names)
        )
    return keys


class AuthMiddleware:
    """ASGI middleware that requires a valid API key, and enforces its rate limit.

    It puts the caller into the scope, as "caller".

    Args:
        app: The application behind it.
        keys: The valid keys.
    """

    def __init__(self, app: ASGIApp, keys: KeyStore) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            # No route of the application takes websockets.
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http" or scope["path"] == scope.get("root_path", "") + OPEN:
            await self._app(scope, receive, send)
            return
        try:
            caller = self._keys.find(scope["headers"])
            rate_limit = caller.rate_limit
            entered = rate_limit.enter()
        except RequestError as error:
            path = scope["path"].removeprefix(scope.get("root_path", ""))
            await error_response(error, path)(scope, receive, send)
            return
        scope["caller"] = caller
        try:
            await self._app(scope, receive, send)
        finally:
            rate_limit.leave(entered)


def _api_key(headers: Headers) -> bytes:
    """Return the key of a request; empty if there is none."""
    # OpenAI's clients send a bearer token, Anthropic's the other header.
    return bearer_token(headers) or dict(headers).get(b"x-api-key", b"").strip()


def _signature(path: Path) -> object:
    try:
        status = path.stat()
    except OSError as error:
        return error.errno
    return status.st_mtime_ns, status.st_size, status.st_ino


def _watch(reference: "weakref.ref[KeyStore]") -> None:
    while keys := reference():
        keys.refresh()
        # A reference that is held while the thread sleeps would keep the object alive.
        del keys
        time.sleep(POLL_S)
