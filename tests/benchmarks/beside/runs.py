"""Cases, systems, and the runs of both."""

import asyncio
import dataclasses
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai

from serve_app.simulation.profiles import PROFILES
from tests.benchmarks.batches.live import API, FIRST_ROW, beside_batch, write_rows
from tests.benchmarks.beside.traffic import WARM_UP_S, Rows, Seen, Traffic, send
from tests.benchmarks.measuring import Row, Table, progress
from tests.benchmarks.serve.groups import CLIENT
from tests.benchmarks.serve.models import Model, about, simulated
from tests.benchmarks.serve.running import Server, UnavailableError, with_log
from tests.benchmarks.serve.servers import saturate, vllm_serve
from tests.e2e.service import ROOT

OURS, BATCH, ARRIVAL, PRIORITIES = "saturate", "saturate-batch", "vllm", "vllm-priorities"
LIVE_ALONE, ROWS_ALONE = "live-alone", "rows-alone"

FLEX = {"service_tier": "flex"}
LOW = {"priority": 10}
"""Fields of a row for this project, and for vLLM."""

BATCH_ROWS = 12_000
"""Rows of a batch that doesn't end within a run."""

EARLIER_WARM_UP_S = 60.0
"""Seconds for the controller of an earlier tree to find its window."""

START_S, END_S = 40.0, 10.0
"""Expected seconds to start a server, and to end a run."""

REST_S = 3.0
"""Seconds for a server to end the rows of a run."""


@dataclass(frozen=True, slots=True)
class Device:
    """A simulated device with its live traffic.

    Attributes:
        profile: Name of the profile.
        rate: Live requests per second.
    """

    profile: str
    rate: float

    @property
    def seconds(self) -> float:
        """Seconds of a measurement: 300 live requests."""
        return 300 / self.rate


@dataclass(frozen=True, slots=True)
class Case:
    """Rows beside the live traffic of a device, and the figures to reach.

    Attributes:
        device: Name of the device.
        rows: The rows.
        share: Least rows' tokens/s, of those of vLLM in arrival order.
        goals: Goals of this project; empty: none.
        ratio: Largest TTFT p99 of the live requests, of that of live requests alone; None: not asked.
        ttft_ms: Largest TTFT p99 of the live requests, in milliseconds; None: not asked.
        tpot_ms: Largest TPOT p99 of them; None: not asked.
        earlier: Goals of an earlier tree, whose controller needs one for the TTFT.
        warm_up_s: Seconds until as many rows end as begin.
        bounds: TPOT goals of the sweep, in seconds.
        earlier_bounds: TTFT goals of the sweep of an earlier tree, in seconds.
    """

    device: str
    rows: Rows
    share: float
    earlier: Mapping[str, float]
    goals: Mapping[str, float] = field(default_factory=dict)
    ratio: float | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    warm_up_s: float = WARM_UP_S
    bounds: Sequence[float] = ()
    earlier_bounds: Sequence[float] = ()


DEVICE_OF: Mapping[str, Device] = {"l4": Device("l4-7b", 2.0), "h100": Device("h100-7b", 4.0)}
"""Devices by name."""

CASES: Mapping[str, Case] = {
    "l4-64-64": Case("l4", Rows(250, 64, 64), 0.95, {"ttft_p99_s": 0.47}, ratio=1.35),
    "l4-64-256": Case("l4", Rows(250, 64, 256), 0.95, {"ttft_p99_s": 0.47}, ratio=1.35),
    "l4-512-128": Case(
        "l4",
        Rows(250, 512, 128),
        0.78,
        {"ttft_p99_s": 0.56, "tpot_p99_s": 0.15},
        goals={"tpot_p99_s": 0.15},
        ratio=1.6,
        # The prompts of the first rows alone take 20 s.
        warm_up_s=60.0,
        bounds=(0.1, 0.13, 0.2, 0.3),
        earlier_bounds=(0.4, 0.8, 1.2),
    ),
    "h100-64-256": Case("h100", Rows(250, 64, 256), 0.97, {"ttft_p99_s": 0.09}, ttft_ms=90.0),
    "h100-2048-128": Case(
        "h100",
        Rows(100, 2048, 128),
        0.9,
        {"ttft_p99_s": 0.15, "tpot_p99_s": 0.03},
        goals={"tpot_p99_s": 0.03},
        ttft_ms=150.0,
        tpot_ms=33.0,
        bounds=(0.015, 0.02, 0.045, 0.06),
        earlier_bounds=(0.1, 0.2, 0.3),
    ),
}
"""Cases by name: device, tokens of a row's prompt, and mean tokens of its answer."""


