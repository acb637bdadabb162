"""Valid keys, their permissions and addresses, and their reload."""

import gc
import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from serve_app.api.errors import RequestError
from serve_app.api.scheduling import SchedulingFields
from serve_app.auth.key_store import Caller, KeyStore
from serve_app.settings.ingress import AccessSettings
from serve_app.settings.schema import SettingsError
from serve_app.system.rounds import SILENT_S
from tests.fakes.clock import Clock
from tests.progress import STILL_S

LIMIT_S = STILL_S
KEY = "sk-ada"


def sha256(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()


def entry(key: str = KEY, **more: Any) -> dict[str, Any]:
    return {"name": key.removeprefix("sk-"), "sha256": sha256(key.encode()), "tenant": "research"} | more


def made(*entries: dict[str, Any]) -> KeyStore:
    return KeyStore(AccessSettings(keys_env="KEYS"), environment={"KEYS": json.dumps(entries)})


def bearer(key: str) -> list[tuple[bytes, bytes]]:
    return [(b"host", b"x"), (b"authorization", f"Bearer {key}".encode())]


def caller(**more: Any) -> Caller:
    return made(entry(**more)).find(bearer(KEY))


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    path = tmp_path / "keys.json"
    count = 0

    def write(content: object) -> Path:
        nonlocal count
        # As a whole: a store that reads half of it logs an error, and the log keeps the store alive.
        new = path.with_suffix(".new")
        new.write_text(content if isinstance(content, str) else json.dumps(content))
        # However coarse the clock of the file system.
        count += 1
        os.utime(new, (count, count))
        new.replace(path)
        return path

    return write


def names(store: KeyStore, *keys: str) -> list[str]:
    found = []
    for key in keys:
        try:
            found.append(store.find(bearer(key)).key.name)
        except RequestError:
            found.append("-")
    return found


# Keys


@pytest.mark.parametrize(
    "header",
    [
        (b"authorization", b"Bearer sk-ada"),
        (b"authorization", b"bearer  sk-ada "),
        (b"x-api-key", b"sk-ada"),
    ],
)
def test_a_key_is_found_by_its_hash(header: tuple[bytes, bytes]) -> None:
    assert made(entry("sk-bob"), entry()).find([header]).key.name == "ada"


@pytest.mark.parametrize(
    "headers",
    [
        [],
        bearer(""),
        bearer("sk-ad"),
        bearer("sk-adaa"),
        bearer(sha256(KEY.encode())),
        [(b"authorization", b"Basic sk-ada")],
        [(b"authorization", b"sk-ada")],
        [(b"authorization", b"Bearer \xff\x00")],
    ],
)
def test_a_request_without_a_valid_key_is_401(headers: list[tuple[bytes, bytes]]) -> None:
    with pytest.raises(RequestError) as caught:
        made(entry()).find(headers)
    assert (caught.value.status, caught.value.type) == (401, "authentication_error")
    assert caught.value.headers() == {"www-authenticate": "Bearer"}


# Permissions


def test_the_tenant_comes_from_the_key() -> None:
    assert caller().scheduling([], SchedulingFields()).tenant == "research"
    assert (
        caller().scheduling([(b"x-tenant", b"research")], SchedulingFields(tenant="research")).tenant
        == "research"
    )


@pytest.mark.parametrize(
    ("headers", "fields"),
    [([(b"x-tenant", b"other")], SchedulingFields()), ([], SchedulingFields(tenant="other"))],
)
def test_another_tenant_is_403_unless_the_key_allows_any(
    headers: list[tuple[bytes, bytes]], fields: SchedulingFields
) -> None:
    with pytest.raises(RequestError) as caught:
        caller().scheduling(headers, fields)
    assert (caught.value.status, caught.value.param) == (403, "tenant")
    assert caller(any_tenant=True).scheduling(headers, fields).tenant == "other"


def test_the_weight_of_a_key_holds_for_its_own_tenant() -> None:
    heavy = caller(weight=2.5, any_tenant=True)
    assert heavy.scheduling([], SchedulingFields()).weight == 2.5
    assert heavy.scheduling([(b"x-tenant", b"other")], SchedulingFields()).weight is None
    assert caller().scheduling([], SchedulingFields()).weight is None


@pytest.mark.parametrize(
    ("tiers", "tier", "priority"),
    [
        (["flex"], None, 1),
        (["flex"], "auto", 1),
        (["flex"], "flex", 1),
        (["priority", "flex"], None, -1),
        (["default"], "scale", 0),
        (["priority", "default"], "fast", -1),
        (["priority", "default"], None, 0),
    ],
)
def test_a_tier_is_one_of_the_key_s(tiers: list[str], tier: Any, priority: int) -> None:
    assert caller(tiers=tiers).scheduling([], SchedulingFields(service_tier=tier)).priority == priority


@pytest.mark.parametrize(
    ("tiers", "tier"),
    [(["flex"], "default"), (["flex"], "fast"), (["default", "flex"], "priority"), (["default"], "flex")],
)
def test_another_tier_is_403(tiers: list[str], tier: Any) -> None:
    with pytest.raises(RequestError) as caught:
        caller(tiers=tiers).scheduling([], SchedulingFields(service_tier=tier))
    assert (caught.value.status, caught.value.type, caught.value.param) == (
        403,
        "permission_error",
        "service_tier",
    )


# Expiry and state


class Time:
    """A time of day that the test sets."""

    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


NOON = 1801396800.0
"""2027-01-31, 12:00 UTC."""


def refusal(store: KeyStore, key: str = KEY) -> str:
    with pytest.raises(RequestError) as caught:
        store.find(bearer(key))
    assert (caught.value.status, caught.value.type) == (401, "authentication_error")
    assert key not in caught.value.message
    return caught.value.message


def test_a_key_expires_at_its_moment_without_a_reload() -> None:
    now = Time(NOON - 0.001)
    text = json.dumps([entry(expires="2027-01-31T12:00:00Z")])
    keys = KeyStore(AccessSettings(keys_env="KEYS"), environment={"KEYS": text}, now=now)
    assert names(keys, KEY) == ["ada"]
    now.now = NOON
    assert refusal(keys) == "This API key expired on 2027-01-31 at 12:00 UTC."


def test_a_key_that_has_expired_may_be_loaded_with_a_warning(
    write: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    path = write([entry("sk-a"), entry(expires="2020-01-01")])
    keys = KeyStore(AccessSettings(keys_file=str(path)))
    assert names(keys, "sk-a", KEY) == ["a", "-"]
    (record,) = caplog.records
    assert record.getMessage().endswith(
        f"({path}): [1].expires: the key ada is invalid since 2020-01-01 00:00 UTC"
    )


def test_a_disabled_key_is_401_until_it_is_enabled(write: Callable[..., Path]) -> None:
    keys = KeyStore(AccessSettings(keys_file=str(write([entry(disabled=True)]))))
    assert refusal(keys) == "This API key is disabled."
    write([entry()])
    keys.refresh()
    assert names(keys, KEY) == ["ada"]


def test_all_keys_are_described_without_hashes(write: Callable[..., Path]) -> None:
    both = AccessSettings(keys_file=str(write([entry("sk-a", disabled=True)])), keys_env="KEYS")
    keys = KeyStore(
        both,
        environment={"KEYS": json.dumps([entry("sk-b", expires="2027-01-31T12:00:00Z")])},
        now=Time(NOON),
    )
    shown = keys.describe()
    assert [(key["name"], key["state"]) for key in shown] == [("b", "expired"), ("a", "disabled")]
    assert sha256(b"sk-a") not in json.dumps(shown)


# Changes of the file


def test_a_changed_file_is_valid_from_the_next_refresh_on(write: Callable[..., Path]) -> None:
    keys = KeyStore(AccessSettings(keys_file=str(write([entry("sk-a")]))))
    assert names(keys, "sk-a", "sk-b") == ["a", "-"]
    write([entry("sk-b")])
    assert names(keys, "sk-a", "sk-b") == ["a", "-"]
    keys.refresh()
    assert names(keys, "sk-a", "sk-b") == ["-", "b"]


def test_both_secrets_of_a_key_hold_until_the_older_entry_goes(write: Callable[..., Path]) -> None:
    old, new = (entry(sha256=sha256(key.encode())) for key in ("sk-old", "sk-new"))
    keys = KeyStore(AccessSettings(keys_file=str(write([old]))))
    for entries, found in (([old, new], ["ada", "ada"]), ([new], ["-", "ada"])):
        write(entries)
        keys.refresh()
        assert names(keys, "sk-old", "sk-new") == found


@pytest.mark.parametrize(
    ("first", "second", "state"),
    [
        ({}, {"disabled": True}, "valid"),
        ({"expires": "2020-01-01"}, {}, "valid"),
        ({"expires": "2020-01-01"}, {"disabled": True}, "expired"),
    ],
)
def test_a_key_is_valid_while_one_of_its_secrets_is(
    first: dict[str, Any], second: dict[str, Any], state: str
) -> None:
    keys = made(entry(**first), entry(sha256="c" * 64, **second))
    assert keys.state("ada") == state
    assert len(keys.describe()) == 2
    assert keys.state("eve") is None


@pytest.mark.parametrize(
    "broken",
    [
        "- {name: sk-canary",
        json.dumps([entry("sk-a", allow_from=["sk-canary"])]),
        json.dumps([entry("sk-a"), entry("sk-b", sha256=sha256(b"sk-a"))]),
        None,
    ],
)
def test_a_broken_file_leaves_the_keys_and_warns_once(
    write: Callable[..., Path], broken: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    path = write([entry("sk-a")])
    keys = KeyStore(AccessSettings(keys_file=str(path)))
    if broken is None:
        path.unlink()
    else:
        write(broken)
    for _ in range(3):
        keys.refresh()
    assert names(keys, "sk-a") == ["a"]
    (record,) = (record for record in caplog.records if record.levelno == logging.WARNING)
    assert str(path) in record.getMessage()
    assert "canary" not in record.getMessage()
    write([entry("sk-b")])
    keys.refresh()
    assert names(keys, "sk-a", "sk-b") == ["-", "b"]


class Looks(Clock):
    """The clock of a store whose file is watched, and its time of day, which may fail.

    Attributes:
        failing: Whether the time of day can't be told, so that a changed file can't be read.
    """

    def __init__(self) -> None:
        super().__init__()
        self.failing = False
        self._looked = threading.Event()

    def __call__(self) -> float:
        # It is asked after each look that has not failed.
        self._looked.set()
        return super().__call__()

    def time_of_day(self) -> float:
        """Return the seconds since the epoch."""
        if self.failing:
            self._looked.set()
            raise MemoryError
        return time.time()

    def wait(self) -> None:
        """Wait until a look has begun and ended."""
        for _ in range(2):
            self._looked.clear()
            assert self._looked.wait(LIMIT_S)


@pytest.fixture
def looks() -> Looks:
    return Looks()


@pytest.fixture
def watched(write: Callable[..., Path], looks: Looks) -> KeyStore:
    """A store with the key sk-a, whose file is watched."""
    settings = AccessSettings(keys_file=str(write([entry("sk-a")])))
    keys = KeyStore(settings, clock=looks, now=looks.time_of_day)
    keys.watch(0.01)
    return keys


def test_the_file_is_watched_while_the_store_lives(write: Callable[..., Path], looks: Looks) -> None:
    before = set(threading.enumerate())
    keys = KeyStore(AccessSettings(keys_file=str(write([entry("sk-a")]))), clock=looks)
    keys.watch(0.01)
    # Threads of other stores may not have ended yet.
    (thread,) = set(threading.enumerate()) - before
    write([entry("sk-b")])
    looks.wait()
    assert names(keys, "sk-a", "sk-b") == ["-", "b"]
    del keys
    gc.collect()
    thread.join(LIMIT_S)
    assert not thread.is_alive()


def test_an_unforeseen_error_is_logged_and_the_change_is_read_later(
    watched: KeyStore, write: Callable[..., Path], looks: Looks, caplog: pytest.LogCaptureFixture
) -> None:
    looks.failing = True
    write([entry("sk-b")])
    looks.wait()
    looks.failing = False
    looks.wait()
    assert names(watched, "sk-a", "sk-b") == ["-", "b"]
    (record,) = (record for record in caplog.records if record.levelname == "ERROR")
    assert record.getMessage().startswith("the look at the API keys failed; it is tried again")
    assert record.exc_info


def test_keys_that_cannot_be_followed_fail_the_health(
    watched: KeyStore, write: Callable[..., Path], looks: Looks
) -> None:
    looks.failing = True
    write([entry("sk-b")])
    looks.wait()
    watched.check()
    looks.now += 2 * SILENT_S
    looks.wait()
    with pytest.raises(RuntimeError, match="the look at the API keys has not succeeded for 120 s"):
        watched.check()
    looks.failing = False
    looks.wait()
    watched.check()


@pytest.mark.parametrize("broken", ["- name: [", ""])
def test_a_file_that_is_wrong_does_not_fail_the_health(
    watched: KeyStore, write: Callable[..., Path], looks: Looks, broken: str
) -> None:
    write(broken)
    looks.wait()
    looks.now += 2 * SILENT_S
    looks.wait()
    watched.check()
    assert names(watched, "sk-a") == ["a"]


def test_keys_that_nothing_follows_do_not_fail_the_health(looks: Looks) -> None:
    settings = AccessSettings(keys_env="KEYS")
    keys = KeyStore(settings, environment={"KEYS": json.dumps([entry()])}, clock=looks)
    keys.watch()
    looks.now += 2 * SILENT_S
    keys.check()


@pytest.mark.parametrize("settings", [{"keys_file": "/nowhere/keys.yaml"}, {"keys_env": "NO_SUCH"}])
def test_a_missing_source_of_keys_is_an_error_at_the_start(settings: dict[str, str]) -> None:
    with pytest.raises(SettingsError, match=r"access\.keys_"):
        KeyStore(AccessSettings.model_validate(settings), environment={})


def test_a_file_and_the_environment_may_both_hold_keys(write: Callable[..., Path]) -> None:
    both = AccessSettings(keys_file=str(write([entry("sk-a")])), keys_env="KEYS")
    keys = KeyStore(both, environment={"KEYS": json.dumps([entry("sk-b")])})
    assert names(keys, "sk-a", "sk-b") == ["a", "b"]
    with pytest.raises(SettingsError, match="one hash twice: a, a"):
        KeyStore(both, environment={"KEYS": json.dumps([entry("sk-a")])})


def test_a_source_with_a_key_in_plain_text_works_and_warns(
    write: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    key = f"sk-{'x' * 43}"
    path = write(f"# {key}\n{json.dumps([entry(key, name='a')])}")
    keys = KeyStore(AccessSettings(keys_file=str(path)))
    assert names(keys, key) == ["a"]
    (record,) = caplog.records
    assert str(path) in record.getMessage()
    assert "plain text" in record.getMessage()
    assert key not in record.getMessage()


# Addresses


def from_address(
    host: str | None, *forwarded: str, trusted: Sequence[str] = ("127.0.0.0/8",), **more: Any
) -> int:
    """Return the status of a request from an address, with a key for 10.0.0.0/8 and 2001:db8::/32."""
    allowed = {"allow_from": ["10.0.0.0/8", "2001:db8::/32"]} | more
    settings = AccessSettings.model_validate({"keys_env": "KEYS", "trusted_proxies": trusted})
    keys = KeyStore(settings, environment={"KEYS": json.dumps([entry(**allowed)])})
    headers = bearer(KEY) + [(b"x-forwarded-for", value.encode()) for value in forwarded]
    try:
        found = keys.authenticate(headers, host).key.name
    except RequestError as error:
        refused = error
    else:
        assert found == "ada"
        return 200
    assert refused.type == "permission_error"
    assert KEY not in refused.message
    return refused.status


@pytest.mark.parametrize(
    ("host", "forwarded", "status"),
    [
        ("10.1.2.3", [], 200),
        ("::ffff:10.1.2.3", [], 200),
        ("2001:db8::7", [], 200),
        ("203.0.113.9", [], 403),
        (None, [], 403),
        # A client's own word.
        ("203.0.113.9", ["10.1.2.3"], 403),
        ("127.0.0.1", ["10.1.2.3"], 200),
        ("127.0.0.1", ["203.0.113.9"], 403),
        # tests/serve_app/settings/test_addresses.py has all forms of the header.
        ("127.0.0.1", ["10.1.2.3, 203.0.113.9"], 403),
        ("127.0.0.1", [], 403),
    ],
)
def test_a_key_is_for_its_addresses(host: str | None, forwarded: list[str], status: int) -> None:
    assert from_address(host, *forwarded) == status


def test_without_trusted_proxies_the_header_does_not_count() -> None:
    assert from_address("127.0.0.1", "10.1.2.3", trusted=()) == 403


def test_a_key_without_ranges_is_for_all_addresses() -> None:
    assert from_address(None, allow_from=None) == 200
