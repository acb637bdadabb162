"""The command `saturate usage`, on files of a ledger."""

import csv
import io
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from serve_app.cli.main import saturate
from serve_app.ledger.prices import pack
from serve_app.ledger.rows import utc
from serve_app.settings.usage import PriceSettings, UsageSettings
from tests.serve_app.ledger.ledgers import write_row

NOW = datetime.now(UTC)


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    """Return the folder of a ledger."""
    folder = tmp_path / "usage"
    write_row(folder, tenant="acme", key="ada", model="demo", output_tokens=1_500)
    write_row(folder, call="a-2", tenant="bits", model="demo", prompt_tokens=20)
    long_ago = utc((NOW - timedelta(days=9)).timestamp())
    return write_row(folder, call="a-3", time=long_ago, tenant="acme", output_tokens=7)


def ask(*arguments: object) -> Result:
    return CliRunner().invoke(saturate, ["usage", *map(str, arguments)])


def config(path: Path, usage: Any) -> Path:
    args = {"models": [{"id": "demo", "source": "x"}], "usage": usage}
    app = {"name": "llm", "import_path": "serve_app.app:build", "args": args}
    path.write_text(yaml.safe_dump({"applications": [app]}))
    return path


def test_a_table_has_a_line_per_tenant_and_one_for_all(ledger: Path) -> None:
    result = ask(ledger)
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines()]
    assert lines[2] == ["tenant", "calls", "prompt", "cached", "output", "engine", "s"]
    assert lines[4][:5] == ["acme", "2", "0", "0", "1,507"]
    assert lines[5][:3] == ["bits", "1", "20"]
    assert lines[7][:5] == ["total", "3", "20", "0", "1,507"]


def test_since_and_until_bound_the_time(ledger: Path) -> None:
    assert "1,500" in ask(ledger, "--since", "7d").stdout
    early = ask(ledger, "--since", "4w", "--until", "7d").stdout
    assert "1,500" not in early
    assert "7" in early
    assert ask(ledger, "--since", "2h", "--until", "1h").stdout.startswith("no calls that ended")


@pytest.mark.parametrize(
    ("text", "ago"),
    [
        ("90m", timedelta(minutes=90)),
        ("24h", timedelta(hours=24)),
        ("7d", timedelta(days=7)),
        ("4w", timedelta(weeks=4)),
    ],
)
def test_a_span_counts_back_from_now(text: str, ago: timedelta, ledger: Path) -> None:
    before = datetime.now(UTC)
    since = json.loads(ask(ledger, "--since", text, "--format", "json").stdout)["since"]
    assert before - ago <= datetime.fromisoformat(since) <= datetime.now(UTC) - ago


@pytest.mark.parametrize(
    ("text", "since"),
    [
        ("2026-11-01", "2026-11-01T00:00:00+00:00"),
        ("2026-11-01T12:00", "2026-11-01T12:00:00+00:00"),
        ("2026-11-01T12:00+02:00", "2026-11-01T10:00:00+00:00"),
    ],
)
def test_a_date_is_in_utc_unless_it_says_another_zone(text: str, since: str, ledger: Path) -> None:
    assert json.loads(ask(ledger, "--since", text, "--format", "json").stdout)["since"] == since


@pytest.mark.parametrize("text", ["", "7", "7y", "-7d", "1.5h", "yesterday", "2026-13-01", "999999w"])
def test_no_time_is_refused_with_examples(text: str) -> None:
    result = ask("x", f"--since={text}")
    assert result.exit_code == 2
    assert "is not a time; write 90m, 24h, 7d, 4w, or 2026-11-01" in result.stderr


def test_csv_and_json_have_plain_numbers(ledger: Path) -> None:
    (first, *_) = csv.DictReader(io.StringIO(ask(ledger, "--format", "csv", "--by", "tenant,key").stdout))
    assert (first["tenant"], first["key"], first["output_tokens"]) == ("acme", "ada", "1500")
    body = json.loads(ask(ledger, "--format", "json", "--by", "model").stdout)
    assert [row["model"] for row in body["rows"]] == ["demo", ""]
    assert body["total"]["output_tokens"] == 1_507
    assert body["currency"] is None


