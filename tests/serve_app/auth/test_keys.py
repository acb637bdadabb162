"""API keys, their list, and errors that don't show a key."""

import json
import math
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from serve_app.auth.keys import read_keys
from serve_app.settings.schema import SettingsError

HASH = "a" * 64
ADA = {"name": "ada", "sha256": HASH, "tenant": "research"}
BOB = {"name": "bob", "sha256": "b" * 64, "tenant": "research"}
SECRET = "sk-do-not-print-me"


def error_of(content: Any) -> str:
    text = content if isinstance(content, str) else json.dumps(content)
    with pytest.raises(SettingsError) as caught:
        read_keys(text, "keys.yaml")
    assert str(caught.value).startswith("keys.yaml: ")
    assert SECRET not in str(caught.value)
    return str(caught.value)


def test_yaml_and_json_are_read_alike_and_limits_default_to_none() -> None:
    (key,) = read_keys(json.dumps([ADA]), "x")
    assert read_keys(yaml.safe_dump([ADA]), "x") == [key]
    assert (key.tiers, key.any_tenant) == (("priority", "default", "flex"), False)
    assert key.quota is None
    assert read_keys("[]", "x") == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": None}, "[0].name: "),
        ({"name": "a b"}, "[0].name: "),
        ({"sha256": SECRET}, "[0].sha256: must be the SHA-256 of the key: 64 hex digits"),
        ({"sha256": HASH.upper()}, "[0].sha256: must be"),
        ({"tenant": ""}, "[0].tenant: must be 1 to 128 printable characters"),
        ({"weight": 0}, "[0].weight: "),
        ({"tiers": []}, "[0].tiers: "),
        ({"tiers": ["best"]}, "[0].tiers[0]: "),
        ({"quota": {"requests_per_minute": 0}}, "[0].quota.requests_per_minute: "),
        ({"quota": {"max_concurrency": "5"}}, "[0].quota.max_concurrency: "),
        ({"requests_per_minute": 5}, "[0]: requests_per_minute: is a limit of the key's `quota`, for all"),
        ({"sha256": [HASH]}, "[0].sha256: "),
        ({"sha256": 7}, "[0].sha256: "),
        ({"models": []}, "[0].models: "),
        ({"models": ["demo", "a b"]}, "[0].models[1]: "),
        ({"models": "demo"}, "[0].models: "),
        ({"allow_from": []}, "[0].allow_from: "),
        ({"allow_from": ["10.0.0.0/8", "10.0.0.1/8"]}, "[0].allow_from[1]: '10.0.0.1/8' has bits after"),
        ({"allow_from": [SECRET]}, "[0].allow_from[0]: must be an address or a range of addresses"),
        ({"allow_from": "10.0.0.0/8"}, "[0].allow_from: "),
        ({"expires": "2027-01-31T18:00:00"}, "[0].expires: has no time zone: write it with Z for UTC"),
        ({"expires": "2027-02-30"}, "[0].expires: must be a date"),
        ({"expires": "tomorrow"}, "[0].expires: must be a date"),
        ({"expires": 1893456000}, "[0].expires: must be a date"),
        ({"expires": "0001-01-01T00:00:00+14:00"}, "[0].expires: must be a date"),
        ({"disabled": "yes"}, "[0].disabled: "),
        ({"admin": 1}, "[0].admin: "),
        ({"quota": {"tokens": 5}}, "[0].quota.tokens: unknown key; allowed here: tokens_per_minute, "),
        ({"quota": {"tokens_per_day": -5}}, "[0].quota.tokens_per_day: "),
        ({"batches": {"max_open": 5}}, "[0].batches.max_open: unknown key; allowed here: max_file_bytes"),
        ({"key": SECRET}, "[0].key: unknown key; `saturate schema` has them all"),
    ],
)
def test_an_error_has_its_place_and_not_its_value(change: dict[str, Any], words: str) -> None:
    assert words in error_of([ADA | change])


def test_a_field_that_stands_twice_is_an_error() -> None:
    text = f"- name: ada\n  sha256: {HASH}\n  tenant: a\n  models: [demo]\n  models: [{SECRET}]\n"
    assert "the field 'models' in line 5 is in line 4 too" in error_of(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ada",
        "{}",
        f"- sha256: {SECRET}\n  - x",
        f"[{SECRET}",
        f'["{SECRET}"]',
        f"- &a {SECRET}\x01",
        f"- !!int {SECRET}",
        "- !!int ''",
        "- !!bool maybe",
        "- !!timestamp soon",
        "[" * 2_000,
    ],
)
def test_anything_but_a_list_of_keys_is_refused_without_being_quoted(text: str) -> None:
    error_of(text)


@pytest.mark.parametrize("name", ["ada", "bob"])
def test_two_secrets_have_two_hashes(name: str) -> None:
    message = error_of([ADA, BOB | {"name": name, "sha256": HASH}])
    assert f"[0].sha256 and [1].sha256: one hash twice: ada, {name}" in message


