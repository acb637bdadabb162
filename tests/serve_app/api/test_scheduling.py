"""The scheduling of a request: from fields, from headers, and which of them goes first."""

import pickle
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from serve_app.api.errors import RequestError
from serve_app.api.headers import Headers
from serve_app.api.scheduling import (
    DEFAULT_SCHEDULING,
    TIER_PRIORITY,
    Scheduling,
    SchedulingFields,
    ServiceTier,
    scheduling_of,
)

NOTHING = SchedulingFields()


def refusal(name: bytes, value: bytes) -> RequestError:
    with pytest.raises(RequestError) as caught:
        scheduling_of([(name, value)], NOTHING)
    error = caught.value
    assert (error.status, error.type, error.param) == (400, "invalid_request_error", name.decode())
    assert error.message.startswith(f"{name.decode()}: ")
    return error


# Fields


def test_a_request_that_states_nothing_has_the_defaults() -> None:
    assert (
        NOTHING.scheduling()
        == scheduling_of([], NOTHING)
        == DEFAULT_SCHEDULING
        == Scheduling(0, "default", None)
    )


@pytest.mark.parametrize(
    ("tier", "priority"),
    [("priority", -1), ("fast", -1), ("auto", 0), ("default", 0), ("scale", 0), ("flex", 1)],
)
def test_a_service_tier_is_a_class(tier: ServiceTier, priority: int) -> None:
    assert SchedulingFields(service_tier=tier).scheduling().priority == priority
    assert tier in TIER_PRIORITY


def test_fields_become_scheduling() -> None:
    fields = SchedulingFields(service_tier="flex", tenant="Jo Smith", queue_timeout_s=1.5)
    assert fields.scheduling() == Scheduling(1, "Jo Smith", 1.5)


def test_a_client_that_says_it_comes_back_gets_no_advantage() -> None:
    assert scheduling_of([(b"x-stainless-retry-count", b"1")], NOTHING) == scheduling_of([], NOTHING)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("service_tier", "best"),
        ("service_tier", 0),
        ("tenant", ""),
        ("tenant", "a" * 129),
        ("tenant", "a\nb"),
        ("tenant", "\x00"),
        ("tenant", 5),
        ("queue_timeout_s", 0),
        ("queue_timeout_s", -1),
        ("queue_timeout_s", 86_401),
        ("queue_timeout_s", "5"),
        ("queue_timeout_s", True),
        ("queue_timeout_s", float("nan")),
        ("queue_timeout_s", float("inf")),
    ],
)
def test_a_wrong_field_is_refused(field: str, value: object) -> None:
    values: dict[str, Any] = {field: value}
    with pytest.raises(ValidationError) as caught:
        SchedulingFields(**values)
    assert caught.value.errors()[0]["loc"] == (field,)


@pytest.mark.parametrize("tenant", ["a", "a" * 128, "é", "名前", "a b"])
def test_a_tenant_is_anything_that_can_be_printed(tenant: str) -> None:
    assert SchedulingFields(tenant=tenant).scheduling().tenant == tenant
    assert scheduling_of([(b"x-tenant", tenant.encode())], NOTHING).tenant == tenant


# Headers


def test_a_header_goes_before_the_body() -> None:
    fields = SchedulingFields(service_tier="flex", tenant="body", queue_timeout_s=1)
    headers: Headers = [(b"x-tenant", b"header"), (b"x-queue-timeout-seconds", b"2.5")]
    assert scheduling_of(headers, fields) == Scheduling(1, "header", 2.5)
    assert scheduling_of(headers[:1], fields) == Scheduling(1, "header", 1)
    assert scheduling_of(headers[1:], fields) == Scheduling(1, "body", 2.5)


def test_the_key_is_the_tenant_of_a_request_without_one() -> None:
    key: Headers = [(b"authorization", b"Bearer sk-secret")]
    tenant = scheduling_of(key, NOTHING).tenant
    # sha256 of "sk-secret", as `sha256sum` prints it.
    assert tenant == "key-746b4ad1ca91"
    assert scheduling_of([(b"authorization", b"bearer sk-secret")], NOTHING).tenant == tenant
    assert scheduling_of([(b"authorization", b"Bearer other")], NOTHING).tenant != tenant
    assert scheduling_of([*key, (b"x-tenant", b"me")], NOTHING).tenant == "me"
    assert scheduling_of(key, SchedulingFields(tenant="me")).tenant == "me"


