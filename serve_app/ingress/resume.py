"""A stream of the OpenAI API that broke goes on in another engine, and the client sees no seam."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from serve_app.ingress.body import HeldBody
from serve_app.wire.frame import DONE, Piece, ResumeMode
from serve_app.wire.request import RelayRequest

MAX_KEPT_BYTES = 1 << 20
"""Maximum bytes that are kept of a stream; a longer one can't go on elsewhere."""

WHOLE_TEXT_ONLY = (
    "tools",
    "functions",
    "logprobs",
    "prompt_logprobs",
    "echo",
    "return_token_ids",
    "use_beam_search",
)
"""Fields of a request whose answer holds more than text, or text that the tokens alone don't give."""


class UnresumableError(Exception):
    """A stream can't go on elsewhere; the message says why."""


class ResumableStream:
    """A stream that another engine can go on with.

    The part that the client has is kept unparsed: it is read only if the stream breaks.

    Args:
        resume: How the stream could go on; nothing is kept of a stream that can't.
        held: Counts the kept bytes, until the request ends. A stream that has no room can't go on elsewhere.
    """

    __slots__ = ("_bodies", "_held", "_kept", "_next", "_resume", "_size", "_splice", "_token_ids")

    def __init__(self, resume: ResumeMode, held: HeldBody) -> None:
        self._resume = resume
        self._held = held
        self._kept = True
        self._bodies: list[bytes] = []
        self._token_ids: list[bytes] = []
        self._size = 0
        self._splice: Splice | None = None
        self._next: Splice | None = None

    def add(self, piece: Piece) -> bytes:
        """Add a piece of the engine that has the stream now; return what is new in it for the client.

        Raises:
            UnresumableError: The other engine has another text.
        """
        body = piece.body if self._splice is None else self._splice.rest(piece.body)
        if not self._resume or not self._kept:
            return body
        size = len(piece.token_ids) + len(body)
        if self._size + size <= MAX_KEPT_BYTES and self._held.keep(size):
            self._size += size
            self._token_ids.append(piece.token_ids)
            self._bodies.append(body)
        else:
            self._kept = False
            self._held.drop(self._size)
            self._token_ids, self._bodies = [], []
        return body

    def rest_of(self, request: RelayRequest) -> RelayRequest:
        """Return the request for another engine that goes on with the stream.

        Raises:
            UnresumableError: No engine can go on.
        """
        if not self._resume:
            raise UnresumableError("its parameters don't allow it")
        if not self._kept:
            raise UnresumableError("it is too long, or there was no room to keep it")
        body = json.loads(request.body)
        for name in WHOLE_TEXT_ONLY:
            if not _is_absent(body.get(name)):
                raise UnresumableError(f"it has {name}")
        prompt = body.get("prompt")
        if (body.get("n") or 1) != 1 or (isinstance(prompt, list) and not _one_prompt(prompt)):
            raise UnresumableError("it has several texts")
        self._next = Splice(b"".join(self._bodies))
        token_ids = b"".join(self._token_ids) if self._resume == "tokens" else b""
        return replace(request, resumes=True, token_ids=token_ids)

    def go_on(self, resume: ResumeMode) -> None:
        """Take the pieces of another engine from now on.

        The engine sends tokens and text from the first token on; so the tokens that are kept are forgotten.

        Args:
            resume: How its stream could go on.
        """
        self._resume = resume
        known = sum(map(len, self._token_ids))
        self._size -= known
        self._held.drop(known)
        self._token_ids = []
        self._splice = self._next


class Splice:
    """Turns a stream that repeats an answer from its start into the rest of the stream that broke.

    Args:
        sent: The events that the client has.
    """

    def __init__(self, sent: bytes) -> None:
        self._first: dict[str, Any] = {}
        self._texts: dict[str, str] = {}
        self._repeated: dict[str, int] = {}
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
            UnresumableError: The other stream has another text.
        """
        return b"".join(filter(None, map(self._rest, _events(piece))))

    def _rest(self, event: dict[str, Any] | None) -> bytes:
        if event is None:
            self._check_all_repeated()
            return DONE
        if "error" in event:
            # Its text ends here, however short it is.
            self._finished = True
            return _pack(event)
        choices = event["choices"]
        if not choices:
            if self._counted:
                return b""
        elif self._finished:
            # The client has all of the text; only what comes behind it may be missing.
            return b""
        else:
            (choice,) = choices
            new = self._drop_known(choice)
            ends = choice.get("finish_reason") is not None
            if ends:
                self._check_all_repeated()
            elif not new:
                return b""
        return _pack(event | {name: self._first[name] for name in ("id", "created")})

    def _drop_known(self, choice: dict[str, Any]) -> bool:
        """Remove from a choice the text that the client has; return whether any is left."""
        left = False
        place = _place(choice)
        place.pop("role", None)
        for field, text in _texts(choice).items():
            sent, repeated = self._texts.get(field, ""), self._repeated.get(field, 0)
            known = sent[repeated : repeated + len(text)]
            if not text.startswith(known):
                raise UnresumableError("the other engine gives another text")
            self._repeated[field] = repeated + len(text)
            place[field] = text[len(known) :]
            left = left or len(known) < len(text)
        return left

    def _check_all_repeated(self) -> None:
        if not self._finished and any(
            len(text) > self._repeated.get(field, 0) for field, text in self._texts.items()
        ):
            raise UnresumableError("the other engine gives a shorter text")


def _events(data: bytes) -> Iterator[dict[str, Any] | None]:
    """Yield server-sent events; None stands for the last event, DONE."""
    for block in data.split(b"\n\n"):
        # Lines that begin with a colon are comments: vLLM can send them as keep-alives.
        line = b"\n".join(each for each in block.split(b"\n") if not each.startswith(b":"))
        if line == DONE.strip():
            yield None
        elif line:
            yield json.loads(line.removeprefix(b"data: "))


def _place(choice: dict[str, Any]) -> dict[str, Any]:
    """Return the object that holds a choice's text: the choice itself, or its `delta`."""
    place: dict[str, Any] = choice.get("delta", choice)
    return place


def _texts(choice: dict[str, Any]) -> dict[str, str]:
    place = _place(choice)
    if place.get("tool_calls"):
        raise UnresumableError("it has tool calls")
    return {name: place[name] for name in ("content", "reasoning", "text") if place.get(name)}


def _is_absent(value: object) -> bool:
    # Not 0, which asks for the log probability of the token itself.
    return value is None or value is False or value in ([], {})


def _one_prompt(prompt: list[Any]) -> bool:
    """Return whether a list is one prompt: its token ids, or a list of one."""
    return len(prompt) == 1 or all(isinstance(part, int) for part in prompt)


def _pack(event: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(event, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()
