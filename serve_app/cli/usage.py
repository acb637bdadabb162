"""The command `saturate usage`."""

import csv
import io
import json
from collections.abc import Callable, Sequence
from datetime import datetime
from decimal import Decimal
from functools import reduce
from pathlib import Path
from typing import Any

import click

from serve_app.cli.option_values import parse_time, parsed
from serve_app.ledger.prices import NOTHING, Prices, prices_of
from serve_app.ledger.report import BY, LedgerError, LedgerFiles, ReportLine, Total
from serve_app.settings.config_file import ConfigFileError, mapping, own_applications, read_file
from serve_app.settings.schema import parse
from serve_app.settings.usage import UsageSettings
from serve_app.system.command_line import WrongInput
from serve_app.system.tables import output_width, text_table

FORMULAS = ("=", "+", "-", "@", "\t", "\r")
"""Beginnings of a text that a spreadsheet takes for a formula. Clients choose the names of tenants."""

NUMBERS = ("calls", "prompt_tokens", "cached_tokens", "output_tokens", "cost", "wait_s", "engine_s")


def _columns(context: click.Context, parameter: click.Parameter, value: str) -> tuple[str, ...]:
    """Parse an option with a comma-separated list of columns."""
    names = tuple(part.strip() for part in value.split(",") if part.strip())
    if not names:
        raise click.BadParameter(f"names no column; use some of {', '.join(BY)}")
    for name in names:
        if name not in BY:
            raise click.BadParameter(f"{name!r} is not a column; use some of {', '.join(BY)}")
    return names


@click.command()
@click.argument("ledger", required=False)
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    help="A Serve config whose args.usage has the place of the ledger, and the prices.",
)
@click.option(
    "--by",
    callback=_columns,
    default="tenant",
    show_default=True,
    metavar="COLUMN[,COLUMN]",
    help=f"Sum up by these columns: {', '.join(BY)}.",
)
@click.option(
    "--since",
    callback=parsed(parse_time),
    default="30d",
    show_default=True,
    metavar="TIME",
    help="Calls that ended since this time: 90m, 24h, 7d or 4w ago, or a date. All times are UTC.",
)
@click.option(
    "--until",
    callback=parsed(parse_time),
    metavar="TIME",
    help="Calls that ended before this time.  [default: now]",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["table", "csv", "json"]),
    default="table",
    show_default=True,
    help="A table for people, CSV or JSON for programs.",
)
def usage(
    ledger: str | None,
    config: Path | None,
    by: tuple[str, ...],
    since: datetime,
    until: datetime | None,
    form: str,
) -> None:
    """Report usage from the files of LEDGER, summed by tenant or other columns.

    LEDGER is the folder or URL of a config's args.usage.ledger.folder; with --config it may be left out. The
    service needn't run.

    \b
    calls          calls that an engine ran
    prompt_tokens  tokens in, as the engine counts them, with cached tokens
    cached_tokens  tokens in from the prefix cache
    output_tokens  tokens out, with tokens that no client received
    cost           cost of the records of a function
    engine_s       seconds in the engine, summed over concurrent calls
    price          price, if the config or the ledger has prices

    A call has its row within a second of its end. A call that was lost with the process of its engine has no
    row. Lost and failed calls cost nothing. Prices are exact decimals.

    Exit codes: 0, also without calls; 1 a file can't be read; 2 the ledger or the config doesn't exist, or is
    wrong.

    \b
    Examples:
      saturate usage /var/lib/saturate/usage
      saturate usage --config serve.yaml --by tenant --since 7d
      saturate usage --config serve.yaml --by day,tenant --since 2026-11-01 --until 2026-12-01 --format csv
      saturate usage s3://bucket/usage --by key,model --format json
    """
    settings = _settings(config) if config else UsageSettings()
    place = ledger or (settings.ledger.folder if settings.ledger else "")
    if not place:
        where = f": {config} has no args.usage.ledger" if config else ""
        raise click.UsageError(f"name the folder or URL of a ledger, or a config with one (--config){where}")
    if until and until <= since:
        raise click.UsageError("--until must be later than --since")
    try:
        files = LedgerFiles(place)
        prices = prices_of(settings) or files.prices
        lines = files.sums(by, since=since, until=until, prices=prices)
    except LedgerError as error:
        raise WrongInput(str(error)) from None
    except OSError as error:
        raise click.ClickException(f"{place}: {error.strerror or error}") from None
    if files.wrong:
        click.echo(f"warning: {files.wrong} lines are not rows of the ledger and are left out", err=True)
    print(FORMS[form](by, lines, prices, since, until), end="")


