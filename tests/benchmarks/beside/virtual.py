"""The runs in virtual time, on vLLM's real scheduler in this process: no HTTP, no service, minutes for all.

What a request takes outside the engine is `request_ms` of the device's profile. Nothing admits the rows: the
engine has all that are in flight, less those whose tokens don't fit into its KV cache.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from serve_app.engine.vllm.scheduler import GOALS
from serve_app.simulation.profiles import PROFILES
from tests.benchmarks.beside.runs import ARRIVAL, DEVICE_OF, OURS, PRIORITIES, Run, System
from tests.benchmarks.beside.traffic import LIVE_IN, LIVE_OUT, Rows, Seen, Traffic
from tests.benchmarks.measuring import Table
from tests.benchmarks.serve.client import Answer
from tests.benchmarks.serve.models import Model
from tests.benchmarks.serve.running import Server, UnavailableError
from tests.serve_app.simulation.virtual_engine import LiveFirstEngine, VirtualEngine, virtual_engines

SUBMIT_S, HOST_S = 0.001, 0.002
"""Seconds for each part of a submission, and between two steps: Python on a usual core."""


@contextmanager
def start(system: System, model: Model, folder: Path) -> Iterator[Server]:
    """Start nothing: each run has an engine of its own."""
    if system.kind not in (OURS, ARRIVAL, PRIORITIES):
        raise UnavailableError(f"in virtual time there are {OURS}, {ARRIVAL} and {PRIORITIES}")
    yield Server("virtual time", 0.0, folder)


def take(run: Run, server: Server, seed: int) -> Table:
    """Return the figures of a run in virtual time."""
    kind, traffic = run.system.kind, run.traffic
    profile = PROFILES[DEVICE_OF[run.device].profile].model_copy(update={"load_s": 0.0})
    policy = "fcfs" if kind == ARRIVAL else "priority"
    with virtual_engines(LiveFirstEngine if kind == OURS else VirtualEngine) as start:
        engine = start(engine={"scheduling_policy": policy}, **profile.model_dump())
        engine.host_s, engine.submit_s = HOST_S, SUBMIT_S
        load = _Load(engine, traffic, seed, profile.request_ms / 1e3, dict(run.system.goals))
        load.run(profile.kv_tokens if kind == OURS else None)
    return Table(run.setting, load.seen.figures())


class _Load:
    """The load of a run on an engine.

    Args:
        engine: The engine.
        traffic: The load.
        seed: Seed of the prompts.
        way_s: Seconds that a request takes to the engine.
        goals: The goals of live requests.
    """

    def __init__(
        self, engine: VirtualEngine, traffic: Traffic, seed: int, way_s: float, goals: dict[str, float]
    ) -> None:
        self.seen = Seen(traffic.seconds)
        self._engine = engine
        self._traffic = traffic
        self._way_s = way_s
        told = goals.get("ttft_p99_s", 0.0), goals.get("tpot_p99_s", 0.0)
        self._live = {"extra_args": {GOALS: told}} if any(told) else {}
        self._draw = random.Random(seed)
        self._number = 0

    def run(self, kv_tokens: int | None) -> None:
        """Run to the last live answer.

        Args:
            kv_tokens: Tokens of the KV cache, which bound the rows in flight; None: they don't.
        """
        engine, traffic = self._engine, self._traffic
        began = engine.time.now
        counts_from, ends = began + traffic.warm_up_s, began + traffic.warm_up_s + traffic.seconds
        arrivals = [began + at for at in reversed(traffic.arrivals())]
        answers: dict[str, Answer] = {}
        rows: dict[str, int] = {}
        if traffic.rows is not None:
            for _ in range(self._in_flight(traffic.rows, kv_tokens)):
                self._add_row(traffic.rows, rows)
        while engine.time.now < ends or answers:
            if not engine.busy:
                engine.time.now = max(engine.time.now, arrivals[-1] + self._way_s) if arrivals else ends
            while arrivals and arrivals[-1] + self._way_s <= engine.time.now:
                sent_at = arrivals.pop()
                name = self._add(LIVE_IN, LIVE_OUT, 0, self._live)
                answers[name] = Answer(LIVE_OUT, 1, sent_at)
                if sent_at >= counts_from:
                    self.seen.live.append(answers[name])
            for output in engine.step():
                name, now = output.request_id, engine.time.now
                if answer := answers.get(name):
                    answer.first_at = answer.first_at or now
                if output.finish_reason is None:
                    continue
                if answer:
                    del answers[name]
                    answer.ended_at = now
                elif traffic.rows is not None:
                    tokens = rows.pop(name)
                    if counts_from <= now < ends:
                        self.seen.tokens += tokens
                    self._add_row(traffic.rows, rows)

    def _in_flight(self, rows: Rows, kv_tokens: int | None) -> int:
        fit = rows.in_flight if kv_tokens is None else kv_tokens // (rows.prompt + rows.answer)
        return min(rows.in_flight, fit)

    def _add_row(self, rows: Rows, lengths: dict[str, int]) -> None:
        tokens = round(rows.answer * self._draw.uniform(0.5, 1.5))
        lengths[self._add(rows.prompt, tokens, 1, {})] = tokens

    def _add(self, prompt: int, tokens: int, priority: int, fields: dict[str, Any]) -> str:
        self._number += 1
        text = [self._draw.randrange(3, 60) for _ in range(prompt)]
        self._engine.add(str(self._number), text, tokens, priority=priority, **fields)
        return str(self._number)
