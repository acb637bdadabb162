"""Measures the times of a device through a running service."""

import asyncio
import math
import statistics
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from serve_app.client import ServiceError
from serve_app.tuning.observations import Observation
from serve_app.tuning.service import Facts, Stream

REPEATS = 3
"""Times that each point is measured."""

PROMPTS = (64, 256, 512, 1024, 2048)
"""Tokens of lone prompts."""

STREAMS = (1, 4, 16, 32)
"""Answers at once."""

SHORT = 32
"""Tokens of a prompt where the number of answers counts."""

ANSWER = 48
"""Tokens of an answer in which all answers run side by side, at least."""

CONTEXT_STREAMS = 8
"""Answers at once where the length of their contexts counts."""

CONTEXT_S = 8.0
"""Seconds that the prompts of such a point may take, at most."""

LEAST_STEP = 512
"""Tokens of a step, at least: the steps in which prompts are computed are not more than this leads to."""

LONGEST_S = 150.0
"""Seconds after which no further point is begun."""

LOOKS, LOOK_S = 10, 0.2
"""Looks at a service that isn't idle, and the seconds between them."""

MOST_SPREAD = 1.25
"""Spread of a point beyond which something else seems to run on the machine."""


class Source(Protocol):
    """Streams of a service."""

    clock: Callable[[], float]

    async def streams(self, model: str, prompts: Sequence[int], tokens: int) -> list[Stream]:
        """Send requests at once, and return their answers."""

    async def facts(self, model: str) -> Facts:
        """Return the facts about a model."""