def _settings(path: Path) -> UsageSettings:
    """Return the `usage` settings of a config."""
    try:
        apps = own_applications(read_file(path)).values()
        found = [parse(mapping(app.get("args"))).usage for app in apps]
    except ValueError as error:
        raise WrongInput(str(error) if isinstance(error, ConfigFileError) else f"{path}: {error}") from None
    with_ledger = [each for each in found if each.ledger]
    if len({each.ledger.folder for each in with_ledger if each.ledger}) > 1:
        raise WrongInput(f"{path}: its applications have several ledgers; name a ledger")
    return next(iter([*with_ledger, *found]), UsageSettings())


def _numbers(lines: Sequence[ReportLine], prices: Prices | None) -> list[str]:
    """Return the names of the number columns, without `cost` if it is always 0."""
    shown = [name for name in NUMBERS if name != "cost" or any(line.total.cost for line in lines)]
    return [*shown, *(["price"] if prices else [])]


def _sum(lines: Sequence[ReportLine], prices: Prices | None) -> Total:
    start = Total(price=NOTHING if prices else None)
    return reduce(Total.plus, (line.total for line in lines), start)


def _table(
    by: Sequence[str],
    lines: Sequence[ReportLine],
    prices: Prices | None,
    since: datetime,
    until: datetime | None,
) -> str:
    """Return the report as a table, with a line for the total."""
    names = [name for name in _numbers(lines, prices) if name != "wait_s"]
    period = f"calls that ended from {_time(since)} to {_time(until) if until else 'now'}, UTC"
    if not lines:
        return f"no {period}\n"
    heads = [*by, *(_head(name, prices) for name in names)]
    rows = [[*line.values, *(_shown(name, line.total) for name in names)] for line in lines]
    total = _sum(lines, prices)
    last = ["total", *([""] * (len(by) - 1)), *(_shown(name, total) for name in names)]
    drawn = text_table(heads, rows, left=range(len(by)), rule=True, last=last, width=output_width())
    return "\n".join([period, "", *drawn]) + "\n"


def _csv(
    by: Sequence[str],
    lines: Sequence[ReportLine],
    prices: Prices | None,
    since: datetime,
    until: datetime | None,
) -> str:
    names = [*NUMBERS, *(["price"] if prices else [])]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*by, *names, *(["currency"] if prices else [])])
    for line in lines:
        currency = [prices.currency] if prices else []
        values = [f"'{value}" if value.startswith(FORMULAS) else value for value in line.values]
        writer.writerow([*values, *(_plain(name, line.total) for name in names), *currency])
    return out.getvalue()


def _json(
    by: Sequence[str],
    lines: Sequence[ReportLine],
    prices: Prices | None,
    since: datetime,
    until: datetime | None,
) -> str:
    names = [*NUMBERS, *(["price"] if prices else [])]

    def fields(total: Total) -> dict[str, Any]:
        return {name: _plain(name, total) for name in names}

    body = {
        "since": since.isoformat(),
        "until": until.isoformat() if until else None,
        "currency": prices.currency if prices else None,
        "rows": [dict(zip(by, line.values, strict=True)) | fields(line.total) for line in lines],
        "total": fields(_sum(lines, prices)),
    }
    return json.dumps(body, indent=1, ensure_ascii=False) + "\n"


Form = Callable[[Sequence[str], Sequence[ReportLine], Prices | None, datetime, datetime | None], str]

FORMS: dict[str, Form] = {"table": _table, "csv": _csv, "json": _json}


def _head(name: str, prices: Prices | None) -> str:
    if name == "price" and prices:
        return prices.currency
    return name.removesuffix("_tokens").replace("engine_s", "engine s")


def _shown(name: str, total: Total) -> str:
    value = getattr(total, name)
    if name == "price":
        return f"{value:,.4f}" if value < 1 else f"{value:,.2f}"
    return f"{value:,.1f}" if name == "engine_s" else f"{value:,}"


def _plain(name: str, total: Total) -> Any:
    value = getattr(total, name)
    if isinstance(value, Decimal):
        # Without an exponent, and without trailing zeros of a division.
        return f"{value.normalize():f}"
    return round(value, 6) if isinstance(value, float) else value


def _time(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%d %H:%M")
