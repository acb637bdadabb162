"""Stands for a vLLM engine and its application."""

from dataclasses import dataclass, field
from typing import Any

from serve_app.api.errors import RequestError
from serve_app.engine.adapters import AdapterSlots
from serve_app.engine.admission import current
from serve_app.relay.request import RelayRequest

REQUEST = RelayRequest("POST", "/v1/completions", b"", [], b"{}")
"""A request of the smallest body."""


class FakeAdapters:
    """Stands for the adapters of a VLLMEngine."""

    def __init__(self) -> None:
        self.slots = AdapterSlots(2)

    async def check(self, id: str) -> None:
        if id != "demo:words":
            raise RequestError(404, "not_found_error", f"no {id!r}; served here: demo, demo:words")


@dataclass
class FakeEngine:
    """Stands for a VLLMEngine."""

    died: bool = False
    max_tokenize_tokens: int = 1_000
    max_model_len: int = 2_048
    adapters: FakeAdapters = field(default_factory=FakeAdapters)


def failing(
    status: int = 500, *, admitted: bool = False, refused: bool = False, output_tokens: int = 0
) -> Any:
    """Return an application that answers with an error.

    Args:
        status: Its status.
        admitted: The batcher has admitted the request.
        refused: The batcher has refused it.
        output_tokens: Tokens that were made before.
    """

    async def app(scope: Any, receive: Any, send: Any) -> None:
        result = current().result
        result.admitted = admitted
        result.usage.output_tokens = output_tokens
        if refused:
            result.refusal = RequestError(429, "rate_limit_error", "full", retry_after_s=3)
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b'{"error": {"message": "oh"}}'})

    return app
