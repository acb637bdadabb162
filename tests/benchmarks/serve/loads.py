"""What is asked of a server."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

PROMPT = "The quick brown fox jumps over the lazy dog, again and again..."[:64]
"""64 tokens for a model whose tokens are bytes."""

OUTPUT = 64
"""Tokens of each answer; the end of text is ignored, so that all servers do the same work."""

_FIXED = {"max_tokens": OUTPUT, "temperature": 0, "ignore_eos": True}


def _chat(number: int) -> tuple[str, dict[str, Any]]:
    messages = [{"role": "user", "content": f"{number:06}{PROMPT[6:]}"}]
    return "/v1/chat/completions", {"model": "demo", "messages": messages, "stream": True, **_FIXED}


def _completion(number: int) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {"model": "demo", "prompt": f"{number:06}{PROMPT[6:]}", **_FIXED}


@dataclass(frozen=True, slots=True)
class Load:
    """One load.

    Attributes:
        about: A few words for the table.
        clients: Connections at once.
        requests: In total.
        request: Path and body of the request of a number.
    """

    about: str
    clients: int
    requests: int
    request: Callable[[int], tuple[str, dict[str, Any]]]

    @property
    def output_tokens(self) -> int:
        """Tokens that all answers together hold."""
        return self.requests * OUTPUT


LOADS: Mapping[str, Load] = {
    "stream-1": Load("streaming chat, 1 client", 1, 40, _chat),
    "stream-32": Load("streaming chat, 32 clients", 32, 640, _chat),
    "stream-128": Load("streaming chat, 128 clients", 128, 1024, _chat),
    "unary-32": Load("completions, 32 clients", 32, 640, _completion),
    "unary-128": Load("completions, 128 clients", 128, 1024, _completion),
}
"""64 tokens in, 64 out."""
