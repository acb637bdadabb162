"""Usage of a request: the tokens that it took, and its times."""

import struct
from dataclasses import dataclass, field
from typing import NamedTuple

MAX_PROMPTS = 64
"""Prompts of one request that are kept one by one; a request may have thousands."""

_FIELDS = struct.Struct(">IIffI")

_MOST = (1 << 32) - 1
"""The largest total that crosses the relay; the cost of a function's records may be larger."""


class PromptUsage(NamedTuple):
    """Usage of one prompt of a request; the times are those of `time.monotonic`."""

    submitted_at: float
    started_at: float
    ended_at: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0


@dataclass(slots=True)
class RequestUsage:
    """Usage of a request, over all of its prompts.

    Attributes:
        prompt_tokens: Tokens in.
        output_tokens: Tokens out.
        wait_s: Seconds in the batcher's queue; of several prompts, the longest wait.
        engine_s: Seconds from the submission of the first prompt to the end of the last one.
        cached_tokens: Tokens in that were in the engine's prefix cache.
        prompts: The first `MAX_PROMPTS` prompts; they don't cross the relay.
    """

    prompt_tokens: int = 0
    output_tokens: int = 0
    wait_s: float = 0.0
    engine_s: float = 0.0
    cached_tokens: int = 0
    prompts: list[PromptUsage] = field(default_factory=list)
    _since: float = float("inf")

    def add(self, prompt: PromptUsage) -> None:
        """Add a prompt that has ended."""
        self.prompt_tokens += prompt.prompt_tokens
        self.output_tokens += prompt.output_tokens
        self.cached_tokens += prompt.cached_tokens
        self.wait_s = max(self.wait_s, prompt.started_at - prompt.submitted_at)
        self._since = min(self._since, prompt.submitted_at)
        self.engine_s = prompt.ended_at - self._since
        if len(self.prompts) < MAX_PROMPTS:
            self.prompts.append(prompt)

    def pack(self) -> bytes:
        """Return the totals as bytes."""
        return _FIELDS.pack(
            min(self.prompt_tokens, _MOST),
            min(self.output_tokens, _MOST),
            self.wait_s,
            self.engine_s,
            min(self.cached_tokens, _MOST),
        )

    @classmethod
    def unpack(cls, data: bytes) -> "RequestUsage":
        """Read the totals that `pack` wrote."""
        return cls(*_FIELDS.unpack(data))
