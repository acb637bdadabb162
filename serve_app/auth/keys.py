"""API keys: how one is made, and how it is written down.

A key is 256 random bits, so its plain SHA-256 is enough: salt and a slow hash protect what can be guessed, as
passwords can. The file holds only hashes; who reads it can call nobody.

    python -m serve_app.auth.keys new --name ada --tenant research
"""

import argparse
import hashlib
import secrets
import sys
from typing import Annotated, Literal

import yaml
from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from serve_app.api.protocol import Flag
from serve_app.api.scheduling import TIER_PRIORITY, Tenant
from serve_app.settings.schema import Positive, SettingsError, Strict, Weight

Tier = Literal["priority", "default", "flex"]


def _hash(text: str) -> str:
    if len(text) != 64 or set(text) - set("0123456789abcdef"):
        raise ValueError("must be the SHA-256 of the key: 64 hex digits in lower case")
    return text


class Key(Strict):
    """What one key allows.

    Attributes:
        name: Who it was given to; messages and logs say it. Unique.
        sha256: The hash of the key, in hex.
        tenant: Whose requests these are: tenants share the engines fairly.
        weight: The tenant's share of an engine in relation to the other tenants; by default what the
            model's `batcher.tenant_weights` says. The keys of one tenant that have one have the same.
        any_tenant: The caller may name other tenants: for a gateway that serves several.
        tiers: Service tiers that it may use; a request that names none gets `default`, or else the first.
        requests_per_minute: So many at once, and refilled at that rate; by default no limit. It holds
            for each Ingress replica by itself.
        max_concurrency: Most requests in flight at one Ingress replica; by default no limit.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,63}$")]
    sha256: Annotated[str, AfterValidator(_hash)]
    tenant: Tenant
    weight: Weight | None = None
    any_tenant: Flag = False
    tiers: Annotated[tuple[Tier, ...], Field(min_length=1)] = ("priority", "default", "flex")
    requests_per_minute: Positive | None = None
    max_concurrency: Positive | None = None

    def priorities(self) -> dict[int, str]:
        """Return the classes of `tiers`, by their priorities."""
        return {TIER_PRIORITY[tier]: tier for tier in self.tiers}


_KEYS = TypeAdapter(list[Key])


def hash_key(key: bytes) -> str:
    """Return what is kept of a key."""
    return hashlib.sha256(key).hexdigest()


def new_key() -> str:
    """Return a new key: 256 random bits."""
    return f"sk-{secrets.token_urlsafe(32)}"


def check_together(keys: list[Key], source: str) -> None:
    """Raise a SettingsError if keys contradict each other.

    Args:
        keys: All that hold at one time.
        source: Where they are from, for errors.
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
        source: Where it is from, for errors.

    Raises:
        SettingsError: It says what is wrong and where, and no value: that may be a key.
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
        mistakes = (_mistake(item["loc"], item["type"], item["msg"]) for item in error.errors())
        raise SettingsError(f"{source}: " + "; ".join(mistakes)) from None
    check_together(keys, source)
    return keys


def _mistake(place: tuple[int | str, ...], type: str, message: str) -> str:
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    if type == "extra_forbidden":
        message = f"unknown field; allowed are {', '.join(Key.model_fields)}"
    return f"{path}: {message.removeprefix('Value error, ')}"


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m serve_app.auth.keys", description="Make API keys.")
    commands = parser.add_subparsers(required=True)
    new = commands.add_parser("new", help="make a key; print it once, and its entry for the keys file")
    new.add_argument("--name", required=True, help="who it is for; unique")
    new.add_argument("--tenant", required=True, help="whose requests these are")
    new.add_argument("--weight", type=float, help="the tenant's share in relation to the others")
    new.add_argument("--tiers", nargs="+", help="priority, default, flex; by default all")
    new.add_argument("--requests-per-minute", type=int)
    new.add_argument("--max-concurrency", type=int)
    new.add_argument("--any-tenant", action="store_true", default=None, help="may name other tenants")
    key = new_key()
    options = {name: value for name, value in vars(parser.parse_args()).items() if value is not None}
    entry = options | {"sha256": hash_key(key.encode())}
    text = yaml.safe_dump([entry], sort_keys=False, allow_unicode=True)
    try:
        read_keys(text, "the key")
    except SettingsError as error:
        sys.exit(f"error: {error}")
    print(f"# The key, which is kept nowhere. Give it to {entry['name']}:\n# {key}\n{text}", end="")


if __name__ == "__main__":
    main()