@pytest.mark.parametrize("value", [b"", b"Bearer", b"Bearer ", b"Basic dTpw", b"sk-secret"])
def test_a_request_without_a_key_has_the_default_tenant(value: bytes) -> None:
    assert scheduling_of([(b"authorization", value)], NOTHING).tenant == "default"


@given(st.binary(min_size=1, max_size=50))
def test_any_bytes_may_be_a_key_and_none_shows(key: bytes) -> None:
    tenant = scheduling_of([(b"authorization", b"Bearer " + key)], NOTHING).tenant
    assert tenant == "default" or (tenant.startswith("key-") and len(tenant) == 16)


# Shares


KEY: Headers = [(b"authorization", b"Bearer sk-secret")]


@pytest.mark.parametrize("scheduling", [DEFAULT_SCHEDULING, scheduling_of(KEY, NOTHING)])
def test_adapters_have_shares_of_their_own_where_the_tenant_is_not_known(scheduling: Scheduling) -> None:
    shares = [scheduling.share(adapter) for adapter in ("demo:letters", "demo:symbols", "")]
    assert shares == [
        f"{scheduling.tenant}/demo:letters",
        f"{scheduling.tenant}/demo:symbols",
        scheduling.tenant,
    ]


@pytest.mark.parametrize(
    "scheduling",
    [
        Scheduling(tenant="acme"),
        scheduling_of(KEY, SchedulingFields(tenant="acme")),
        scheduling_of([*KEY, (b"x-tenant", b"acme")], NOTHING),
        scheduling_of(KEY, NOTHING, tenant="acme"),
    ],
    ids=["handle", "field", "header", "key"],
)
def test_a_known_tenant_has_one_share_for_all_adapters(scheduling: Scheduling) -> None:
    assert {scheduling.share(adapter) for adapter in ("demo:letters", "demo:symbols", "")} == {"acme"}


@pytest.mark.parametrize("value", [b"", b"a" * 129, b"\xff", b"a\tb", "a\u2028b".encode()])
def test_a_wrong_tenant_is_refused(value: bytes) -> None:
    assert "1 to 128 printable characters" in refusal(b"x-tenant", value).message


@pytest.mark.parametrize("value", [b"", b"soon", b"0", b"-1", b"nan", b"inf", b"86401", b"1_0", b"\xff"])
def test_a_wrong_timeout_is_refused(value: bytes) -> None:
    assert "above 0 and at most 86400" in refusal(b"x-queue-timeout-seconds", value).message


@pytest.mark.parametrize(
    ("value", "seconds"), [(b"0.25", 0.25), (b" 5 ", 5), (b"1e2", 100), (b"86400", 86400)]
)
def test_a_timeout_is_a_number_of_seconds(value: bytes, seconds: float) -> None:
    assert scheduling_of([(b"x-queue-timeout-seconds", value)], NOTHING).queue_timeout_s == seconds


@given(name=st.sampled_from([b"x-tenant", b"x-queue-timeout-seconds", b"authorization"]), value=st.binary())
def test_arbitrary_headers_raise_nothing_but_a_request_error(name: bytes, value: bytes) -> None:
    with suppress(RequestError):
        scheduling = scheduling_of([(name, value)], NOTHING)
        assert 1 <= len(scheduling.tenant) <= 128
        assert scheduling.queue_timeout_s is None or 0 < scheduling.queue_timeout_s <= 86_400


# Deadlines


def test_a_deadline_is_on_the_clock_of_the_caller() -> None:
    assert Scheduling(queue_timeout_s=2.5).deadline(100.0) == 102.5
    assert DEFAULT_SCHEDULING.deadline(100.0) is None


def test_terms_cross_a_handle_whole() -> None:
    scheduling = Scheduling(-1, "t", 0.5)
    assert pickle.loads(pickle.dumps(scheduling)) == scheduling
