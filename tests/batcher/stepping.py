"""An engine on virtual time that works in steps: decode, chunked prefill, priorities, as vLLM does it."""

import asyncio
import heapq
import itertools
import random
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Costs:
    """Seconds of a step: `step_s`, and more for each sequence and each token of a prompt.

    Attributes:
        noise: Standard deviation of a step, as a share of it.
        stall: Chance that a step takes three times as long.
        ahead: A step is scheduled while the one before it runs, as vLLM does it on a GPU: so a request that
            comes waits for one step more.
    """

    step_s: float = 0.004
    sequence_s: float = 0.000_25
    token_s: float = 0.000_05
    max_batched_tokens: int = 2_048
    noise: float = 0.05
    stall: float = 0.0
    ahead: bool = False


@dataclass(eq=False)
class _Sequence:
    prompt: int
    output: int
    first: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    done: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


@dataclass(frozen=True)
class _Step:
    """A step: its seconds, the sequences that get a token in it, and those of them whose last it is."""

    seconds: float
    ready: list[_Sequence]
    last: list[_Sequence]


class StepEngine:
    """Runs sequences step by step.

    Args:
        costs: What a step takes.
    """

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._waiting: list[tuple[int, int, _Sequence]] = []
        self._running: list[_Sequence] = []
        self._order = itertools.count()
        self._work = asyncio.Event()
        self._draw = random.Random(5)
        self._task = asyncio.create_task(self._run())

    def close(self) -> None:
        self._task.cancel()

    def add(self, prompt: int, output: int, priority: int) -> _Sequence:
        """Start a sequence."""
        sequence = _Sequence(prompt, output)
        heapq.heappush(self._waiting, (priority, next(self._order), sequence))
        self._work.set()
        return sequence

    async def _run(self) -> None:
        planned: _Step | None = None
        while True:
            step = planned or self._plan()
            if step is None:
                self._work.clear()
                await self._work.wait()
                continue
            planned = self._plan() if self._costs.ahead else None
            await asyncio.sleep(step.seconds)
            for sequence in step.ready:
                if not sequence.first.done():
                    sequence.first.set_result(None)
            for sequence in step.last:
                sequence.done.set_result(None)

    def _plan(self) -> "_Step | None":
        """Return the next step; None: there is nothing to do."""
        if not self._waiting and not self._running:
            return None
        costs = self._costs
        budget = costs.max_batched_tokens
        tokens = 0
        ready: list[_Sequence] = []
        for sequence in self._running:
            part = min(sequence.prompt, budget) if sequence.prompt else 0
            sequence.prompt -= part
            tokens += part
            budget -= part or 1
            if not sequence.prompt:
                ready.append(sequence)
        while self._waiting and budget > 0:
            sequence = heapq.heappop(self._waiting)[2]
            part = min(sequence.prompt, budget)
            sequence.prompt -= part
            tokens += part
            budget -= part
            self._running.append(sequence)
            if not sequence.prompt:
                ready.append(sequence)
        seconds = costs.step_s + costs.sequence_s * len(self._running) + costs.token_s * tokens
        seconds *= max(0.5, self._draw.gauss(1.0, costs.noise))
        if self._draw.random() < costs.stall:
            seconds *= 3
        last = []
        for sequence in ready:
            sequence.output -= 1
            if not sequence.output:
                self._running.remove(sequence)
                last.append(sequence)
        return _Step(seconds, ready, last)
