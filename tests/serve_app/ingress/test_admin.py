"""Routes for administrators."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve_app.auth.keys import hash_key
from serve_app.ingress import admin
from serve_app.ingress.deployment import Ingress
from serve_app.settings.schema import parse
from tests.serve_app.ingress.engine_doubles import LIMIT_S, Client, Engine, check_error, echo, health
from tests.serve_app.ledger.ledgers import write_row
from tests.serve_app.quotas.fleet import QuotasHandle

__all__ = ["health"]

KEYS = "/v1/admin/keys"
USAGE = "/v1/admin/usage"


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    """A ledger with one row."""
    return write_row(tmp_path / "usage", key="ada", output_tokens=15)


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch, ledger: Path) -> httpx.AsyncClient:
    """A client of an Ingress with a key of an administrator and another one."""
    return serving(monkeypatch, ledger={"folder": str(ledger)}, quotas={"folder": str(ledger)})


def serving(monkeypatch: pytest.MonkeyPatch, **usage: Any) -> httpx.AsyncClient:
    fields: dict[str, Any] = {
        "root": {"admin": True},
        "ada": {
            "quota": {"requests_per_minute": 60},
            "models": ["demo"],
            "expires": "2020-01-01",
            "weight": 2.0,
        },
        "bob": {},
    }
    entries = [
        {"name": name, "sha256": hash_key(name.encode()), "tenant": "research"} | more
        for name, more in fields.items()
    ]
    monkeypatch.setenv("KEYS", json.dumps(entries))
    settings = parse(
        {
            "models": [{"id": "demo", "source": "x"}],
            "access": {"keys_env": "KEYS"},
            "usage": usage,
        }
    )
    engines: Any = {"demo": Engine(echo)}
    quotas = QuotasHandle(settings.usage.quotas) if settings.usage.quotas else None
    ingress = Ingress(settings, engines, quotas=quotas)
    transport = httpx.ASGITransport(ingress.__serve_build_asgi_app__())
    return httpx.AsyncClient(transport=transport, base_url="http://saturate", timeout=LIMIT_S)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_an_administrator_lists_the_keys_without_their_hashes(client: httpx.AsyncClient) -> None:
    response = await client.get(KEYS, headers=bearer("root"))
    assert response.status_code == 200
    body = response.json()
    assert (body["object"], body["has_more"]) == ("list", False)
    shown = [(key["name"], key["state"], key["admin"], key["tenant"]) for key in body["data"]]
    assert shown == [
        ("root", "valid", True, "research"),
        ("ada", "expired", False, "research"),
        ("bob", "valid", False, "research"),
    ]
    ada = body["data"][1]
    assert (ada["quota"]["requests_per_minute"], ada["models"], ada["expires_at"]) == (
        60,
        ["demo"],
        1577836800,
    )
    for name in ("root", "ada", "bob"):
        assert hash_key(name.encode()) not in response.text
    assert "sha256" not in response.text


async def test_another_key_is_403(client: httpx.AsyncClient) -> None:
    check_error(await client.get(KEYS, headers=bearer("bob")), 403, "permission_error")
    check_error(await client.get(KEYS, headers=bearer("ada")), 401, "authentication_error")
    check_error(await client.get(KEYS), 401, "authentication_error")
    assert (await client.post(KEYS, headers=bearer("root"))).status_code == 405


@pytest.mark.parametrize("path", [KEYS, USAGE])
async def test_a_service_without_keys_has_no_administrator(path: str) -> None:
    async with Client() as client:
        message = check_error(await client.get(path), 403, "permission_error")
    assert "args.access" in message


async def test_an_administrator_reads_the_ledger(client: httpx.AsyncClient, ledger: Path) -> None:
    check_error(await client.get(USAGE, headers=bearer("bob")), 403, "permission_error")
    answer = await client.get(USAGE, params={"by": "key,model", "since": "7d"}, headers=bearer("root"))
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
    (row,) = answer.json()["rows"]
    assert (row["key"], row["model"], row["output_tokens"]) == ("ada", "", 15)
    answer = await client.get(USAGE, params={"by": "key", "format": "csv"}, headers=bearer("root"))
    assert answer.headers["content-type"].startswith("text/csv")
    assert answer.text.splitlines()[1].startswith("ada,1,")
    message = check_error(
        await client.get(USAGE, params={"by": "colour"}, headers=bearer("root")),
        400,
        "invalid_request_error",
        "by",
    )
    assert message.startswith("by: 'colour' is not a column")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"by": "colour"}, "by: 'colour' is not a column; use some of tenant, key"),
        ({"by": ""}, "by: names no column; use some of tenant, key"),
        ({"by": " ,"}, "by: names no column; use some of tenant, key"),
        ({"since": "--help"}, "since: '--help' is not a time"),
        ({"since": "1d", "until": "2d"}, "until must be later"),
        ({"format": "table"}, "format: 'table' is not a format of a report; take json or csv"),
        ({"config": "/etc/passwd"}, "config: unknown parameter; known are by, since"),
        ({"since": "7d\0"}, "since: must not have a NUL"),
    ],
)
async def test_a_wrong_parameter_is_400(
    client: httpx.AsyncClient, fields: dict[str, str], message: str
) -> None:
    answer = await client.get(USAGE, params=fields, headers=bearer("root"))
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("usage", "status", "type", "message"),
    [
        ({"ledger": {"folder": "/no/such"}}, 503, "service_unavailable", "no such folder"),
        ({}, 404, "not_found_error", "args.usage.ledger"),
    ],
)
async def test_a_ledger_that_is_not_there_is_told(
    monkeypatch: pytest.MonkeyPatch, usage: dict[str, Any], status: int, type: str, message: str
) -> None:
    client = serving(monkeypatch, quotas={"folder": "/nowhere"}, **usage)
    answer = await client.get(USAGE, headers=bearer("root"))
    assert message in check_error(answer, status, type)


async def test_a_report_that_takes_too_long_is_ended(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin, "WAIT_S", 0.2)
    monkeypatch.setattr(admin, "COMMAND", ("sh", "-c", "exec sleep 60"))
    answer = await client.get(USAGE, headers=bearer("root"))
    assert "ask for a shorter time" in check_error(answer, 503, "service_unavailable")
