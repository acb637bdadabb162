"""A model of one Engine replica in virtual time: the batcher's window, vLLM's scheduler, a device.

The steps are those of `serve_app.simulation`. Steps that only decode, and between which nothing changes, are
taken as one block, so the cost of a run depends on the requests and not on their tokens.
"""

import heapq
import math
from collections import deque
from dataclasses import dataclass

from serve_app.simulation.profiles import Profile

IDLE = math.inf
"""End of the block of a replica without work."""

STEPS = 2
"""Steps between the end of a request and the first step of one that is only then let into the engine."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a replica that a plan chooses, by their names in a config.

    Attributes:
        max_running: `batcher.max_running`; None: left out.
        max_num_batched_tokens: `engine.max_num_batched_tokens`.
        max_num_seqs: `engine.max_num_seqs`.
    """

    max_running: int | None
    max_num_batched_tokens: int
    max_num_seqs: int

    @classmethod
    def of(cls, profile: Profile) -> "Settings":
        """Return the settings of a config that leaves all of them out."""
        return cls(None, profile.max_num_batched_tokens, profile.max_num_seqs)

    @property
    def sequences(self) -> int:
        """Requests that may run at once."""
        return min(self.max_num_seqs, self.max_running or self.max_num_seqs)


class Request:
    """One request on its way; times are seconds of virtual time.

    Attributes:
        number: Its place in the order in which requests are sent.
        sent_at: When its client sends it.
        prompt: Tokens of its prompt.
        computed: Tokens of the prompt that aren't in the prefix cache.
        output: Tokens of its answer.
        reserved: Tokens of KV cache that the batcher reserves for it.
        route: Its random number for the choice of a replica.
        first_at: When its client has the first token; 0 before.
        ended_at: When its client has the last one; 0 before.
    """

    __slots__ = (
        "_left",
        "_read",
        "_visible",
        "computed",
        "ended_at",
        "first_at",
        "number",
        "output",
        "prompt",
        "reserved",
        "route",
        "sent_at",
    )

    def __init__(
        self,
        number: int,
        sent_at: float,
        prompt: int,
        computed: int,
        output: int,
        reserved: int,
        route: float,
    ) -> None:
        self.number = number
        self.sent_at = sent_at
        self.prompt = prompt
        self.computed = computed
        self.output = output
        self.reserved = reserved
        self.route = route
        self.first_at = 0.0
        self.ended_at = 0.0
        # Tokens of the prompt that no step has computed, those that are in the cache, and the first step that
        # may compute the others.
        self._left = computed
        self._read = prompt - computed
        self._visible = 0

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token."""
        return self.first_at - self.sent_at

    @property
    def tpot_s(self) -> float:
        """Seconds per token after the first."""
        return (self.ended_at - self.first_at) / max(self.output - 1, 1)

    @property
    def latency_s(self) -> float:
        """Seconds to the whole answer."""
        return self.ended_at - self.sent_at


class Replica:
    """An engine and its batcher.

    A request enters the window when what it reserves fits, in order of arrival (`guaranteed_no_evict`). vLLM
    starts those in the window in the same order; a step computes one token of each request that has begun,
    and as many tokens of prompts as fit into `max_num_batched_tokens`. With asynchronous scheduling the next
    step is composed when one begins, so that what comes during a step has part in the second one after it.

    Attributes:
        ends_at: When the block of steps that runs ends; `IDLE` if none runs.
        load: Tokens that the router counts for it.
        busy_s: Seconds in which steps ran.
        held_s: Sum of the reserved tokens over the seconds for which they were reserved.
        most_held: The most tokens that were reserved at once.
        most_running: The most requests in a step.

    Args:
        profile: The device.
        settings: Its settings.
        mean_output: Tokens of a mean answer.
    """

    def __init__(self, profile: Profile, settings: Settings, mean_output: float) -> None:
        self._base = profile.base_ms / 1e3
        self._per_prefill = profile.per_prefill_token_ms / 1e3
        self._per_sequence = profile.per_sequence_ms / 1e3
        self._per_kv = profile.per_kv_token_ms / 1e3
        self._lag = 1 if profile.async_scheduling else 0
        self._capacity = profile.kv_tokens
        self._budget = settings.max_num_batched_tokens
        self._places = places = settings.max_num_seqs
        ending = min(places, math.ceil(STEPS * places / mean_output))
        self._most = min(settings.max_running or places + ending, places + ending)
        self.ends_at = IDLE
        self.load = 0
        self.busy_s = self.held_s = 0.0
        self.most_held = self.most_running = 0
        # The batcher: its queue, and what is in the window.
        self._queue: deque[Request] = deque()
        self._records = self._held = 0
        self._held_since = 0.0
        # The engine: requests that wait in it, the one whose prompt is computed in part, and the seats that
        # are taken; the seats of those that have just ended are free one step later.
        self._waiting: deque[Request] = deque()
        self._partial: Request | None = None
        self._seats = self._freed = 0
        # The block: its first and last step, its begin, and what each of its steps holds.
        self._step = self._last = 0
        self._began_at = 0.0
        self._decoding = self._context = 0
        self._firsts: list[Request] = []
        # Requests by their last step, and these steps as a heap.
        self._ends: dict[int, list[Request]] = {}
        self._end_steps: list[int] = []

    def arrive(self, request: Request, now: float) -> None:
        """Take a request; it starts, or waits in the batcher's queue."""
        if not self._queue and self._fits(request):
            self._enter(request, now)
        else:
            self._queue.append(request)

    def end_block(self) -> list[Request]:
        """End the block at `ends_at`, and begin the next; return the requests whose answers are complete."""
        now = self.ends_at
        self.busy_s += now - self._began_at
        self._context += self._decoding * (self._last - self._step + 1)
        ended = self._end_requests(now)
        for request in self._firsts:
            request.first_at = now
            if request.output > 1:
                self._decoding += 1
                self._context += request.prompt + 1
        self._begin(self._last + 1, now)
        # The engine has begun its next step when the batcher hears of the end of the last one.
        if ended:
            self._hold(-sum(request.reserved for request in ended), now)
            self._records -= len(ended)
            while self._queue and self._fits(self._queue[0]):
                self._enter(self._queue.popleft(), now)
        return ended

    # The batcher

    def _fits(self, request: Request) -> bool:
        return not self._records or (
            self._held + request.reserved <= self._capacity and self._records < self._most
        )

    def _enter(self, request: Request, now: float) -> None:
        self._records += 1
        self._hold(request.reserved, now)
        self._submit(request, now)

    def _hold(self, tokens: int, now: float) -> None:
        self.held_s += self._held * (now - self._held_since)
        self._held_since = now
        self._held += tokens
        self.most_held = max(self.most_held, self._held)

    # The engine

    def _end_requests(self, now: float) -> list[Request]:
        """End the requests whose last token is that of the step that has ended."""
        ended = self._ends.pop(self._last, [])
        if ended:
            heapq.heappop(self._end_steps)
        for request in ended:
            request.ended_at = now
            if request.output > 1:
                self._decoding -= 1
                self._context -= request.prompt + request.output
        if self._lag:
            self._seats -= self._freed
            self._freed = len(ended)
        else:
            self._seats -= len(ended)
        return ended

    def _submit(self, request: Request, now: float) -> None:
        """Give a request to the engine."""
        waiting = self._waiting
        waiting.append(request)
        if self.ends_at == IDLE:
            request._visible = 0
            self._begin(self._last + 1, now)
            return
        step = self._step if self._last == self._step else self._step_at(now)
        request._visible = step + 1 + self._lag
        # The block ends where the request may start. Behind others, or without a seat, it can't.
        if self._last >= request._visible and len(waiting) == 1 and self._seats - self._freed < self._places:
            self._last = request._visible - 1
            self._set_end()

    def _step_at(self, now: float) -> int:
        """Return the step of the block that runs now."""
        linear = self._base + self._per_sequence * self._decoding + self._per_kv * self._context
        square = self._per_kv * self._decoding / 2
        linear -= square
        passed = max(0.0, now - self._began_at)
        if square * passed < 1e-9 * linear * linear:
            steps = passed / linear
        else:
            steps = (math.sqrt(linear * linear + 4 * square * passed) - linear) / (2 * square)
        return min(self._step + int(steps), self._last)

    def _set_end(self) -> None:
        """Set the end of a block whose steps only decode."""
        steps, decoding = self._last - self._step + 1, self._decoding
        read = steps * self._context + decoding * steps * (steps - 1) / 2
        per_step = self._base + self._per_sequence * decoding
        self.ends_at = self._began_at + steps * per_step + self._per_kv * read

    def _begin(self, step: int, now: float) -> None:
        """Begin a block with this step, or become idle."""
        self._firsts = []
        self._began_at, self._step = now, step
        tokens, sequences, read = self._compose(step)
        if not self._decoding and not sequences:
            if not self._waiting:
                self._last, self.ends_at = step - 1, IDLE
                self._seats = self._freed = 0
                return
            # The engine is empty: what waits needn't wait for a step to end.
            self._seats = self._freed = 0
            for request in self._waiting:
                request._visible = 0
            tokens, sequences, read = self._compose(step)
        running = self._decoding + sequences
        self.most_running = max(self.most_running, running)
        if sequences:
            self._last = step
            self.ends_at = now + (
                self._base
                + self._per_prefill * tokens
                + self._per_sequence * running
                + self._per_kv * (self._context + read)
            )
            return
        last = self._end_steps[0]
        if self._waiting:
            first = self._waiting[0]
            if self._freed and self._seats >= self._places:
                last = step
            elif self._seats < self._places:
                last = min(last, max(step, first._visible - 1))
        self._last = last
        self._set_end()

    def _compose(self, step: int) -> tuple[int, int, int]:
        """Add prompts to a step; return their tokens, their number and the context that they read."""
        budget = self._budget - self._decoding
        tokens = sequences = read = 0
        waiting = self._waiting
        while budget > 0:
            request = self._partial
            if request is None:
                if not waiting or self._seats >= self._places or waiting[0]._visible > step:
                    break
                request = waiting.popleft()
                self._seats += 1
            chunk = min(request._left, budget)
            budget -= chunk
            tokens += chunk
            sequences += 1
            request._left -= chunk
            request._read += chunk
            read += request._read
            if request._left:
                self._partial = request
                break
            self._partial = None
            self._firsts.append(request)
            last = step + request.output - 1
            if last in self._ends:
                self._ends[last].append(request)
            else:
                self._ends[last] = [request]
                heapq.heappush(self._end_steps, last)
        return tokens, sequences, read
