"""The part of the statistics that a caller may see."""

from typing import Any

import pytest

from serve_app.api.protocol import JSON
from serve_app.auth.key_store import Caller
from serve_app.auth.keys import Key
from serve_app.auth.rate_limit import RateLimit
from serve_app.ingress.status import own_part


def caller(name: str, **fields: Any) -> Caller:
    """Return the caller with a key of the tenant `research`."""
    key = Key.model_validate({"name": name, "sha256": "0" * 64, "tenant": "research"} | fields)
    return Caller(key, RateLimit(lambda: 0.0))


def stats() -> JSON:
    limit = {"tokens_per_day": {"limit": 9, "remaining": 4, "reserved": 0, "ends_in_s": 60.0}}
    return {
        "models": {
            "demo": {
                "replicas": [
                    {"replica": "a", "usage": {"tenants": {"research": {"calls": 1}, "sales": {"calls": 2}}}}
                ]
            },
            "none": {"replicas": [], "error": "no answer"},
        },
        "quotas": {
            "holders": 2,
            "limits": {"key ada": limit, "key bob": limit, "tenant research": limit, "tenant sales": limit},
        },
    }


def test_a_key_sees_its_own_usage_and_limits() -> None:
    found = own_part(stats(), caller("ada"))
    (replica,) = found["models"]["demo"]["replicas"]
    assert set(replica["usage"]["tenants"]) == {"research"}
    assert set(found["quotas"]["limits"]) == {"key ada", "tenant research"}
    assert found["quotas"]["holders"] == 2


@pytest.mark.parametrize("who", [None, caller("root", admin=True)])
def test_an_administrator_sees_all_and_so_does_anybody_without_keys(who: Caller | None) -> None:
    assert own_part(stats(), who) == stats()


def test_a_service_without_quotas_has_none_to_show() -> None:
    assert own_part({"models": {}}, caller("ada")) == {"models": {}}
    away = {"models": {}, "quotas": {"error": "the replica is gone"}}
    assert own_part(away, caller("ada")) == away
