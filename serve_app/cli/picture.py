"""Display of a service's figures on a terminal."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from serve_app.cli.figures import Figures, ModelFigures, ReplicaFigures, TenantFigures, View

MOST_REPLICAS, MOST_TENANTS, MOST_ADAPTERS = 16, 10, 8
"""Most displayed replicas, tenants and adapters; the JSON has all."""

NOTHING = "-"

STYLES = {"ready": "green", "awake": "green", "error": "bold red", "failed": "bold red", "asleep": "dim"}
"""Colours of states; all other states are yellow."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the models' table.

    Attributes:
        head: Head of the column.
        cell: Returns the text of a cell.
        rank: Order of removal: a terminal that is too narrow drops the column with the highest rank first.
    """

    head: str
    cell: Callable[[Figures], str]
    rank: int


COLUMNS = (
    Column("running", lambda one: _of(one.running, one.max_running), 1),
    Column("waiting", lambda one: count(one.waiting), 0),
    Column("by tier", lambda one: _tiers(one.waiting_by_tier), 4),
    Column("KV cache", lambda one: share(one.kv_used), 2),
    Column("tokens", lambda one: _of(one.kv_tokens, one.kv_capacity), 10),
    Column("out tok/s", lambda one: rate(one.output_tokens_per_s), 0),
    Column("in tok/s", lambda one: rate(one.prompt_tokens_per_s), 7),
    Column("req/s", lambda one: rate(one.requests_per_s), 6),
    Column("TTFT p50", lambda one: seconds(one.ttft_p50_s), 5),
    Column("TTFT p99", lambda one: _goal(one), 3),
    Column("wait p50", lambda one: seconds(one.wait_p50_s), 9),
    Column("wait p99", lambda one: seconds(one.wait_p99_s), 8),
    Column("busy", lambda one: share(one.busy), 11),
)


def picture(view: View, console: Console, note: str = "") -> RenderableType:
    """Return the display of the figures.

    Args:
        view: The figures.
        console: The terminal, whose width limits the columns.
        note: A message about the current state; may be empty.
    """
    parts: list[RenderableType] = [_head(view)]
    if note:
        parts.append(Text(plain(note), style="bold red"))
    parts += [Text(), _models(view.models, console)]
    parts += [_adapters(model) for model in view.models if model.adapters]
    parts += [
        Text.assemble((f"{plain(model.id)}: ", "bold"), plain(text))
        for model in view.models
        for text in (model.detail, model.simulated and f"on a simulated device, {model.simulated}")
        if text
    ]
    if view.tenants:
        parts += [Text(), _tenants(view.tenants, console)]
    if view.batches is not None:
        parts += [Text(), _batches(view)]
    return Group(*parts)


def _head(view: View) -> Text:
    moment = datetime.fromisoformat(view.time).astimezone()
    period = "" if view.interval_s is None else f"  rates over {view.interval_s:.3g} s"
    return Text.assemble(
        ("saturate", "bold"), f"  {plain(view.url)}  {moment:%H:%M:%S}", (period, "dim"), no_wrap=True
    )


def _models(models: Sequence[ModelFigures], console: Console) -> Table:
    """Return the table of the models, with as many columns as fit."""
    columns = [
        column
        for column in COLUMNS
        if any(column.cell(model.figures) != NOTHING for model in models) or column.rank < 3
    ]
    while True:
        table = _models_table(models, columns)
        widest = max(columns, key=lambda column: column.rank)
        if widest.rank == 0 or _fits(table, console):
            return table
        columns.remove(widest)


def _models_table(models: Sequence[ModelFigures], columns: Sequence[Column]) -> Table:
    table = _table("model", "state")
    for column in columns:
        table.add_column(column.head, justify="right", no_wrap=True)
    for model in models:
        cells = (column.cell(model.figures) for column in columns)
        table.add_row(Text(plain(model.id), style="bold"), _model_state(model), *cells)
        shown = model.replicas if _is_detailed(model) else ()
        for replica in shown[:MOST_REPLICAS]:
            cells = (column.cell(replica.figures) for column in columns)
            table.add_row(Text(f"  {plain(replica.replica)}", style="dim"), _replica_state(replica), *cells)
        if more := shown[MOST_REPLICAS:]:
            table.add_row(Text(f"  {len(more)} more", style="dim"))
    return table


def _is_detailed(model: ModelFigures) -> bool:
    """Return whether to show a line per replica, which adds nothing for a single ordinary replica."""
    return len(model.replicas) > 1 or any(not one.statistics or one.turn for one in model.replicas)


def _model_state(model: ModelFigures) -> Text:
    there = len(model.replicas)
    replicas = "" if not there and not model.ready_replicas else f" {there}"
    if model.ready_replicas is not None and model.ready_replicas != there:
        replicas = f" {there}/{model.ready_replicas}"
    return Text(plain(model.state) + replicas, style=STYLES.get(model.state, "yellow"))


def _replica_state(replica: ReplicaFigures) -> Text:
    if not replica.statistics:
        return Text("no statistics", style="yellow")
    state = "" if replica.turn is None else plain(replica.turn.state)
    return Text(state, style=STYLES.get(state, "yellow"))


def _adapters(model: ModelFigures) -> Text:
    shown = [f"{plain(one.id)} {one.resident}/{one.replicas}" for one in model.adapters[:MOST_ADAPTERS]]
    if more := model.adapters[MOST_ADAPTERS:]:
        shown.append(f"{len(more)} more")
    return Text.assemble(
        (f"{plain(model.id)} adapters", "bold"), (" (loaded in replicas) ", "dim"), ", ".join(shown)
    )


def _tenants(tenants: Sequence[TenantFigures], console: Console) -> Table:
    heads = {"tok/s": 0, "calls": 1, "tokens in": 2, "cached": 4, "tokens out": 3}
    if any(one.cost for one in tenants):
        heads["cost"] = 5
    while True:
        table = _table("tenant")
        for head in heads:
            table.add_column(head, justify="right", no_wrap=True)
        for one in tenants[:MOST_TENANTS]:
            cells = {
                "tok/s": rate(one.tokens_per_s),
                "calls": count(one.calls),
                "tokens in": count(one.prompt_tokens),
                "cached": count(one.cached_tokens),
                "tokens out": count(one.output_tokens),
                "cost": count(one.cost),
            }
            table.add_row(Text(plain(one.tenant)), *(cells[head] for head in heads))
        if more := tenants[MOST_TENANTS:]:
            table.add_row(Text(f"{len(more)} more", style="dim"))
        if len(heads) == 1 or _fits(table, console):
            return table
        del heads[max(heads, key=heads.__getitem__)]


def _batches(view: View) -> Text:
    """Return a line about the files and batches of the service."""
    batches = view.batches
    assert batches is not None
    if batches.error:
        return Text.assemble(("batches: ", "bold"), plain(batches.error))
    parts = [f"{open} {state}" for state, open in batches.batches.items() if open]
    if parts:
        rows = batches.rows
        parts.append(f"rows: {count(rows.waiting)} waiting, {count(rows.in_flight)} in flight")
        parts.append(f"{rate(batches.rows_per_s)} rows/s")
        if batches.eta_s:
            parts.append(f"{seconds(batches.eta_s)} left")
        if batches.late:
            parts.append(f"{count(batches.late)} will be late")
    return Text.assemble(("batches: ", "bold"), plain(" · ".join(parts) or "none is open"))


def _table(*heads: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for head in heads:
        table.add_column(head, no_wrap=True, overflow="ellipsis")
    return table


def _fits(table: Table, console: Console) -> bool:
    # Without a larger width, the measured maximum would never exceed the console's width.
    options = console.options.update(max_width=10_000)
    return Measurement.get(console, options, table).maximum <= console.width


def plain(text: str) -> str:
    """Replace unprintable characters, which could control the terminal, by spaces."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def count(value: int | None) -> str:
    """Return a count in short form: 950, 1.2k, 131k, 4.1M."""
    if value is None:
        return NOTHING
    size, letters = float(value), iter(("", "k", "M", "G", "T"))
    letter = next(letters)
    while size >= 999.5 and (following := next(letters, None)):
        size, letter = size / 1000, following
    return f"{size:.1f}{letter}" if letter and size < 9.95 else f"{size:.0f}{letter}"


def rate(value: float | None) -> str:
    """Return a rate: 0.4, 12, 1.2k."""
    if value is None:
        return NOTHING
    return f"{value:.1f}" if 0 < value < 9.95 else count(round(value))


def share(value: float | None) -> str:
    """Return a share as a percentage."""
    return NOTHING if value is None else f"{value:.0%}"


def seconds(value: float | None) -> str:
    """Return a time with its unit: 12 ms, 1.4 s, 3 min."""
    if value is None:
        return NOTHING
    if value < 0.9995:
        return f"{1000 * value:.0f} ms"
    return f"{value:.1f} s" if value < 99.95 else f"{value / 60:.0f} min"


def _of(part: int | None, whole: int | None) -> str:
    return count(part) if whole is None else f"{count(part)}/{count(whole)}"


def _tiers(tiers: dict[str, int]) -> str:
    return ", ".join(f"{count(waiting)} {name}" for name, waiting in tiers.items()) or NOTHING


def _goal(figures: Figures) -> str:
    late = figures.ttft_p99_s
    if figures.ttft_goal_s is None:
        return seconds(late)
    return f"{seconds(late)} of {seconds(figures.ttft_goal_s)}"