SECOND = {"sha256": "c" * 64, "expires": "2027-01-31", "disabled": True}


def test_two_entries_with_one_name_are_two_secrets_of_one_key() -> None:
    assert [key.name for key in read_keys(json.dumps([ADA, BOB, ADA | SECOND]), "x")] == ["ada", "bob", "ada"]


@pytest.mark.parametrize(
    "change",
    [{"tenant": "x"}, {"admin": True}, {"models": ["demo"]}, {"quota": {"tokens_per_day": 5}}, {"weight": 2}],
    ids=lambda change: next(iter(change)),
)
def test_two_secrets_of_one_key_allow_the_same(change: dict[str, Any]) -> None:
    (field,) = change
    message = error_of([ADA, BOB, ADA | SECOND | change])
    assert f"[0].{field} and [2].{field}: two entries named ada are secrets of one key" in message


def test_the_keys_of_one_tenant_have_one_weight() -> None:
    message = error_of([ADA | {"weight": 1}, BOB | {"weight": 2}])
    assert "[0].weight and [1].weight: two keys of the tenant 'research' differ in weight" in message
    assert [key.weight for key in read_keys(json.dumps([ADA, BOB | {"weight": 2}]), "x")] == [None, 2]


# Expiry


def expiry(value: Any) -> datetime | None:
    text = value if isinstance(value, str) else value.isoformat()
    (key,) = read_keys(f"- {{name: ada, tenant: research, sha256: {HASH}, expires: {text}}}", "x")
    assert read_keys(json.dumps([ADA | {"expires": text}]), "x") == [key]
    return key.expires


def test_a_date_stands_for_its_beginning_in_utc() -> None:
    assert expiry("2027-01-31") == datetime(2027, 1, 31, tzinfo=UTC)


@pytest.mark.parametrize(
    "text",
    ["2027-01-31T18:00:00Z", "2027-01-31 18:00:00+00:00", "2027-01-31T20:00:00+02:00", "2027-01-31T18:00Z"],
)
def test_a_time_has_a_zone(text: str) -> None:
    assert expiry(text) == datetime(2027, 1, 31, 18, tzinfo=UTC)


@given(st.datetimes(datetime(1970, 1, 2), datetime(2999, 1, 1)), st.integers(-14 * 60, 14 * 60))
def test_a_time_of_any_zone_is_the_same_moment_in_utc(time: datetime, offset: int) -> None:
    moment = time.replace(tzinfo=timezone(timedelta(minutes=offset)))
    assert expiry(moment) == moment


def test_the_state_of_a_key() -> None:
    noon = datetime(2027, 1, 31, 12, tzinfo=UTC)
    key, off, forever = read_keys(
        json.dumps(
            [
                ADA | {"expires": noon.isoformat()},
                BOB | {"disabled": True, "expires": "2000-01-01"},
                {"name": "eve", "sha256": "e" * 64, "tenant": "x"},
            ]
        ),
        "x",
    )
    now = noon.timestamp()
    assert [key.state(now - 1), key.state(now), off.state(now)] == ["valid", "expired", "disabled"]
    assert forever.expires_at == math.inf


def test_an_administrator_sees_a_key_without_its_hashes() -> None:
    fields: Any = {
        "expires": "2027-01-31",
        "models": ["demo"],
        "allow_from": ["10.0.0.0/8", "::1"],
        "quota": {"requests_per_minute": 60},
    }
    (key,) = read_keys(json.dumps([ADA | fields]), "x")
    shown = json.loads(json.dumps(key.describe(0)))
    assert HASH not in json.dumps(shown)
    assert shown == {
        "object": "api_key",
        "state": "valid",
        "name": "ada",
        "tenant": "research",
        "weight": None,
        "any_tenant": False,
        "tiers": ["priority", "default", "flex"],
        "models": ["demo"],
        "allow_from": ["10.0.0.0/8", "::1/128"],
        "admin": False,
        "quota": {
            "tokens_per_minute": None,
            "tokens_per_day": None,
            "tokens_per_month": None,
            "requests_per_minute": 60,
            "max_concurrency": None,
        },
        "batches": None,
        "expires_at": 1801353600,
    }


# Keys in the wrong place


@pytest.mark.parametrize(
    "text",
    [
        f"- {SECRET}: ada",
        f"- {{name: ada, quota: {{{SECRET}: 5}}}}",
        f"- sha256: *{SECRET}",
        f"- sha256: !{SECRET} x",
        f"- sha256: !{SECRET}!y x",
    ],
    ids=["field", "inner field", "alias", "tag", "handle"],
)
def test_a_key_in_the_wrong_place_is_not_quoted(text: str) -> None:
    assert "sk-" not in error_of(text)
