"""`max_utilization` with the batcher, vLLM's own scheduler and a simulated device, on virtual time.

`tests/batcher/test_overcommitment.py` says the same of the batcher alone, in the short run.
"""

import asyncio
import math
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from batcher import ContinuousBatcher, Slot
from serve_app.settings.models import BatcherSettings
from tests.batcher.virtual import VirtualLoop, now
from tests.serve_app.simulation.virtual_engine import LiveFirstEngine, VirtualEngine, virtual_engines

PROMPT, MOST = 64, 1024
CAPACITY = 64 * (PROMPT + MOST)
"""Tokens of the KV cache: of 64 rows at their longest."""

DEVICE = {
    "base_ms": 6.1,
    "per_prefill_token_ms": 0.024,
    "per_sequence_ms": 0.01,
    "per_kv_token_ms": 0.000033,
    "load_s": 0.0,
    "kv_tokens": CAPACITY,
    "max_model_len": 2048,
    "max_num_seqs": 512,
    "max_num_batched_tokens": 8192,
}

BLINK_S = 0.001


@dataclass(eq=False)
class Row:
    """A row in the engine, whose answer has `output` tokens."""

    slot: Slot
    output: int
    done: asyncio.Future[None]
    made: int = 0


@dataclass
class Seen:
    """What a run shows.

    Attributes:
        seconds: Seconds until the last row ended.
        tokens: Tokens of all answers.
        again: Tokens of answers and prompts that preempted rows had to be computed again, at most.
        rows_s: Rows in flight, times seconds.
    """

    seconds: float = 0.0
    tokens: int = 0
    again: int = 0
    rows_s: float = 0.0
    rows: dict[str, Row] = field(default_factory=dict)

    @property
    def in_flight(self) -> float:
        """Mean rows in flight."""
        return self.rows_s / self.seconds

    def __str__(self) -> str:
        again = f"{self.again / self.tokens:.2%} made twice"
        return f"{self.in_flight:.0f} rows in flight, {self.per_s:.0f} tokens/s, {again}"

    @property
    def per_s(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


async def drive(engine: VirtualEngine, seen: Seen) -> None:
    """Run the engine for the rows, and end each at its length."""
    while True:
        engine.time.now = max(engine.time.now, now())
        outputs = engine.step() if engine.busy else []
        took = engine.time.now - now()
        await asyncio.sleep(max(took, BLINK_S))
        seen.rows_s += len(seen.rows) * max(took, BLINK_S)
        for output in outputs:
            row = seen.rows.get(output.request_id)
            if row is None:
                continue
            row.made += len(output.new_token_ids)
            row.slot.report(row.made)
            if row.made >= row.output:
                # As where a stop string ends an answer.
                engine.scheduler.finish_requests(output.request_id, RequestStatus.FINISHED_STOPPED)
                seen.rows.pop(output.request_id).done.set_result(None)


def serve(policy: str, lengths: list[int]) -> Seen:
    """Run rows with these lengths, all of which wait from the start."""

    async def work(engine: VirtualEngine) -> Seen:
        seen = Seen()
        preempt = engine.scheduler._preempt_request

        settings = BatcherSettings.model_validate({"policy": policy})
        async with ContinuousBatcher(
            capacity=CAPACITY,
            places=DEVICE["max_num_seqs"],  # type: ignore[arg-type]
            policy=settings.policy,
            background=1,
            max_queue_size=100_000,
            clock=now,
        ) as batcher:

            def preempted(request: Any, *arguments: Any, **options: Any) -> None:
                seen.again += request.num_computed_tokens
                batcher.overcommitted()
                preempt(request, *arguments, **options)

            engine.scheduler._preempt_request = preempted
            running = asyncio.create_task(drive(engine, seen))

            async def one(number: int, output: int) -> None:
                async with batcher.slot(prompt_tokens=PROMPT, max_tokens=MOST, priority=1) as slot:
                    row = Row(slot, output, asyncio.get_running_loop().create_future())
                    seen.rows[str(number)] = row
                    draw = random.Random(number)
                    prompt = [draw.randrange(3, 60) for _ in range(PROMPT)]
                    engine.add(str(number), prompt, MOST, priority=1)
                    await row.done
                    seen.tokens += row.made

            await asyncio.gather(*(one(number, output) for number, output in enumerate(lengths)))
            seen.seconds = now()
            running.cancel()
        assert seen.tokens == sum(lengths)
        return seen

    with (
        virtual_engines(LiveFirstEngine) as start,
        asyncio.Runner(loop_factory=VirtualLoop) as runner,
    ):
        return runner.run(work(start(engine={"scheduling_policy": "priority"}, **DEVICE)))


def lognormal(number: int, sigma: float = 1.0) -> list[int]:
    """Return lengths with a mean of an eighth of the most."""
    draw, mean = random.Random(7), MOST / 8
    median = math.log(mean) - sigma**2 / 2
    return [min(MOST, max(1, round(draw.lognormvariate(median, sigma)))) for _ in range(number)]


@pytest.mark.long
def test_rows_with_short_answers_are_overcommitted() -> None:
    lengths = lognormal(1200)
    safe, more = serve("guaranteed_no_evict", lengths), serve("max_utilization", lengths)
    shown = f"{safe} -> {more}"
    print(shown)
    assert safe.again == 0
    assert more.in_flight >= 2 * safe.in_flight, shown
    assert more.per_s >= 1.5 * safe.per_s, shown
    assert more.again <= 0.005 * more.tokens


@pytest.mark.long
@pytest.mark.parametrize(
    "lengths",
    [
        pytest.param([40] * 200 + [MOST] * 150, id="short, then always the most"),
        pytest.param(([40] * 100 + [MOST] * 100) * 2, id="phases"),
    ],
)
def test_a_prediction_that_is_wrong_costs_nothing(lengths: list[int]) -> None:
    safe, more = serve("guaranteed_no_evict", lengths), serve("max_utilization", lengths)
    shown = f"{safe} -> {more}"
    print(shown)
    assert more.per_s > 0.999 * safe.per_s, shown
