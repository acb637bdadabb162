"""`max_utilization` beside an engine that preempts what its memory doesn't hold, on virtual time."""

import asyncio
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import pytest

from batcher import ContinuousBatcher, Slot
from tests.batcher.virtual import VirtualLoop, blocked, now

PROMPT, MOST = 64, 1_024
CAPACITY = 64 * (PROMPT + MOST)
"""Tokens of memory: of 64 rows at their longest."""

STEP_S, SEQUENCE_S, TOKEN_S = 0.006, 0.000_03, 0.000_02
"""Seconds of a step, and what a sequence and a token of a prompt add to it: an H100, near enough."""

LIVE = 64
"""Tokens of a live answer."""

Policy = Literal["guaranteed_no_evict", "max_utilization"]


@dataclass(eq=False)
class Row:
    """A row in the engine: `made` of `output` tokens."""

    slot: Slot
    output: int
    done: asyncio.Future[None]
    made: int = 0

    @property
    def held(self) -> int:
        return PROMPT + self.made


@dataclass
class Engine:
    """Decodes a token per row and step; when the memory is full, it preempts the row that came last.

    Live requests begin first, and are preempted last. A preempted row keeps its tokens, and computes them
    again, with its prompt, when it goes on.

    Attributes:
        streams: Whether each token is reported, or the answer as a whole.
        seconds: Seconds in which it worked.
        late_s: Those in which a row waited for memory.
        row_s: Rows that the batcher had let in, times seconds.
        tokens, again: Tokens that it made, and computed again.
        most: The largest sum of what the rows held, or would hold if they had not been preempted.
    """

    batcher: ContinuousBatcher
    streams: bool = True
    running: list[Row] = field(default_factory=list)
    waiting: list[Row] = field(default_factory=list)
    used: int = 0
    seconds: float = 0.0
    late_s: float = 0.0
    row_s: float = 0.0
    tokens: int = 0
    again: int = 0
    most: int = 0

    async def run(self) -> None:
        while True:
            computed = self._begin()
            self._preempt()
            rows, late = len(self.running), list(self.waiting)
            took = STEP_S + SEQUENCE_S * rows + TOKEN_S * computed
            await asyncio.sleep(took)
            if not rows:
                continue
            self.seconds += took
            self.late_s += took if late else 0.0
            self.row_s += took * (rows + len(late))
            self.most = max(self.most, self.used + sum(row.held for row in late))
            self._decode()

    def _begin(self) -> int:
        """Let rows run that wait, as far as the memory goes; return the tokens to compute for them."""
        computed = 0
        self.waiting.sort(key=lambda row: row.slot.priority)
        while self.waiting and self.used + self.waiting[0].held + len(self.running) < CAPACITY:
            row = self.waiting.pop(0)
            self.running.append(row)
            self.used += row.held
            computed += row.held
            self.again += row.made
        return computed

    def _preempt(self) -> None:
        preempted = 0
        while self.used + len(self.running) > CAPACITY:
            row = max(reversed(self.running), key=lambda row: row.slot.priority)
            self.running.remove(row)
            self.waiting.insert(0, row)
            self.used -= row.held
            preempted += 1
        if preempted:
            self.batcher.overcommitted(preempted)

    def _decode(self) -> None:
        ended = []
        for row in self.running:
            row.made += 1
            if self.streams or row.made == row.output:
                row.slot.report(row.made)
            if row.made == row.output:
                ended.append(row)
        self.used += len(self.running) - sum(row.held for row in ended)
        self.tokens += len(self.running)
        self.running = [row for row in self.running if row.made < row.output]
        for row in ended:
            row.done.set_result(None)


def serve(policy: Policy, lengths: list[int], streams: bool = True, live_per_s: float = 0.0) -> Engine:
    """Run rows with these outputs, all of which wait from the start, and live requests at a rate."""

    async def work() -> Engine:
        async with ContinuousBatcher(
            capacity=CAPACITY, policy=policy, background=1, max_queue_size=100_000, clock=now
        ) as batcher:
            engine = Engine(batcher, streams)
            running = asyncio.create_task(engine.run())

            async def one(output: int, priority: int = 1) -> None:
                slot = batcher.slot(prompt_tokens=PROMPT, max_tokens=MOST, priority=priority)
                async with slot:
                    # A live request waits for nothing, whatever rows run.
                    assert priority == 1 or slot.waited_s == 0.0
                    row = Row(slot, output, asyncio.get_running_loop().create_future())
                    engine.waiting.append(row)
                    await row.done

            async def live() -> None:
                draw = random.Random(2)
                async with asyncio.TaskGroup() as group:
                    while live_per_s and batcher.load.waiting:
                        await asyncio.sleep(draw.expovariate(live_per_s))
                        group.create_task(one(LIVE, 0))

            rows = [asyncio.create_task(one(length)) for length in lengths]
            await blocked()
            await asyncio.gather(live(), *rows)
            running.cancel()
            stats = batcher.stats
            assert (stats.running, stats.running_cost) == (0, 0)
            assert engine.tokens == sum(lengths) + LIVE * (stats.total_completed - len(lengths))
        return engine

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work())


