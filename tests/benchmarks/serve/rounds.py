"""Rounds: each runs every server once, one after the other, in another order each time."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from batcher.stats import percentiles
from tests.benchmarks.measuring import progress
from tests.benchmarks.serve.groups import CLIENT, memory_mib
from tests.benchmarks.serve.loads import ALL_LOADS, Load
from tests.benchmarks.serve.models import MODELS, Model
from tests.benchmarks.serve.running import UnavailableError, with_log
from tests.benchmarks.serve.servers import SERVERS
from tests.benchmarks.serve.ways import Run, ways

Samples = dict[str, dict[int, float]]
"""Samples by quantity, then by round."""

Found = dict[str, dict[str, Samples]]
"""Samples by load, then by candidate."""

WARM_UP = 64
"""Most prompts of the warm-up before a load."""

START = "start"
"""Name of the results for start-up time and memory."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan of a measurement.

    Attributes:
        servers: Names of the servers.
        loads: Loads by name.
        rounds: Number of rounds.
        share: Share of each load's prompts, 0 to 1.
        only_model: Name of the model for all loads; None: each load has its own.
    """

    servers: Sequence[str]
    loads: Mapping[str, Load]
    rounds: int
    share: float
    only_model: str | None

    def model(self, load: str) -> str:
        """Return the name of a load's model."""
        return self.only_model or self.loads[load].model


def measure(plan: Plan, folder: Path, after: Callable[[Found], None]) -> tuple[Found, dict[str, str]]:
    """Return the samples, and the reason for each server that is left out.

    Args:
        plan: The plan.
        folder: Folder for models, configs and logs.
        after: Called after each server, with all samples so far.
    """
    found: Found = {name: {} for name in [*plan.loads, START]}
    missing: dict[str, str] = {}
    names = dict.fromkeys(plan.model(load) for load in plan.loads)
    models = {name: MODELS[name](folder) for name in names}
    visits = [(server, model) for model in models for server in plan.servers]
    for number in range(plan.rounds):
        turn = number % len(visits)
        for server, model in [*visits[turn:], *visits[:turn]]:
            loads = {
                name: load
                for name, load in plan.loads.items()
                if plan.model(name) == model and server in ways(load)
            }
            if server in missing or not loads:
                continue
            try:
                _visit(server, models[model], loads, number, plan, folder, found)
            except UnavailableError as error:
                missing[server] = str(error)
                progress(f"{server} is left out: {error}")
            after(found)
    progress("")
    return found, missing


def _visit(
    name: str,
    model: Model,
    loads: Mapping[str, Load],
    number: int,
    plan: Plan,
    folder: Path,
    found: Found,
) -> None:
    where = f"round {number + 1} of {plan.rounds}"
    progress(f"{where}: starting {name} with {model.about}")
    start, _ = SERVERS[name]
    with start(model, folder) as server:
        for load_name, load in loads.items():
            series = 10 * list(ALL_LOADS).index(load_name) % 100
            for turn, (candidate, way) in enumerate(ways(load)[name].items()):
                progress(f"{where}: {candidate}, {load.about}")
                with with_log(server, f"{candidate} at {load_name}"):
                    if not turn:
                        # The warm-up is for code paths, memory and connections within the server.
                        way(server, load.prompts(0.0, series + 9)[:WARM_UP])
                    run = way(server, load.prompts(plan.share, series + turn))
                add_samples(found[load_name], candidate, number, quantities(load, run))
        memory = {"start_s": server.start_s, "memory_mib": memory_mib()}
        add_samples(found[START], f"{name}, {model.about}", number, memory)


def quantities(load: Load, run: Run) -> dict[str, float]:
    """Return the samples of a run, by quantity."""
    answers = run.answers
    tokens = sum(answer.tokens for answer in answers)
    prompts = sum(answer.prompts for answer in answers)
    seen = {"tokens_per_s": tokens / run.took_s, "prompts_per_s": prompts / run.took_s}
    if load.kind in {"chat", "burst"}:
        ttft = [answer.ttft_s * 1e3 for answer in answers]
        tpot = [answer.tpot_s * 1e3 for answer in answers]
        gaps = [gap * 1e3 for answer in answers for gap in answer.gaps_s]
        seen |= {
            "ttft_p50_ms": statistics.median(ttft),
            "ttft_p99_ms": p99(ttft),
            "tpot_p50_ms": statistics.median(tpot),
            "tpot_p99_ms": p99(tpot),
            "gap_p99_ms": p99(gaps),
            "gap_max_ms": max(gaps),
            "first_events": statistics.median(answer.first_events for answer in answers),
        }
    else:
        took_ms = [answer.total_s * 1e3 for answer in answers]
        seen |= {"latency_p50_ms": statistics.median(took_ms), "latency_p99_ms": p99(took_ms)}
    cpu = {CLIENT: run.client_cpu_s} | dict(run.cpu_s)
    seen["cpu"] = sum(run.cpu_s.values()) / tokens * 1000
    return seen | {f"cpu: {name}": used / tokens * 1000 for name, used in cpu.items()}


def p99(values: Sequence[float]) -> float:
    """Return the 99th percentile."""
    return percentiles(values, (0.99,))[0]


def add_samples(
    samples: dict[str, Samples], candidate: str, number: int, values: Mapping[str, float]
) -> None:
    """Add the samples of a candidate in a round."""
    own = samples.setdefault(candidate, {})
    for quantity, value in values.items():
        own.setdefault(quantity, {})[number] = value
