"""What an engine tells the Ingress of an answer: the tokens it took and how long it waited.

It travels behind the last byte of the answer, in the same message, and is taken off before anything leaves.
"""

import struct
from dataclasses import dataclass, field
from typing import NamedTuple

MARK = b"\xffsaturate\x00"
"""Ends a message that carries a usage. Neither JSON nor a stream of events can hold it: it isn't UTF-8."""

MAX_PARTS = 64
"""Parts that are kept of one request, which may have thousands of prompts."""

_FIELDS = struct.Struct(">IIff")
_SIZE = _FIELDS.size + len(MARK)


class PromptUsage(NamedTuple):
    """One prompt of a request; the times are those of `time.monotonic`."""

    submitted_at: float
    started_at: float
    ended_at: float
    prompt_tokens: int
    output_tokens: int


@dataclass(slots=True)
class RequestUsage:
    """What an answer took, over all of its prompts.

    Attributes:
        prompt_tokens: Tokens in.
        output_tokens: Tokens out.
        wait_s: Seconds that it waited in the batcher; of several prompts, the longest wait.
        engine_s: Seconds from the submission of the first prompt to the end of the last one.
        parts: The first of its prompts.
    """

    prompt_tokens: int = 0
    output_tokens: int = 0
    wait_s: float = 0.0
    engine_s: float = 0.0
    parts: list[PromptUsage] = field(default_factory=list)
    _since: float = float("inf")

    def add(self, part: PromptUsage) -> None:
        """Take in a prompt that has ended."""
        self.prompt_tokens += part.prompt_tokens
        self.output_tokens += part.output_tokens
        self.wait_s = max(self.wait_s, part.started_at - part.submitted_at)
        self._since = min(self._since, part.submitted_at)
        self.engine_s = part.ended_at - self._since
        if len(self.parts) < MAX_PARTS:
            self.parts.append(part)

    def pack(self) -> bytes:
        """Return the usage as it goes behind an answer; nothing, where nothing was taken."""
        if not self.prompt_tokens:
            return b""
        return _FIELDS.pack(self.prompt_tokens, self.output_tokens, self.wait_s, self.engine_s) + MARK


def cut(message: bytes) -> tuple[bytes, bytes]:
    """Split any message into what belongs to the answer and a usage as it came, which may be empty."""
    return (message[:-_SIZE], message[-_SIZE:]) if message.endswith(MARK) else (message, b"")


def split(message: bytes) -> tuple[bytes, RequestUsage]:
    """Split a message that ends with `MARK` into what belongs to the answer and the usage."""
    return message[:-_SIZE], RequestUsage(*_FIELDS.unpack_from(message, len(message) - _SIZE))