@pytest.mark.parametrize("tenant", ["=1+1", "+1", "-1", "@a", "\t=1", "=a,b"])
def test_a_name_is_no_formula_in_csv(tmp_path: Path, tenant: str) -> None:
    folder = write_row(tmp_path / "usage", tenant=tenant, output_tokens=1)
    (row,) = csv.DictReader(io.StringIO(ask(folder, "--format", "csv").stdout))
    assert (row["tenant"], row["output_tokens"]) == (f"'{tenant}", "1")
    (line,) = json.loads(ask(folder, "--format", "json").stdout)["rows"]
    assert line["tenant"] == tenant


def test_the_prices_of_the_config_make_a_cost(ledger: Path, tmp_path: Path) -> None:
    usage = {
        "ledger": {"folder": str(ledger), "format": "jsonl"},
        "prices": {"demo": {"input": 0.0, "output": 2_000.0}},
        "currency": "CHF",
    }
    result = ask("--config", config(tmp_path / "serve.yaml", usage), "--since", "7d")
    assert result.exit_code == 0, result.output
    assert "CHF" in result.stdout
    assert "3.00" in result.stdout


def test_without_a_config_the_prices_are_those_beside_the_files(ledger: Path) -> None:
    settings = UsageSettings(prices={"demo": PriceSettings(input=0.0, output=1_000.0)}, currency="EUR")
    (ledger / "prices.json").write_bytes(pack(settings))
    body = json.loads(ask(ledger, "--format", "json").stdout)
    assert (body["currency"], body["total"]["price"]) == ("EUR", "1.5")


@pytest.mark.parametrize("text", ['{"prices": {"demo": {"input": -1}}}', "no JSON"])
def test_wrong_prices_beside_the_files_are_told_with_the_fix(ledger: Path, tmp_path: Path, text: str) -> None:
    (ledger / "prices.json").write_text(text)
    result = ask(ledger)
    assert result.exit_code == 2
    assert "prices.json has no valid prices; remove it, or give a config with prices" in result.stderr
    priced = {"ledger": {"folder": str(ledger)}, "prices": {"demo": {"input": 1, "output": 1}}}
    assert ask("--config", config(tmp_path / "serve.yaml", priced), "--since", "7d").exit_code == 0


def test_lines_that_are_no_rows_are_told_and_left_out(ledger: Path) -> None:
    (ledger / f"day={NOW.date()}" / "b.00000.jsonl").write_bytes(b"what\n")
    result = ask(ledger)
    assert "1 lines are not rows" in result.stderr
    assert result.exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name the folder or URL of a ledger, or a config"),
        (["/no/such/folder"], "/no/such/folder: there is no such folder"),
        (["x", "--by", "colour"], "'colour' is not a column; use some of tenant, key"),
        (["x", "--since", "1h", "--until", "2h"], "--until must be later"),
        (["--config", "/no/such.yaml"], "/no/such.yaml: No such file or directory"),
        (["nosuch://bucket"], "nosuch://bucket: "),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], message: str) -> None:
    result = ask(*arguments)
    assert result.exit_code
    assert message in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("usage", "message"),
    [({}, "has no args.usage.ledger"), ({"ledgers": {}}, "args.usage.ledgers: unknown key")],
)
def test_a_config_without_a_ledger_is_told(tmp_path: Path, usage: Any, message: str) -> None:
    result = ask("--config", config(tmp_path / "serve.yaml", usage))
    assert result.exit_code
    assert message in result.output


def test_a_file_that_is_no_config_is_told(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("applications: [1]")
    assert "is not a config of Ray Serve" in ask("--config", path).output


def test_the_help_teaches() -> None:
    text = ask("--help").stdout
    assert "saturate usage --config serve.yaml --by tenant --since 7d" in text
    assert "cached_tokens" in text