@dataclass(frozen=True, slots=True)
class System:
    """A server with its settings.

    Attributes:
        kind: This project, this project with the rows in a batch of the batch API, vLLM with a scheduling
            policy, or the name of an earlier tree.
        goals: Goals for the live requests.
        tree: Checkout of this project.
    """

    kind: str = OURS
    goals: tuple[tuple[str, float], ...] = ()
    tree: Path = ROOT

    @property
    def extra(self) -> Mapping[str, Any]:
        """Fields of the body of a row."""
        return {ARRIVAL: {}, PRIORITIES: LOW}.get(self.kind, FLEX)

    def start(
        self, model: Model, folder: Path, telemetry: Mapping[str, Any] | None = None
    ) -> AbstractContextManager[Server]:
        """Start it with a model, a folder for its files, and settings of this project's telemetry."""
        if self.kind in (ARRIVAL, PRIORITIES):
            policy = "fcfs" if self.kind == ARRIVAL else "priority"
            engine = {**model.engine, "scheduling_policy": policy}
            return vllm_serve(dataclasses.replace(model, engine=engine), folder)
        batcher = {"goals": dict(self.goals)} if self.goals else {}
        batches = Path(tempfile.mkdtemp(dir=folder)) if self.kind == BATCH else None
        return saturate(model, folder, batcher, telemetry, batches, tree=self.tree)


@dataclass(frozen=True, slots=True)
class Run:
    """One measurement.

    Attributes:
        name: `CASE/SYSTEM`; `DEVICE/live-alone`.
        device: Name of the device.
        system: The server.
        traffic: The load.
    """

    name: str
    device: str
    system: System
    traffic: Traffic

    @property
    def expected_s(self) -> float:
        """Expected seconds, without the start of the server."""
        return self.traffic.warm_up_s + self.traffic.seconds + END_S

    @property
    def setting(self) -> str:
        """A description for the table."""
        rows, said = self.traffic.rows, []
        if self.traffic.rate:
            said.append(f"{self.traffic.rate:g} live streams/s")
        if rows:
            count = "a batch with rows" if self.system.kind == BATCH else f"{rows.in_flight} rows in flight"
            said.append(f"{count} of {rows.prompt} tokens in and {rows.answer} out")
        goals = ", ".join(f"{name} {value:g}" for name, value in self.system.goals) or "no goals"
        device = about(DEVICE_OF[self.device].profile)
        return f"{device}: {', '.join(said)}; {self.system.kind}, {goals}"


def runs(
    trees: Mapping[str, Path], *, sweep: bool, batch: bool = False, seconds: float | None = None
) -> list[Run]:
    """Return all runs; those of one server follow each other.

    Args:
        trees: Earlier trees by name.
        sweep: Whether goals are varied too, in the cases that say how.
        batch: Whether the rows come in a batch of the batch API too.
        seconds: Seconds of each measurement, and most of the warm-up; None: the usual ones.
    """
    found = []
    for device, facts in DEVICE_OF.items():
        traffic = Traffic(facts.rate, None, facts.seconds)
        found.append(Run(f"{device}/{LIVE_ALONE}", device, System(), traffic))
    for name, case in CASES.items():
        facts = DEVICE_OF[case.device]
        goals, earlier = tuple(case.goals.items()), tuple(case.earlier.items())
        with_rows = Traffic(facts.rate, case.rows, facts.seconds, case.warm_up_s)
        alone = dataclasses.replace(with_rows, rate=0.0, seconds=facts.seconds / 2)
        slow = dataclasses.replace(with_rows, warm_up_s=max(case.warm_up_s, EARLIER_WARM_UP_S))
        systems = [
            (ROWS_ALONE, System(), alone),
            (OURS, System(OURS, goals), with_rows),
            (ARRIVAL, System(ARRIVAL), with_rows),
            (PRIORITIES, System(PRIORITIES), with_rows),
        ]
        if batch:
            systems.append((BATCH, System(BATCH, goals), with_rows))
        systems += [(tree, System(tree, earlier, path), slow) for tree, path in trees.items()]
        if sweep and case.bounds:
            systems.append((f"{OURS}-without-goals", System(), with_rows))
            for bound in case.bounds:
                bounded = System(OURS, (("tpot_p99_s", bound),))
                systems.append((f"{OURS}-{bound * 1e3:g}ms", bounded, with_rows))
            for (tree, path), bound in itertools.product(trees.items(), case.earlier_bounds):
                bounded = System(tree, tuple({**case.earlier, "ttft_p99_s": bound}.items()), path)
                systems.append((f"{tree}-{bound * 1e3:g}ms", bounded, slow))
        for kind, system, traffic in systems:
            rows = dataclasses.replace(case.rows, extra=system.extra)
            load = dataclasses.replace(traffic, rows=rows)
            found.append(Run(f"{name}/{kind}", case.device, system, load))
    if seconds is not None:
        found = [_short(run, seconds) for run in found]
    servers = list(dict.fromkeys((run.device, run.system) for run in found))
    return sorted(found, key=lambda run: servers.index((run.device, run.system)))


