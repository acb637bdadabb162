"""A row, its answer and its result; the client that sends rows."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from pydantic_core import from_json

from serve_app.api.errors import RequestError
from serve_app.api.protocol import JSON
from serve_app.api.scheduling import Scheduling
from serve_app.rows.pacing import EngineLoad

MOST = 1 << 40
"""Larger numbers are not token counts."""


class RowTokens(NamedTuple):
    """Tokens of answers, as the `usage` of OpenAI's API counts them.

    Attributes:
        input_tokens: Tokens of the prompts.
        cached_tokens: Prompt tokens that were in a cache.
        output_tokens: Tokens of the answers.
        reasoning_tokens: Answer tokens that are reasoning.
    """

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0


NO_TOKENS = RowTokens()


def tokens_of(answer: Any) -> RowTokens:
    """Return the tokens in an answer of chats, completions, responses, embeddings or `/generate`."""
    usage = answer.get("usage") if isinstance(answer, dict) else None
    if not isinstance(usage, dict):
        return NO_TOKENS
    if "input_tokens" in usage:
        read, written = "input_tokens", "output_tokens"
    else:
        read, written = "prompt_tokens", "completion_tokens"
    return RowTokens(
        _number(usage.get(read)),
        _number(_part(usage, f"{read}_details").get("cached_tokens")),
        _number(usage.get(written)),
        _number(_part(usage, f"{written}_details").get("reasoning_tokens")),
    )


def together(tokens: Iterable[RowTokens]) -> RowTokens:
    """Return the tokens of several answers."""
    return RowTokens(*map(sum, zip(NO_TOKENS, *tokens, strict=True)))


def _part(usage: JSON, name: str) -> JSON:
    part = usage.get(name)
    return part if isinstance(part, dict) else {}


def _number(value: Any) -> int:
    return value if type(value) is int and 0 <= value <= MOST else 0


class RowAnswer(NamedTuple):
    """The answer to a row.

    Attributes:
        status: HTTP status.
        body: Body, in the shape of OpenAI's API.
        retry_after_s: Seconds after which another try is likely to succeed.
        final: Whether another try is useless although the status suggests one.
    """

    status: int
    body: JSON
    retry_after_s: float | None = None
    final: bool = False

    @classmethod
    def of(cls, error: RequestError) -> "RowAnswer":
        """Return an error as an answer."""
        return cls(error.status, error.body(), error.retry_after_s, error.final)

    @property
    def error(self) -> JSON:
        """The error in the body; empty: there is none."""
        error = self.body.get("error") if isinstance(self.body, dict) else None
        return error if isinstance(error, dict) else {}

    @property
    def message(self) -> str:
        """The message of the error."""
        return str(self.error.get("message") or f"status {self.status}")

    @property
    def names_no_model(self) -> bool:
        """True if the row names a model or an adapter that isn't served."""
        return self.status == 404 and self.error.get("param") == "model"

    def is_of_rows(self, *fields: str) -> bool:
        """Return whether a refusal is about the rows of a call, and not about the fields that the rows share.

        Args:
            fields: The fields of a call that have a value for each row.
        """
        return self.status == 413 or str(self.error.get("param") or "").startswith(fields)


LostEngines = list[str | None]
"""The engines that were lost with a row, by the ids of their replicas; None: the id isn't known."""


@dataclass(frozen=True, slots=True)
class RowRequest:
    """The request of a row.

    Attributes:
        endpoint: The route, such as `/v1/chat/completions`.
        text: The body, as JSON.
        scheduling: The row's tier, its tenant, and the tenant's weight.
        models: Ids of the models that the row's batch may use; None: all.
        lost: The engines that were lost with the row in earlier tries; the client adds further engines.
    """

    endpoint: str
    text: bytes
    scheduling: Scheduling
    models: Collection[str] | None = None
    lost: LostEngines = field(default_factory=list)

    @property
    def body(self) -> JSON:
        """The body, parsed."""
        body: JSON = from_json(self.text)
        return body


class QuotaError(RequestError):
    """A quota of a row's tenant or key is used up. The engines may have free places."""


class RowClient(Protocol):
    """A client that sends rows to the engines."""

    async def send(self, request: RowRequest) -> RowAnswer:
        """Send a row and return its answer.

        Raises:
            QuotaError: The tenant or key of the row has no quota left now.
            RequestError: Equivalent to an answer with the error's status.
            Exception: The engine couldn't be reached.
        """

    async def load(self, base: str | None) -> EngineLoad | None:
        """Return the load of the engines of a model.

        Args:
            base: The model; None: all engines that had rows since the last call with None.

        Returns:
            The load; None: unknown.
        """


class Row(NamedTuple):
    """A row of the input.

    Attributes:
        line: Number of its line.
        text: The line.
        model: The model that its body names; None: the body names no model.
    """

    line: int
    text: bytes
    model: str | None = None


class Result(NamedTuple):
    """The result of a row.

    Attributes:
        line: Number of the input line.
        text: Line of the output or the error file.
        is_error: Whether it belongs in the error file.
        is_unrun: Whether the row has no answer since its batch ended before it ran.
        tokens: Tokens that the answer reports.
    """

    line: int
    text: bytes
    is_error: bool
    is_unrun: bool = False
    tokens: RowTokens = NO_TOKENS