class Measurement:
    """Measures one model of a service.

    Attributes:
        observations: What was measured so far.
        warnings: What makes them doubtful.

    Args:
        source: The service.
        facts: What it says about the model.
        step_tokens: Longest lone prompt, since a longer one takes several steps: `max_num_batched_tokens`.
        progress: Called with a line about each point.
        sleep: Waits for a number of seconds.
    """

    def __init__(
        self,
        source: Source,
        facts: Facts,
        step_tokens: int,
        progress: Callable[[str], None] = lambda line: None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._source = source
        self._facts = facts
        self._step_tokens = step_tokens
        self._progress = progress
        self._sleep = sleep
        self._sent = 0
        self.observations: list[Observation] = []
        self.warnings: list[str] = []

    async def run(self) -> None:
        """Measure all points, within three minutes.

        Raises:
            ServiceError: The service is not idle, has several replicas, or fails.
        """
        facts = await self._idle()
        if facts.replicas > 1:
            raise ServiceError(
                f"{facts.model} has {facts.replicas} replicas, which share the requests; measure a service "
                "with one (num_replicas: 1)"
            )
        if facts.in_flight:
            raise ServiceError(
                f"{facts.in_flight} requests run or wait on {facts.model}; measure a service without other "
                "traffic"
            )
        began = self._source.clock()
        points = [*self._prompts(), *self._decoding(), *self._contexts()]
        for number, (about, measure) in enumerate(points, 1):
            if self._source.clock() - began > LONGEST_S:
                self.warnings.append(
                    f"the engine is slow: {len(points) - number + 1} of {len(points)} points were left out"
                )
                break
            self._progress(f"{number} of {len(points)}: {about}")
            self.observations.append(await self._repeated(about, measure))
        after = await self._source.facts(facts.model)
        if others := after.submitted - facts.submitted - self._sent:
            self.warnings.append(f"{others} requests of others ran meanwhile, and made the times longer")
        self.warnings += [
            f"{each.about}: the times differ by a factor of {each.spread:.2f}; is other work on the machine?"
            for each in self.observations
            if each.spread > MOST_SPREAD
        ]

    async def _idle(self) -> Facts:
        """Return the facts once nothing runs; a request ends a little after its last token."""
        facts = self._facts
        for _ in range(LOOKS):
            if not facts.in_flight:
                break
            await self._sleep(LOOK_S)
            facts = await self._source.facts(facts.model)
        return facts

    def _prompts(self) -> list[tuple[str, Callable[[], Awaitable[Observation]]]]:
        """Return the points of lone prompts."""
        longest = min(self._step_tokens, self._facts.max_model_len - 1)
        lengths = sorted({min(length, longest) for length in PROMPTS})

        def point(length: int) -> Callable[[], Awaitable[Observation]]:
            async def measure() -> Observation:
                (stream,) = await self._streams([length], 1)
                return Observation("", length, 1, length, True, stream.ttft_s * 1e3)

            return measure

        return [(f"a prompt of {length} tokens", point(length)) for length in lengths]

    def _decoding(self) -> list[tuple[str, Callable[[], Awaitable[Observation]]]]:
        """Return the points of answers side by side."""
        most = min(self._facts.max_num_seqs, self._facts.kv_tokens // (SHORT + 2 * ANSWER))
        counts = sorted({min(count, most) for count in STREAMS if count})
        return [
            (f"{count} answers at once", lambda count=count: self._side_by_side(count, SHORT))  # type: ignore[misc]
            for count in counts
        ]

    def _contexts(self) -> list[tuple[str, Callable[[], Awaitable[Observation]]]]:
        """Return the points of answers with long contexts; how long depends on the time of a prompt."""
        count = min(CONTEXT_STREAMS, self._facts.max_num_seqs)

        def length(share: float) -> int:
            tokens = self._facts.kv_tokens // 2
            if per_token := self._prefill_s():
                tokens = min(tokens, int(CONTEXT_S / per_token))
            # The answer grows with the context, and both have to fit.
            longest = (self._facts.max_model_len - 2 * ANSWER) * LEAST_STEP // (LEAST_STEP + count)
            return max(SHORT, int(share * min(tokens // count, longest)))

        return [
            (
                f"{count} answers with {about} contexts",
                lambda share=share: self._side_by_side(count, length(share)),  # type: ignore[misc]
            )
            for about, share in (("long", 0.5), ("the longest", 1.0))
        ]

    def _prefill_s(self) -> float:
        """Return the seconds per token of a prompt, as lone prompts say."""
        lone = [each for each in self.observations if each.request]
        if len(lone) < 2 or lone[-1].prefill_tokens == lone[0].prefill_tokens:
            return 0.0
        milliseconds = lone[-1].milliseconds - lone[0].milliseconds
        return max(0.0, milliseconds / 1e3 / (lone[-1].prefill_tokens - lone[0].prefill_tokens))

    async def _side_by_side(self, count: int, prompt: int) -> Observation:
        """Measure the step in which so many answers run side by side."""
        tokens = ANSWER + math.ceil(count * prompt / LEAST_STEP) + 4
        streams = await self._streams([prompt] * count, tokens)
        return step_of(streams)

    async def _streams(self, prompts: Sequence[int], tokens: int) -> list[Stream]:
        self._sent += len(prompts)
        return await self._source.streams(self._facts.model, prompts, tokens)

    async def _repeated(self, about: str, measure: Callable[[], Awaitable[Observation]]) -> Observation:
        """Measure a point several times; return the one with the median time."""
        found = [await measure() for _ in range(REPEATS)]
        middle = statistics.median_low(each.milliseconds for each in found)
        chosen = next(each for each in found if each.milliseconds == middle)
        times = [each.milliseconds for each in found]
        return Observation(
            about,
            chosen.prefill_tokens,
            chosen.sequences,
            chosen.kv_tokens,
            chosen.request,
            chosen.milliseconds,
            max(times) / max(min(times), 1e-9),
        )


def step_of(streams: Sequence[Stream]) -> Observation:
    """Return the mean step in the time in which all streams get tokens.

    Args:
        streams: Answers that ran side by side.

    Raises:
        ServiceError: They hardly did.
    """
    begin = max(stream.tokens[0][0] for stream in streams)
    end = min(stream.tokens[-1][0] for stream in streams)
    times, context = [], 0.0
    for stream in streams:
        # The last step with a prompt ends at the begin: the time that counts starts there.
        inside = [piece for piece in stream.tokens if begin <= piece[0] <= end]
        if len(inside) < 2 or inside[-1][1] - inside[0][1] < ANSWER // 4:
            raise ServiceError(
                f"{len(streams)} answers hardly ran side by side: the engine runs fewer at once, or has "
                "other work"
            )
        (first_at, first), (last_at, last) = inside[0], inside[-1]
        times.append((last_at - first_at) / (last - first))
        # The step that makes a token reads the prompt and the tokens before it.
        context += stream.prompt + (first + last - 1) / 2
    return Observation("", 0, len(streams), context, False, statistics.median(times) * 1e3)
