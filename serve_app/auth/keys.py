"""API keys: making one, and the list of them in a file.

A key is 256 random bits, so its plain SHA-256 is enough: salt and a slow hash protect secrets that can be
guessed, such as passwords. The file holds only hashes, so reading it gives no access.

    saturate keys new --name ada --tenant research >> keys.yaml
"""

import hashlib
import re
import secrets
import sys
from typing import Annotated, Any, Literal

import click
import yaml
from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from serve_app.api.protocol import Flag
from serve_app.api.scheduling import TIER_PRIORITY, Tenant
from serve_app.api.validation import field_path
from serve_app.settings.schema import Positive, Quota, SettingsError, Strict, Weight
from serve_app.system.command_line import run

Tier = Literal["priority", "default", "flex"]


def _hash(text: str) -> str:
    if len(text) != 64 or set(text) - set("0123456789abcdef"):
        raise ValueError("must be the SHA-256 of the key: 64 hex digits in lower case")
    return text


class Key(Strict):
    """One API key, as a hash, and the requests that it allows.

    Attributes:
        name: The holder's name, for messages and logs. Unique.
        sha256: The hash of the key, in hex.
        tenant: Tenant of the key's requests; tenants share the engines fairly.
        weight: The tenant's share of an engine relative to the other tenants; by default that of the model's
            `batcher.tenant_weights`. All keys of a tenant that state a weight state the same one.
        any_tenant: Requests may name other tenants: for a gateway that serves several.
        tiers: Service tiers that requests may use. One that names no tier gets `default`, or the first of
            these if `default` is not among them.
        requests_per_minute: Size of a token bucket that is refilled within a minute; by default no limit.
            Each Ingress replica counts by itself.
        max_concurrency: Most requests in flight at one Ingress replica; by default no limit.
        quota: Limits for all replicas together; needs `args.usage.quotas`.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,63}$")]
    sha256: Annotated[str, AfterValidator(_hash)]
    tenant: Tenant
    weight: Weight | None = None
    any_tenant: Flag = False
    tiers: Annotated[tuple[Tier, ...], Field(min_length=1)] = ("priority", "default", "flex")
    requests_per_minute: Positive | None = None
    max_concurrency: Positive | None = None
    quota: Quota | None = None

    def priorities(self) -> dict[int, str]:
        """Return the names of `tiers` by priority."""
        return {TIER_PRIORITY[tier]: tier for tier in self.tiers}


_KEYS = TypeAdapter(list[Key])

_PLAIN = re.compile(r"sk-[A-Za-z0-9_-]{43}")
"""A key as `new_key` makes it."""


def hash_key(key: bytes) -> str:
    """Return the SHA-256 of a key, in hex."""
    return hashlib.sha256(key).hexdigest()


def new_key() -> str:
    """Return a new key: 256 random bits."""
    return f"sk-{secrets.token_urlsafe(32)}"


def check_together(keys: list[Key], source: str) -> None:
    """Raise a SettingsError if keys contradict each other.

    Args:
        keys: All valid keys.
        source: Their origin, for errors.
    """
    for field in ("name", "sha256"):
        values = [getattr(key, field) for key in keys]
        if twice := {value for value in values if values.count(value) > 1}:
            names = ", ".join(key.name for key in keys if getattr(key, field) in twice)
            raise SettingsError(f"{source}: two keys with the same {field}: {names}")
    weights: dict[str, float] = {}
    for key in keys:
        if key.weight is not None and weights.setdefault(key.tenant, key.weight) != key.weight:
            raise SettingsError(f"{source}: two keys of the tenant {key.tenant!r} differ in weight")


def read_keys(text: str, source: str) -> list[Key]:
    """Read a list of keys.

    Args:
        text: YAML or JSON.
        source: Its origin, for errors.

    Raises:
        SettingsError: The list is wrong. The message has the place and no value, which may be a key.
    """
    try:
        content = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        line = f" in line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise SettingsError(f"{source}: this is not YAML: {error.problem}{line}") from None
    except yaml.YAMLError:
        raise SettingsError(f"{source}: this is not YAML") from None
    if not isinstance(content, list):
        raise SettingsError(f"{source}: must be a list of keys, each with name, sha256 and tenant")
    try:
        keys = _KEYS.validate_python(content)
    except ValidationError as error:
        lines = [_describe(item["loc"], item["type"], item["msg"]) for item in error.errors()]
        raise SettingsError(f"{source}: " + "; ".join(lines)) from None
    check_together(keys, source)
    return keys


def plain_keys(text: str, keys: list[Key]) -> list[str]:
    """Return the names of the keys that a text holds in plain, in a comment for example.

    Args:
        text: The text of a list of keys.
        keys: The keys in it.
    """
    found = {hash_key(match.encode()) for match in _PLAIN.findall(text)}
    return [key.name for key in keys if key.sha256 in found]


def _describe(place: tuple[int | str, ...], type: str, message: str) -> str:
    if type == "extra_forbidden":
        fields = Quota.model_fields if "quota" in place[:-1] else Key.model_fields
        message = f"unknown field; allowed are {', '.join(fields)}"
    return f"{field_path(place)}: {message.removeprefix('Value error, ')}"


def main() -> None:
    """Run the command line."""
    run(keys)


@click.group()
def keys() -> None:
    """Make API keys for the file that `access.keys_file` of a config names."""


@keys.command()
@click.option("--name", required=True, help="Person or program that gets the key; unique.")
@click.option("--tenant", required=True, help="Tenant of its requests; tenants share the engines fairly.")
@click.option(
    "--weight",
    type=float,
    help="The tenant's share in relation to the other tenants: 2 gets twice the tokens of 1.  "
    "[default: the model's batcher.tenant_weights]",
)
@click.option(
    "--tiers",
    multiple=True,
    metavar="TIER[,TIER]",
    help="Service tiers that the key may use, of priority, default, flex; `flex` alone for batch work.  "
    "[default: all]",
)
@click.option(
    "--requests-per-minute",
    type=int,
    metavar="N",
    help="Most requests per minute at each Ingress replica.  [default: no limit]",
)
@click.option(
    "--max-concurrency",
    type=int,
    metavar="N",
    help="Most requests in flight at each Ingress replica.  [default: no limit]",
)
@click.option(
    "--any-tenant",
    is_flag=True,
    help="Requests with this key may name other tenants; for a gateway that serves several.",
)
@click.argument("more_tiers", nargs=-1, metavar="")
def new(tiers: tuple[str, ...], more_tiers: tuple[str, ...], **values: Any) -> None:
    """Make a key and print its entry for the keys file.

    The entry, on standard output, has the key's hash. The key is shown once, on standard error, and kept
    nowhere.

    \b
    Examples:
      saturate keys new --name ada --tenant research >> keys.yaml
      saturate keys new --name nightly --tenant batch --tiers flex >> keys.yaml
    """
    if more_tiers and not tiers:
        raise click.UsageError(f"got unexpected extra argument {more_tiers[0]!r}")
    key = new_key()
    entry = {name: value for name, value in values.items() if value is not None and value is not False}
    # `--tiers flex default` is the form of earlier versions.
    if chosen := [tier for text in (*tiers, *more_tiers) for tier in text.split(",")]:
        entry["tiers"] = chosen
    entry["sha256"] = hash_key(key.encode())
    text = yaml.safe_dump([entry], sort_keys=False, allow_unicode=True)
    try:
        read_keys(text, "the key")
    except SettingsError as error:
        raise click.ClickException(str(error)) from None
    print(text, end="", flush=True)
    print(f"The key of {entry['name']}, shown only now:\n{key}", file=sys.stderr)


if __name__ == "__main__":
    main()
