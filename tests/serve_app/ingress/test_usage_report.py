"""Reports of a ledger's usage, by the command that makes them."""

import json
from pathlib import Path

import pytest

from serve_app.api.errors import RequestError
from serve_app.ingress import admin
from serve_app.ingress.admin import UsageReports
from tests.serve_app.ledger.ledgers import write_row


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    """Return the folder of a ledger with one row."""
    return write_row(tmp_path / "usage", tenant="acme", output_tokens=15)


async def test_a_report_has_the_sums_as_json_or_csv(ledger: Path) -> None:
    reports = UsageReports(str(ledger))
    text, kind = await reports.make({"by": "tenant,model", "since": "7d"})
    assert kind == "application/json"
    (row,) = json.loads(text)["rows"]
    assert (row["tenant"], row["model"], row["output_tokens"]) == ("acme", "", 15)
    text, kind = await reports.make({"format": "csv"})
    assert kind.startswith("text/csv")
    assert text.decode().splitlines()[1].startswith("acme,1,")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"by": "colour"}, "by: 'colour' is no column; take some of tenant, key"),
        ({"since": "--help"}, "since: '--help' is no time"),
        ({"since": "1d", "until": "2d"}, "until must be later"),
        ({"format": "table"}, "format: 'table' is no format of a report; take json or csv"),
        ({"config": "/etc/passwd"}, "config: unknown parameter; known are by, since"),
        ({"since": "7d\0"}, "since: must not have a NUL"),
    ],
)
async def test_a_wrong_parameter_is_400(ledger: Path, fields: dict[str, str], message: str) -> None:
    with pytest.raises(RequestError) as raised:
        await UsageReports(str(ledger)).make(fields)
    assert raised.value.status == 400
    assert message in str(raised.value)


async def test_a_ledger_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no such folder") as raised:
        await UsageReports(str(tmp_path / "none")).make({})
    assert raised.value.status == 503
    with pytest.raises(RequestError, match=r"args\.usage\.ledger") as raised:
        await UsageReports(None).make({})
    assert raised.value.status == 404


async def test_a_report_that_takes_too_long_is_ended(ledger: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin, "WAIT_S", 0.2)
    monkeypatch.setattr(admin, "COMMAND", ("sh", "-c", "exec sleep 60"))
    with pytest.raises(RequestError) as raised:
        await UsageReports(str(ledger)).make({})
    assert raised.value.status == 503
    assert "ask for a shorter time" in str(raised.value)
