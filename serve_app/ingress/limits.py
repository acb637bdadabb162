"""How much one request of the OpenAI API may ask for, checked before it reaches an engine."""

from typing import Any

from pydantic import BaseModel

from serve_app.api.errors import RequestError
from serve_app.api.protocol import check_count
from serve_app.settings.schema import IngressSettings

TOKENS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
ANSWERS = ("n", "best_of")
LISTS = ("prompt", "input")


class Asked(BaseModel):
    """The fields of an OpenAI request that say how much work it is.

    They are read as leniently as vLLM reads them: what is no number for one is none for the other.
    """

    n: int | None = None
    best_of: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None
    prompt: Any = None
    input: Any = None

    def check(self, limits: IngressSettings) -> None:
        """Raise a RequestError, 400, if the request asks for more than `limits` allow."""
        for field in ANSWERS:
            _check(field, getattr(self, field), limits.max_n, "ingress.max_n")
        if limits.max_tokens is not None:
            for field in TOKENS:
                _check(field, getattr(self, field), limits.max_tokens, "ingress.max_tokens")
        for field in LISTS:
            value = getattr(self, field)
            # A list of numbers is one prompt, in tokens.
            if isinstance(value, list) and value and not isinstance(value[0], int):
                check_count(field, len(value), limits.max_prompts)


def _check(field: str, value: int | None, most: int, setting: str) -> None:
    if value is not None and value > most:
        message = f"{field}: {value} is more than the limit of {most} ({setting})"
        raise RequestError(400, "invalid_request_error", message, param=field)


def check_tokens(value: int | None, limits: IngressSettings) -> None:
    """Raise a RequestError, 400, if `max_tokens` is more than `limits` allow."""
    if limits.max_tokens is not None:
        _check("max_tokens", value, limits.max_tokens, "ingress.max_tokens")
