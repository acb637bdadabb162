"""A stream of the OpenAI API that broke, told on from another Engine as one stream."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from serve_app.relay.asgi import END, RelayRequest
from serve_app.relay.resume import Resume

MAX_KEPT_BYTES = 1 << 20
"""Of a stream that is longer than this, what was sent is not kept; it can't go on elsewhere."""

WHOLE_TEXT_ONLY = (
    "tools",
    "functions",
    "logprobs",
    "prompt_logprobs",
    "echo",
    "return_token_ids",
    "use_beam_search",
)
"""Fields of a request whose answer holds more than text, or text that the tokens alone don't make."""


class UnresumableError(Exception):
    """A stream can't go on elsewhere; the message says why."""


class Sent:
    """What a client has been sent of a stream, kept as it is: it is read only if the stream breaks.

    Args:
        resume: How the stream could go on.
    """

    __slots__ = ("_bodies", "_resume", "_size", "_token_ids")

    def __init__(self, resume: Resume) -> None:
        self._resume = resume
        self._bodies: list[bytes] = []
        self._token_ids: list[bytes] = []
        self._size = 0

    def add(self, token_ids: bytes, body: bytes) -> None:
        """Take in a piece."""
        self._size += len(token_ids) + len(body)
        if self._size <= MAX_KEPT_BYTES:
            self._token_ids.append(token_ids)
            self._bodies.append(body)
        elif self._bodies:
            self._token_ids, self._bodies = [], []

    @property
    def ended(self) -> bool:
        """Whether the client has the last event: nothing that breaks now is its loss."""
        return bool(self._bodies) and self._bodies[-1].endswith(END)

    def start_over(self, resume: Resume) -> None:
        """Forget the tokens, not the text: another Engine tells them from the first on."""
        self._resume = resume
        self._token_ids = []

    def request(self, request: RelayRequest) -> RelayRequest:
        """Return the request that has another Engine go on.

        Raises:
            UnresumableError: None can.
        """
        if not self._resume:
            raise UnresumableError("its parameters don't allow it")
        if self._size > MAX_KEPT_BYTES:
            raise UnresumableError("it is too long")
        body = json.loads(request.body)
        for name in WHOLE_TEXT_ONLY:
            if body.get(name):
                raise UnresumableError(f"it has {name}")
        prompt = body.get("prompt")
        if (body.get("n") or 1) != 1 or (isinstance(prompt, list) and not _one_prompt(prompt)):
            raise UnresumableError("it has several texts")
        token_ids = b"".join(self._token_ids) if self._resume == "tokens" else b""
        return replace(request, resumes=True, token_ids=token_ids)

    def splice(self) -> "Splice":
        """Return what fits another Engine's stream to what was sent.

        Raises:
            UnresumableError: It is no text that could go on.
        """
        return Splice(b"".join(self._bodies))


class Splice:
    """Turns a stream that tells an answer from its start into the rest of one that broke.

    Args:
        sent: What the client has.
    """

    def __init__(self, sent: bytes) -> None:
        self._first: dict[str, Any] = {}
        self._texts: dict[str, str] = {}
        self._told: dict[str, int] = {}
        self._finished = self._counted = False
        if not sent.endswith(b"\n\n"):
            raise UnresumableError("it broke inside an event")
        for event in _events(sent):
            if event is None or "error" in event:
                raise UnresumableError("it had ended with an error")
            self._first = self._first or event
            for choice in event["choices"]:
                for field, text in _texts(choice).items():
                    self._texts[field] = self._texts.get(field, "") + text
                self._finished = self._finished or choice.get("finish_reason") is not None
            self._counted = self._counted or not event["choices"]

    def rest(self, piece: bytes) -> bytes:
        """Return what is new in a piece of the other stream.

        Args:
            piece: Whole events.

        Raises:
            UnresumableError: It tells another text.
        """
        return b"".join(filter(None, map(self._rest, _events(piece))))

    def _rest(self, event: dict[str, Any] | None) -> bytes:
        if event is None:
            self._check_all_told()
            return END
        if "error" in event:
            return _pack(event)
        choices = event["choices"]
        if not choices:
            if self._counted:
                return b""
        elif self._finished:
            # The client has all of the text; what may be missing comes behind it.
            return b""
        else:
            (choice,) = choices
            new = self._cut(choice)
            ends = choice.get("finish_reason") is not None
            if ends:
                self._check_all_told()
            elif not new:
                return b""
        return _pack(event | {name: self._first[name] for name in ("id", "created")})

    def _cut(self, choice: dict[str, Any]) -> bool:
        """Take out of a choice what the client has; return whether anything is left."""
        left = False
        place = _place(choice)
        place.pop("role", None)
        for field, text in _texts(choice).items():
            sent, told = self._texts.get(field, ""), self._told.get(field, 0)
            known = sent[told : told + len(text)]
            if not text.startswith(known):
                raise UnresumableError("the other engine tells another text")
            self._told[field] = told + len(text)
            place[field] = text[len(known) :]
            left = left or len(known) < len(text)
        return left

    def _check_all_told(self) -> None:
        if not self._finished and any(
            len(text) > self._told.get(field, 0) for field, text in self._texts.items()
        ):
            raise UnresumableError("the other engine tells a shorter text")


def _events(data: bytes) -> Iterator[dict[str, Any] | None]:
    """Read server-sent events; None stands for the one that ends the stream."""
    for line in data.split(b"\n\n"):
        if line == END.strip():
            yield None
        elif line:
            yield json.loads(line.removeprefix(b"data: "))


def _place(choice: dict[str, Any]) -> dict[str, Any]:
    """Return where a choice has its text: in itself, or in its `delta`."""
    place: dict[str, Any] = choice.get("delta", choice)
    return place


def _texts(choice: dict[str, Any]) -> dict[str, str]:
    place = _place(choice)
    if place.get("tool_calls"):
        raise UnresumableError("it has tool calls")
    return {name: place[name] for name in ("content", "reasoning", "text") if place.get(name)}


def _one_prompt(prompt: list[Any]) -> bool:
    """Return whether a list is one prompt: its token ids, or a list of one."""
    return len(prompt) == 1 or all(isinstance(part, int) for part in prompt)


def _pack(event: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(event, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()
