"""Throughput of many adapters: the service beside `vllm serve --enable-lora`, in interleaved pairs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks.adapters.files import with_adapters
from tests.benchmarks.adapters.traffic import POPULARITY, draw_adapters
from tests.benchmarks.measuring import Table, progress
from tests.benchmarks.serve import tables as serve_tables
from tests.benchmarks.serve.loads import DEVICE_LOADS, LOADS, Load
from tests.benchmarks.serve.models import Model
from tests.benchmarks.serve.rounds import WARM_UP, Samples, add_samples, quantities
from tests.benchmarks.serve.running import with_log
from tests.benchmarks.serve.servers import OURS, SERVERS, VLLM
from tests.benchmarks.serve.tables import Target
from tests.benchmarks.serve.ways import Way, chat, for_model, single

ADAPTERS = 16
"""Adapters of the model."""

SLOTS = (16, 8)
"""Adapters in one step of the engine: all of them, and half."""

TARGETS = (
    Target("ttft_p50_ms", VLLM, by="-"),
    Target("ttft_p99_ms", VLLM, by="-"),
    Target("cpu", VLLM),
)
GOAL = 0.95
"""The goal for the tokens per second in relation to `vllm serve`, with a slot for each adapter."""

WARM_UP_SERIES = 9

Found = dict[tuple[int, str], dict[str, Samples]]
"""Samples by slots and popularity, then by server."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan of a measurement.

    Attributes:
        model: The model without adapters.
        adapters: Folders of the adapters, by name.
        slots: Numbers of slots.
        rounds: Number of rounds.
        share: Share of the load's prompts, 0 to 1.
    """

    model: Model
    adapters: Mapping[str, Path]
    slots: Sequence[int]
    rounds: int
    share: float

    @property
    def load(self) -> Load:
        """The load: 32 streams."""
        return DEVICE_LOADS["device-32"] if self.model.simulate else LOADS["stream-32"]


def visits(slots: Sequence[int], rounds: int) -> list[tuple[int, int, str]]:
    """Return round, slots and server of each start: the servers of a pair one after the other, in turns."""
    return [
        (number, each, server)
        for number in range(rounds)
        for each in slots
        for server in ((OURS, VLLM) if number % 2 == 0 else (VLLM, OURS))
    ]


def measure(plan: Plan, folder: Path, after: Callable[[Found], None]) -> Found:
    """Return the samples.

    Args:
        plan: The plan.
        folder: Folder for configs and logs.
        after: Called after each pair, with all samples so far.

    Raises:
        UnavailableError: A server did not start, or a request failed.
    """
    found: Found = {}
    order = visits(plan.slots, plan.rounds)
    for turn, (number, slots, server) in enumerate(order):
        progress(
            f"round {number + 1} of {plan.rounds}: {server}, {len(plan.adapters)} adapters, {slots} slots"
        )
        _visit(plan, folder, number, slots, server, found)
        if turn % 2:
            after(found)
    progress("")
    return found


def _visit(plan: Plan, folder: Path, number: int, slots: int, name: str, found: Found) -> None:
    start, _ = SERVERS[name]
    adapters, load = list(plan.adapters), plan.load
    model = with_adapters(plan.model, plan.adapters, slots)
    with start(model, folder) as server, with_log(server, f"{name} with {slots} slots"):
        warm_up = load.prompts(0.0, WARM_UP_SERIES)[:WARM_UP]
        # Every adapter once, at least: none is read from its file later.
        _way(load, (adapters * len(warm_up))[: len(warm_up)])(server, warm_up)
        for series, (popularity, exponent) in enumerate(POPULARITY.items()):
            prompts = load.prompts(plan.share, series)
            # Both servers of a round get the same requests.
            drawn = draw_adapters(adapters, len(prompts), exponent, seed=number)
            run = _way(load, drawn)(server, prompts)
            samples = found.setdefault((slots, popularity), {})
            add_samples(samples, name, number, quantities(load, run))


def _way(load: Load, adapters: Sequence[str]) -> Way:
    """Return the way of one stream per prompt, each for its adapter."""
    following = iter(adapters)
    return single(lambda prompt: for_model(chat(prompt), next(following)), load.in_flight)


def tables(plan: Plan, found: Found) -> dict[str, Table]:
    """Return a table for each number of slots and each popularity."""
    made = {}
    for (slots, popularity), samples in found.items():
        goal = GOAL if slots >= len(plan.adapters) else None
        targets = [Target("tokens_per_s", VLLM, at_least=goal), *TARGETS]
        load = plan.load
        setting = (
            f"{load.about}; {load.lengths}; {plan.model.about}; {len(plan.adapters)} adapters, {popularity}, "
            f"{slots} slots; vllm serve with --enable-lora and the same engine arguments."
        )
        made[f"{slots} slots, {popularity}, {plan.model.about}"] = Table(
            setting, serve_tables.rows(samples, targets)
        )
    return made