def lognormal(spread: float, count: int) -> list[int]:
    """Return lengths with a mean of an eighth of the most, before those beyond it are cut."""
    draw = random.Random(1)
    middle = math.log(MOST / 8) - spread**2 / 2
    return [max(1, min(MOST, round(draw.lognormvariate(middle, spread)))) for _ in range(count)]


def compared(lengths: list[int], streams: bool = True) -> tuple[Engine, Engine]:
    """Serve rows with both policies."""
    sure, likely = serve("guaranteed_no_evict", lengths), serve("max_utilization", lengths, streams)
    assert (sure.late_s, sure.again) == (0.0, 0)
    assert sure.most <= CAPACITY
    print(
        f"{sure.row_s / sure.seconds:.0f} -> {likely.row_s / likely.seconds:.0f} rows in flight, "
        f"{sure.tokens / sure.seconds:.0f} -> {likely.tokens / likely.seconds:.0f} tokens/s, "
        f"short of memory {likely.late_s / likely.seconds:.2%} of the time, "
        f"{likely.again / likely.tokens:.2%} of tokens twice, at most {likely.most / CAPACITY:.2f} of it"
    )
    return sure, likely


@pytest.mark.parametrize(
    ("spread", "streams", "rows"),
    [
        (1.0, False, 2_000),
        *(pytest.param(spread, True, 4_000, marks=pytest.mark.long) for spread in (0.5, 1.0, 1.5)),
    ],
)
def test_short_answers_let_more_rows_run_and_the_memory_is_enough(
    spread: float, streams: bool, rows: int
) -> None:
    sure, likely = compared(lognormal(spread, rows), streams)
    assert likely.row_s / likely.seconds >= 2 * sure.row_s / sure.seconds
    assert likely.tokens / likely.seconds >= 1.5 * sure.tokens / sure.seconds
    assert likely.late_s <= 0.005 * likely.seconds
    assert likely.again <= 0.005 * likely.tokens


@pytest.mark.parametrize("streams", [False, pytest.param(True, marks=pytest.mark.long)])
def test_live_requests_beside_overcommitted_rows_take_little_from_them(streams: bool) -> None:
    rows = lognormal(1.0, 3_000)
    alone = serve("max_utilization", rows, streams)
    beside = serve("max_utilization", rows, streams, live_per_s=10.0)
    assert beside.tokens > alone.tokens + 100 * LIVE
    assert beside.again <= 0.005 * beside.tokens
    # The live ones reserve the most that they may produce.
    assert beside.row_s / beside.seconds >= 0.8 * alone.row_s / alone.seconds


SHORT, LONG = 32, MOST
WRONG: dict[str, Callable[[int], int]] = {
    "jump": lambda number: SHORT if number < 500 else LONG,
    "phases": lambda number: LONG if number // 500 % 2 else SHORT,
    "short phases": lambda number: LONG if number // 100 % 2 else SHORT,
    "at random": lambda number: LONG if random.Random(number).random() < 0.3 else SHORT,
}


@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        ("jump", 700),
        *(pytest.param(kind, 2_000, marks=pytest.mark.long) for kind in WRONG if kind != "jump"),
    ],
)
def test_wrong_estimates_lose_nothing(kind: str, rows: int) -> None:
    sure, likely = compared([WRONG[kind](number) for number in range(rows)])
    assert likely.tokens / likely.seconds >= sure.tokens / sure.seconds
    assert likely.most <= 2 * CAPACITY
    # A jump is paid once, however many rows follow: a tenth of 2,000 rows, of which 500 are long.
    assert likely.again <= (56_000 if kind == "jump" else 0.1 * likely.tokens)