def _short(run: Run, seconds: float) -> Run:
    warm_up_s = min(run.traffic.warm_up_s, seconds)
    return dataclasses.replace(
        run, traffic=dataclasses.replace(run.traffic, seconds=seconds, warm_up_s=warm_up_s)
    )


def by_server(planned: Sequence[Run]) -> Iterator[list[Run]]:
    """Yield the runs of one server after those of another."""
    for _, group in itertools.groupby(planned, key=lambda run: (run.device, run.system)):
        yield list(group)


def expected_s(planned: Sequence[Run]) -> float:
    """Return the expected seconds of runs, with the starts of their servers."""
    return START_S * len(list(by_server(planned))) + sum(run.expected_s for run in planned)


Start = Callable[[System, Model, Path], AbstractContextManager[Server]]
"""Starts a server with a model and a folder for its files."""

Take = Callable[[Run, Server, int], Table]
"""Makes a run on a server, with a seed of the prompts; returns its figures."""


def take(run: Run, server: Server, seed: int) -> Table:
    """Return the figures of a run."""
    before, began, own = server.usage(), time.monotonic(), time.process_time()
    seen = send_load(run, server, seed)
    own, took = time.process_time() - own, time.monotonic() - began
    used = server.usage().since(before) | {CLIENT: own}
    # The server ends the rows that are left.
    time.sleep(REST_S)
    cores = [Row(f"cpu: {group}", "cores", [spent / took]) for group, spent in sorted(used.items())]
    return Table(run.setting, [*seen.figures(), *(row for row in cores if row.median >= 0.005)])


def send_load(run: Run, server: Server, seed: int, headers: Sequence[str] = ()) -> Seen:
    """Send the load of a run to a server; see `send`. The server decides how many rows of a batch it runs."""
    rows, traffic = run.traffic.rows, dataclasses.replace(run.traffic, rows=None)
    if run.system.kind != BATCH or rows is None:
        return asyncio.run(send(server.port, run.traffic, seed, headers))
    try:
        api = API(server)
        with tempfile.TemporaryDirectory(prefix="saturate-bench-") as folder:
            first = FIRST_ROW + seed * BATCH_ROWS
            _, requests = write_rows(
                Path(folder), first, BATCH_ROWS, rows.answer, length=rows.prompt, mixed=True
            )
            id = api.create(requests)
        seen = asyncio.run(beside_batch(server, traffic, api, seed, headers))
        if api.completed(id) == BATCH_ROWS:
            raise RuntimeError(f"the batch of {BATCH_ROWS} rows has ended within the run")
        api.cancel(id)
    except (openai.OpenAIError, httpx.HTTPError) as error:
        raise RuntimeError(f"the batch API: {error}") from error
    return seen


def measure(
    planned: Sequence[Run],
    folder: Path,
    after: Callable[[Run, Table], None],
    start: Start = System.start,
    take: Take = take,
) -> dict[str, str]:
    """Make the runs, one at a time; return why runs are missing, by name.

    Args:
        planned: The runs, in their order.
        folder: Folder for configs and logs.
        after: Called after each run with its figures.
        start: Starts a server.
        take: Makes a run.
    """
    missing: dict[str, str] = {}
    left, seeds = expected_s(planned), itertools.count(1)
    for group in by_server(planned):
        waiting = [run.name for run in group]
        model = simulated(PROFILES[DEVICE_OF[group[0].device].profile])
        try:
            with start(group[0].system, model, folder) as server:
                for run in group:
                    progress(f"{run.name}; about {left / 60:.0f} minutes to the end")
                    with with_log(server, run.name):
                        after(run, take(run, server, next(seeds)))
                    waiting.remove(run.name)
                    left -= run.expected_s
        except UnavailableError as error:
            progress(f"{', '.join(waiting)}: left out: {error}")
            missing |= dict.fromkeys(waiting, str(error))
        left = expected_s(planned[[*planned].index(group[-1]) + 1 :])
    progress("")
    return missing
