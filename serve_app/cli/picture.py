"""Display of a service's statistics on a terminal."""

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import NamedTuple

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from serve_app.stats import BatchesStats, ModelStats, ReplicaStats, ServiceStats, Total, Use, total_of
from serve_app.system.tables import Cell, table

MOST_REPLICAS, MOST_TENANTS, MOST_ADAPTERS = 16, 10, 8
"""Maximum displayed replicas, tenants and adapters; the JSON has all."""

NOTHING = "-"

STYLES = {"ready": "green", "awake": "green", "error": "bold red", "failed": "bold red", "asleep": "dim"}
"""Colours of states; all other states are yellow."""


class Column(NamedTuple):
    """A column of the models' table.

    Attributes:
        head: Head of the column.
        cell: Returns the text of a cell.
        rank: Order of removal: a terminal that is too narrow drops the column with the highest rank first.
    """

    head: str
    cell: Callable[[Total], str]
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


ALWAYS = 3
"""A column with a rank below this one is displayed even if no model has a figure for it."""


def picture(
    url: str, time: datetime, stats: ServiceStats, console: Console, note: str = ""
) -> RenderableType:
    """Return the display of the statistics.

    Args:
        url: Address of the service.
        time: Time of the statistics.
        stats: The statistics.
        console: The terminal, whose width limits the columns.
        note: A message about the current state; may be empty.
    """
    head = f"  {plain(url)}  {time.astimezone():%H:%M:%S}"
    parts: list[RenderableType] = [Text.assemble(("saturate", "bold"), head, no_wrap=True)]
    if note:
        parts.append(Text(plain(note), style="bold red"))
    parts += [Text(), _models(stats.models, console.width)]
    parts += [line for id, model in stats.models.items() if (line := _adapters(id, model))]
    parts += [
        Text.assemble((f"{plain(id)}: ", "bold"), plain(text))
        for id, model in stats.models.items()
        for text in (model.detail, model.simulated and f"on a simulated device, {model.simulated}")
        if text
    ]
    if stats.tenants:
        parts += [Text(), _tenants(stats.tenants, console.width)]
    if stats.batches is not None:
        parts += [Text(), _batches(stats.batches)]
    return Group(*parts)


def _models(models: Mapping[str, ModelStats], width: int) -> Table:
    """Return the table of the models, with as many columns as fit."""
    totals = {id: model.total or total_of(model.replicas) for id, model in models.items()}
    columns = [
        column
        for column in COLUMNS
        if column.rank < ALWAYS or any(column.cell(one) != NOTHING for one in totals.values())
    ]
    rows: list[list[Cell]] = []
    for id, model in models.items():
        cells = [column.cell(totals[id]) for column in columns]
        rows.append([Text(plain(id), style="bold"), _model_state(model), *cells])
        shown = model.replicas if _is_detailed(model) else []
        for place, replica in enumerate(shown[:MOST_REPLICAS]):
            name = Text(f"  {plain(replica.replica or str(place))}", style="dim")
            rows.append(
                [name, _replica_state(replica), *(column.cell(total_of([replica])) for column in columns)]
            )
        if more := shown[MOST_REPLICAS:]:
            rows.append([Text(f"  {len(more)} more", style="dim"), *([""] * (len(columns) + 1))])
    heads = ["model", "state", *(column.head for column in columns)]
    ranks = {place: column.rank for place, column in enumerate(columns, 2) if column.rank}
    return table(heads, rows, left={0, 1}, ranks=ranks, width=width)


def _is_detailed(model: ModelStats) -> bool:
    """Return whether to show a line per replica, which adds nothing for a single ordinary replica."""
    return len(model.replicas) > 1 or any(one.batcher is None or one.turn for one in model.replicas)


def _model_state(model: ModelStats) -> Text:
    there, state = len(model.replicas), model.state or "unknown"
    replicas = "" if not there and not model.ready_replicas else f" {there}"
    if model.ready_replicas is not None and model.ready_replicas != there:
        replicas = f" {there}/{model.ready_replicas}"
    return Text(plain(state) + replicas, style=STYLES.get(state, "yellow"))


def _replica_state(replica: ReplicaStats) -> Text:
    if replica.batcher is None:
        return Text("no statistics", style="yellow")
    state = "" if replica.turn is None else plain(replica.turn.state)
    return Text(state, style=STYLES.get(state, "yellow"))


def _adapters(id: str, model: ModelStats) -> Text | None:
    """Return a line about the adapters of a model; None without adapters."""
    found: dict[str, list[bool]] = {}
    for one in (each for replica in model.replicas for each in replica.adapters or ()):
        if one is not None:
            found.setdefault(one.id, []).append(one.resident)
    if not found:
        return None
    shown = [f"{plain(name)} {sum(loaded)}/{len(loaded)}" for name, loaded in found.items()][:MOST_ADAPTERS]
    if len(found) > MOST_ADAPTERS:
        shown.append(f"{len(found) - MOST_ADAPTERS} more")
    return Text.assemble(
        (f"{plain(id)} adapters", "bold"), (" (loaded in replicas) ", "dim"), ", ".join(shown)
    )


def _tenants(tenants: Mapping[str, Use], width: int) -> Table:
    def size(item: tuple[str, Use]) -> tuple[float, int]:
        use = item[1]
        return use.tokens_per_s or 0.0, use.prompt + use.output + use.cost

    largest = sorted(tenants.items(), key=size, reverse=True)
    has_cost = any(use.cost for use in tenants.values())
    rows: list[list[Cell]] = [
        [
            plain(name),
            rate(use.tokens_per_s),
            *map(count, (use.calls, use.prompt, use.cached, use.output)),
            count(use.cost) if has_cost else "",
        ]
        for name, use in largest[:MOST_TENANTS]
    ]
    if more := largest[MOST_TENANTS:]:
        rows.append([Text(f"{len(more)} more", style="dim"), *([""] * 6)])
    heads = ["tenant", "tok/s", "calls", "tokens in", "cached", "tokens out", "cost"]
    return table(heads, rows, left={0}, ranks={2: 1, 3: 2, 5: 3, 4: 4, 6: 5}, width=width)


def _batches(batches: BatchesStats) -> Text:
    """Return a line about the files and batches of the service."""
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


def _goal(total: Total) -> str:
    goal = total.goals.ttft_p99_s if total.goals else None
    late = seconds(total.ttft_p99_s)
    return late if goal is None else f"{late} of {seconds(goal)}"
