"""API keys, and files with lists of keys.

The secret of a key is 256 random bits, so a plain SHA-256 is enough: salt and slow hashes protect secrets
that can be guessed, such as passwords. The file holds only hashes, so reading it gives no access.
"""

import hashlib
import math
import re
import secrets
from collections.abc import Sequence
from datetime import UTC, date, datetime, time
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PlainValidator, TypeAdapter, ValidationError, model_validator

from serve_app.api.protocol import JSON, Flag
from serve_app.api.scheduling import TIER_PRIORITY, Tenant
from serve_app.api.validation import lines
from serve_app.settings.addresses import Network
from serve_app.settings.batches import BatchLimits
from serve_app.settings.fields import ServedId, Strict, Weight
from serve_app.settings.schema import SettingsError
from serve_app.settings.usage import Quota
from serve_app.system.yaml_text import NotYAMLError, load

Tier = Literal["priority", "default", "flex"]
State = Literal["valid", "disabled", "expired"]


def _hash(text: str) -> str:
    if len(text) != 64 or set(text) - set("0123456789abcdef"):
        raise ValueError("must be the SHA-256 of the key: 64 hex digits in lower case")
    return text


Hash = Annotated[str, AfterValidator(_hash)]


def _read_time(text: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError:
        return datetime.fromisoformat(text)


def _expiry(value: object) -> datetime:
    """Return a moment in UTC. A date means its beginning in UTC."""
    try:
        if isinstance(value, str):
            value = _read_time(value)
        if isinstance(value, date) and not isinstance(value, datetime):
            value = datetime.combine(value, time(), UTC)
        if isinstance(value, datetime) and value.tzinfo is not None:
            return value.astimezone(UTC)
    except (ValueError, OverflowError):
        value = None
    if isinstance(value, datetime):
        raise ValueError(
            "has no time zone: write it with Z for UTC, as in 2027-01-31T18:00:00Z, or with an offset such "
            "as +02:00"
        )
    raise ValueError(
        "must be a date, such as 2027-01-31, or a time with its zone, such as 2027-01-31T18:00:00Z"
    )


class Key(Strict):
    """One secret of an API key, as its hash, and the requests that the key allows.

    Entries with one name are secrets of one key: they differ in `OF_A_SECRET` alone.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,63}$")] = Field(
        description=(
            "The holder's name, for messages and logs. Entries with one name are secrets of one key: they "
            "agree in all fields but `sha256`, `expires` and `disabled`."
        )
    )
    sha256: Hash = Field(description="The hash of the secret, in hex. Unique.")
    tenant: Tenant = Field(description="Tenant of the key's requests; tenants share the engines fairly.")
    weight: Weight | None = Field(
        default=None,
        description=(
            "The tenant's share of an engine relative to other tenants; by default the share in the model's "
            "`batcher.tenant_weights`. All keys of a tenant that state a weight must state the same weight."
        ),
    )
    any_tenant: Flag = Field(
        default=False, description="Requests may name other tenants: for a gateway that serves several."
    )
    tiers: Annotated[tuple[Tier, ...], Field(min_length=1)] = Field(
        default=("priority", "default", "flex"),
        description=(
            "Service tiers that requests may use. A request without a tier gets `default`, or the first of "
            "these tiers if `default` is not among them."
        ),
    )
    models: Annotated[tuple[ServedId, ...], Field(min_length=1)] | None = Field(
        default=None, description="Ids of the models and adapters that requests may name; by default all."
    )
    allow_from: Annotated[tuple[Network, ...], Field(min_length=1)] | None = Field(
        default=None, description="Address ranges from which clients may use the key; by default all."
    )
    expires: Annotated[datetime, PlainValidator(_expiry)] | None = Field(
        default=None, description="Time, in UTC, at which the secret becomes invalid; by default never."
    )
    disabled: Flag = Field(default=False, description="The secret is invalid while this is true.")
    admin: Flag = Field(
        default=False,
        description="The key may list the keys, read the usage of all keys, and load and unload adapters.",
    )
    quota: Quota | None = Field(
        default=None, description="Limits for all replicas together; needs `args.usage.quotas`."
    )
    batches: BatchLimits | None = Field(
        default=None, description="Limits on files and batches, in place of the limits in `args.batches`."
    )

    @model_validator(mode="before")
    @classmethod
    def _has_its_limits_in_a_quota(cls, fields: Any) -> Any:
        for name in sorted(Quota.model_fields.keys() & (fields if isinstance(fields, dict) else {})):
            raise ValueError(
                f"{name}: is a limit of the key's `quota`, for all replicas together: quota: {{{name}: …}}"
            )
        return fields

    @property
    def expires_at(self) -> float:
        """Seconds since the epoch at which the secret becomes invalid; infinity: never."""
        return self.expires.timestamp() if self.expires else math.inf

    def state(self, now: float) -> State:
        """Return the state of the secret at a time in seconds since the epoch."""
        if self.disabled:
            return "disabled"
        return "expired" if self.expires_at <= now else "valid"

    def describe(self, now: float) -> JSON:
        """Return the key as JSON for an administrator, without the hash of its secret.

        Args:
            now: Seconds since the epoch.
        """
        return {
            "object": "api_key",
            "state": self.state(now),
            **self.model_dump(mode="json", exclude={"sha256", "expires", "disabled"}),
            "expires_at": self.expires and int(self.expires_at),
        }

    def priorities(self) -> dict[int, str]:
        """Return the names of `tiers` by priority."""
        return {TIER_PRIORITY[tier]: tier for tier in self.tiers}


OF_A_SECRET = frozenset({"sha256", "expires", "disabled"})
"""Fields in which two secrets of one key may differ."""

_KEYS = TypeAdapter(list[Key])

_PLAIN = re.compile(r"sk-[A-Za-z0-9_-]{43}")
"""A key as `new_key` makes it."""

_QUOTED = re.compile(r"\b(alias|anchor|tag|handle) '.*", re.DOTALL)
"""The end of a YAML error, which quotes text that may be a key after a sign of YAML."""


def hash_key(key: bytes) -> str:
    """Return the SHA-256 of a key's secret, in hex."""
    return hashlib.sha256(key).hexdigest()


def new_key() -> str:
    """Return a new key: 256 random bits."""
    return f"sk-{secrets.token_urlsafe(32)}"


def check_together(keys: Sequence[Key], places: Sequence[str], source: str) -> None:
    """Raise a SettingsError if keys contradict each other.

    Args:
        keys: All valid keys.
        places: The paths of the keys.
        source: Their origin, for errors.
    """
    first: dict[str, int] = {}
    for number, key in enumerate(keys):
        other = first.setdefault(key.sha256, number)
        if other != number:
            where = f"{places[other]}.sha256 and {places[number]}.sha256"
            raise SettingsError(f"{source}: {where}: one hash twice: {keys[other].name}, {key.name}")
        # A hash is no name, so both may stand in one dictionary.
        other = first.setdefault(f"name {key.name}", number)
        for field in Key.model_fields:
            if field not in OF_A_SECRET and getattr(keys[other], field) != getattr(key, field):
                where = f"{places[other]}.{field} and {places[number]}.{field}"
                raise SettingsError(
                    f"{source}: {where}: two entries named {key.name} are secrets of one key, so they must "
                    f"have the same {field}; another key needs another name"
                )
    weights: dict[str, tuple[float, int]] = {}
    for number, key in enumerate(keys):
        if key.weight is not None:
            weight, other = weights.setdefault(key.tenant, (key.weight, number))
            if weight != key.weight:
                where = f"{places[other]}.weight and {places[number]}.weight"
                raise SettingsError(
                    f"{source}: {where}: two keys of the tenant {key.tenant!r} differ in weight"
                )


def read_keys(text: str, source: str) -> list[Key]:
    """Read a list of keys.

    Args:
        text: YAML or JSON.
        source: Its origin, for errors.

    Raises:
        SettingsError: The list is invalid. The message has the place, but no value, which may be a key.
    """
    try:
        content = load(text)
    except NotYAMLError as error:
        problem = _QUOTED.sub(r"\1", str(error))
        raise SettingsError(f"{source}: {problem}") from None
    if not isinstance(content, list):
        raise SettingsError(f"{source}: must be a list of keys, each with name, sha256 and tenant")
    try:
        keys = _KEYS.validate_python(content)
    except ValidationError as error:
        raise SettingsError(f"{source}: {'; '.join(lines(error, list[Key], secret=True))}") from None
    check_together(keys, [f"[{number}]" for number in range(len(keys))], source)
    return keys


def plain_keys(text: str, keys: list[Key]) -> list[str]:
    """Return the names of the keys whose secrets a text has in plain, such as in a comment.

    Args:
        text: The text of a list of keys.
        keys: The keys in it.
    """
    found = {hash_key(match.encode()) for match in _PLAIN.findall(text)}
    return list(dict.fromkeys(key.name for key in keys if key.sha256 in found))


def expired_keys(keys: Sequence[Key], now: float) -> list[str]:
    """Return a line about each key that has expired, with its path.

    Args:
        keys: A list of keys, as `read_keys` returns it.
        now: Seconds since the epoch.
    """
    return [
        f"[{number}].expires: the key {key.name} is invalid since {key.expires:%Y-%m-%d %H:%M} UTC"
        for number, key in enumerate(keys)
        if key.expires and key.expires_at <= now
    ]
