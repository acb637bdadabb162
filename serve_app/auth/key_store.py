"""The valid API keys, and their callers."""

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping

from serve_app.api.errors import RequestError
from serve_app.api.headers import Headers, bearer_token
from serve_app.api.protocol import JSON
from serve_app.api.scheduling import TIER_PRIORITY, Scheduling, SchedulingFields, scheduling_of
from serve_app.auth.keys import Key, State, check_together, expired_keys, hash_key, plain_keys, read_keys
from serve_app.settings.addresses import Networks, client_address
from serve_app.settings.ingress import AccessSettings
from serve_app.settings.schema import SettingsError
from serve_app.settings.watched_file import WatchedFile
from serve_app.system.rounds import Rounds

logger = logging.getLogger("ray.serve")

POLL_S = 2.0
"""Seconds between two checks of the keys file."""

OPEN = frozenset(
    {
        "/health",
        "/ping",
        "/version",
        "/openapi.json",
        "/docs",
        "/",
        "/page.css",
        "/page.js",
        "/stats.html",
    }
)
"""Paths that need no key, for probes, for readers of the API's documentation, and for the page, which asks
for a key itself. The answers have the state of the models, versions and routes, and nothing about keys or
tenants."""


class Caller:
    """A key, and the permissions of its requests.

    Attributes:
        key: The key.
        models: Ids of the models that its requests may name; None: all.
        allow_from: Addresses from which it may be used; None: all.
        expires_at: Seconds since the epoch at which it becomes invalid.
    """

    __slots__ = ("_priorities", "_usual", "allow_from", "expires_at", "key", "models")

    def __init__(self, key: Key) -> None:
        self.key = key
        self.models: Collection[str] | None = None if key.models is None else frozenset(key.models)
        self.allow_from = None if key.allow_from is None else Networks(key.allow_from)
        self.expires_at = key.expires_at
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
        # The weight applies only to the key's own tenant.
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
        clock: Monotonic clock of the checks of the file, in seconds.
        now: Time of day, in seconds since the epoch, at which keys expire.
        quotas: The service keeps quotas; otherwise a key with a quota is refused.

    Raises:
        SettingsError: The keys can't be read.
    """

    def __init__(
        self,
        settings: AccessSettings,
        *,
        environment: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
        quotas: bool = True,
    ) -> None:
        self._quotas = quotas
        self._file = WatchedFile(settings.keys_file, "access.keys_file") if settings.keys_file else None
        self._now = now
        self._trusted_proxies = Networks(settings.trusted_proxies)
        self._fixed: list[Key] = []
        if name := settings.keys_env:
            if name not in environment:
                raise SettingsError(f"access.keys_env: the environment has no variable {name}")
            self._fixed = self._read(environment[name], f"access.keys_env ({name})")
        self._keys: dict[str, list[Key]] = {}
        self._callers: dict[str, Caller] = {}
        self._rounds = Rounds("the look at the API keys", clock=clock)
        self._watched = False
        self._load()

    def refresh(self) -> None:
        """Read the file again if it has changed. If it can't be read, the last valid keys stay."""
        if self._file is None or not self._file.look():
            return
        try:
            self._load()
        except SettingsError as error:
            logger.warning("the API keys stay as they were: %s", error)
        except Exception:
            self._file.unread()
            raise
        else:
            logger.info("read the API keys again: there are %d now", len(self._keys))

    def watch(self, poll_s: float = POLL_S) -> None:
        """Refresh periodically, in a thread that ends when this object is garbage-collected.

        Args:
            poll_s: Seconds between two checks of the file.
        """
        if self._file:
            self._watched = True
            args = (weakref.ref(self), self._rounds, poll_s)
            threading.Thread(target=_watch, args=args, name="api-keys", daemon=True).start()

    def check(self) -> None:
        """Raise an error if the file is no longer watched, so that a revoked key would stay valid.

        An invalid or unreadable file raises no error here: the file is still watched, and the mistake is
        logged.
        """
        if self._watched:
            self._rounds.check()

    def find(self, headers: Headers) -> Caller:
        """Return the caller whose key is in the headers of a request.

        Raises:
            RequestError: 401, there is no key, or it is unknown, disabled or expired.
        """
        if not (key := _api_key(headers)):
            message = "An API key is required: send the header `Authorization: Bearer KEY`."
            raise RequestError(401, "authentication_error", message)
        # The time of the look-up depends on the hash, which an attacker can't control by choosing a key.
        if (caller := self._callers.get(hash_key(key))) is None:
            raise RequestError(401, "authentication_error", "This API key is not valid here.")
        if caller.key.disabled:
            raise RequestError(401, "authentication_error", "This API key is disabled.")
        if caller.expires_at <= self._now():
            message = f"This API key expired on {caller.key.expires:%Y-%m-%d at %H:%M} UTC."
            raise RequestError(401, "authentication_error", message)
        return caller

    def authenticate(self, headers: Headers, host: str | None) -> Caller:
        """Return the caller of a request.

        Args:
            headers: The request's headers.
            host: The address of the connection's other end; None or empty: unknown.

        Raises:
            RequestError: 401, see `find`; 403, the key doesn't allow the client's address.
        """
        caller = self.find(headers)
        if caller.allow_from is not None:
            address = client_address(host, headers, self._trusted_proxies)
            if address is None or address not in caller.allow_from:
                message = f"This API key may not be used from your address, {address or 'which is unknown'}."
                raise RequestError(403, "permission_error", message)
        return caller

    def describe(self) -> list[JSON]:
        """Return all secrets of all keys for an administrator, without hashes; see `Key.describe`."""
        now = self._now()
        return [key.describe(now) for secrets in self._keys.values() for key in secrets]

    def named(self, name: str) -> Key | None:
        """Return the key of that name, with a valid secret if it has one; None if there is no such key."""
        now = self._now()
        secrets = self._keys.get(name, [])
        return max(secrets, key=lambda key: key.state(now) == "valid", default=None)

    def state(self, name: str) -> State | None:
        """Return the present state of the key of that name: its best secret's; None: there is no such key."""
        key = self.named(name)
        return None if key is None else key.state(self._now())

    def _load(self) -> None:
        keys = self._fixed
        places = [f"keys_env[{number}]" for number in range(len(keys))]
        if self._file:
            more = self._read(self._file.read(), self._file.source)
            keys = keys + more
            places += [f"keys_file[{number}]" for number in range(len(more))]
        check_together(keys, places, "access")
        if not self._quotas and (limited := [key.name for key in keys if key.quota]):
            raise SettingsError(f"access: the quota of the key {limited[0]!r} needs args.usage.quotas")
        by_name: dict[str, list[Key]] = {}
        for key in keys:
            by_name.setdefault(key.name, []).append(key)
        self._keys = by_name
        # One assignment, since other threads read it meanwhile.
        self._callers = {key.sha256: Caller(key) for key in keys}

    def _read(self, text: str, source: str) -> list[Key]:
        """Read a list of keys; log a warning about each key that has expired or is there in plain text.

        Such a text is not refused: otherwise a key that it revokes would stay valid.
        """
        keys = read_keys(text, source)
        for line in expired_keys(keys, self._now()):
            logger.warning("%s: %s", source, line)
        if names := plain_keys(text, keys):
            logger.warning(
                "%s: has the key of %s in plain text; remove it, the hash is enough", source, ", ".join(names)
            )
        return keys


def _api_key(headers: Headers) -> bytes:
    """Return the key of a request; empty if it has no key."""
    # OpenAI's clients send a bearer token, Anthropic's clients `x-api-key`.
    return bearer_token(headers) or dict(headers).get(b"x-api-key", b"").strip()


def _watch(reference: "weakref.ref[KeyStore]", rounds: Rounds, poll_s: float) -> None:
    while keys := reference():
        with rounds.round():
            keys.refresh()
        # A reference that is held while the thread sleeps would keep the object alive.
        del keys
        time.sleep(poll_s)
