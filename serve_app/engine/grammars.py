"""Grammars of requests, JSON schemas and the like that constrain an answer: their bodies, and their check.

vLLM parses a grammar on the event loop of its server, without a limit of time: a schema of 300 bytes can take
minutes, in which the engine sends nothing to anybody. So each grammar is parsed and compiled in a process of
its own first, within limits.
"""

import asyncio
import hashlib
import json
import logging
import os
import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec

from serve_app.api.errors import RequestError
from serve_app.api.facts import GRAMMARS
from serve_app.api.protocol import JSON
from serve_app.engine.grammar_worker import COMPILING, PARSING, READY, REFUSED
from serve_app.system.cpu_scheduling import use_usual_priority

logger = logging.getLogger("ray.serve")

_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


class Grammar(NamedTuple):
    """One grammar.

    Attributes:
        kind: "json", "regex", "grammar", "choice" or "structural_tag", as vLLM names them.
        text: Its text; JSON for "json", "choice" and "structural_tag".
        field: The field of the request that holds it.
        compiles: vLLM compiles it; otherwise it only looks at it.
    """

    kind: str
    text: str
    field: str
    compiles: bool = True


def grammars_of(body: bytes) -> list[Grammar]:
    """Return the grammars in the body of a request of OpenAI's or Anthropic's API."""
    try:
        content = _parse(body)
    except (ValueError, RecursionError):
        # vLLM refuses it, in its own words.
        return []
    return list(_find(content)) if isinstance(content, dict) else []


def _parse(body: bytes) -> Any:
    """Parse a body; the texts and numbers of large prompts are skipped where that is possible.

    Raises:
        RequestError: 400, the grammars are too long to parse on the event loop.
    """
    try:
        fields = _FIELDS.decode(body)
    except (msgspec.MsgspecError, RecursionError):
        # It has what strict JSON hasn't, such as NaN.
        _check_bytes("The body, which is not strict JSON and has fields for grammars,", len(body))
        return json.loads(body)
    found = {name: bytes(fields[name]) for name in GRAMMARS if name in fields}
    _check_bytes(max(found, key=lambda name: len(found[name]), default=""), sum(map(len, found.values())))
    return {name: json.loads(text) for name, text in found.items()}


def _check_bytes(what: str, size: int) -> None:
    if size > MAX_BYTES:
        message = f"{what}: grammars and tools have {size} bytes together; at most {MAX_BYTES} are allowed"
        param = what if what in GRAMMARS else None
        raise RequestError(400, "invalid_request_error", message, param=param)


def _find(content: JSON) -> Iterator[Grammar]:
    for field, value in (
        ("response_format", content.get("response_format")),
        ("text.format", _get(content.get("text"), "format")),
        ("output_config.format", _get(content.get("output_config"), "format")),
    ):
        match _get(value, "type"):
            case "json_schema":
                # The older API nests the schema once more.
                schema = _get(_get(value, "json_schema"), "schema") or _get(value, "schema")
                yield from _json("json", schema, field)
            case "structural_tag":
                yield from _json("structural_tag", value, field)
    for kind in ("json", "regex", "grammar", "choice", "structural_tag"):
        field = f"structured_outputs.{kind}"
        value = _get(content.get("structured_outputs"), kind)
        if isinstance(value, str):
            yield Grammar(kind, value, field)
        else:
            yield from _json(kind, value, field)
    yield from _tools(content)


def _tools(content: JSON) -> Iterator[Grammar]:
    """Yield the schemas of the tools, and one of all of them where an answer has to follow it."""
    tools = content.get("tools")
    schemas = []
    strict = False
    for index, tool in enumerate(tools if isinstance(tools, list) else ()):
        function = _get(tool, "function") or tool
        schema = _get(function, "parameters") or _get(function, "input_schema")
        strict = strict or bool(_get(function, "strict"))
        for grammar in _json("json", schema, f"tools[{index}]"):
            schemas.append(schema)
            yield grammar._replace(compiles=False)
    if schemas and (strict or content.get("tool_choice") not in (None, "auto", "none")):
        yield from _json("json", {"anyOf": schemas}, "tools")


def _json(kind: str, value: Any, field: str) -> Iterator[Grammar]:
    if isinstance(value, dict | list) and value:
        yield Grammar(kind, json.dumps(value), field)


def _get(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else None


MAX_CHARS = 262_144
"""Longest grammar."""

MAX_BYTES = 1 << 20
"""Most bytes of all fields with grammars, which the event loop parses: 10 ms."""

MEMORY_BYTES = 4 << 30
"""Memory for one grammar."""

REMEMBERED = 1_000
"""Grammars whose result is kept."""

WAIT_S = 30.0
"""Longest wait for the process by default."""

RETRY_S = 5.0
"""Seconds after which a request may be tried again when the process doesn't start, or gives no verdict."""


class GrammarCheck:
    """Parses and compiles grammars in a process of its own, and refuses those that take too long.

    The process checks one grammar at a time. The door lets one job with an unknown grammar through at once,
    in the order of the batcher. A grammar that passes takes vLLM as long again, once.

    Args:
        parse_s: Seconds of CPU that a grammar may take to parse.
        compile_s: Seconds of CPU that it may take to compile.
        vocabulary: The model's, as xgrammar's `TokenizerInfo` writes it; empty: grammars are parsed only.
        wait_s: Longest wait for the process, which may start first or not get a core.
    """

    def __init__(
        self, parse_s: float, compile_s: float, vocabulary: str = "", wait_s: float = WAIT_S
    ) -> None:
        self._limits = {
            PARSING: (parse_s, "parse", "grammar_cpu_s"),
            COMPILING: (compile_s, "compile", "grammar_compile_cpu_s"),
        }
        self._vocabulary = vocabulary
        self._wait_s = wait_s
        self._process: asyncio.subprocess.Process | None = None
        self._known: OrderedDict[bytes, str] = OrderedDict()
        self._lock = asyncio.Lock()

    @property
    def process(self) -> asyncio.subprocess.Process | None:
        """The process; None: it has not started yet, or was ended."""
        return self._process

    def unknown(self, grammars: Iterable[Grammar]) -> bool:
        """Return whether the check of some grammars takes the process."""
        return any(_key(grammar) not in self._known for grammar in grammars)

    async def start(self) -> None:
        """Start the process; without this the first check does."""
        async with self._lock:
            await self._ready()

    async def check(self, grammars: Iterable[Grammar]) -> None:
        """Check that the grammars of a request are within the limits.

        Those that can't be compiled pass: vLLM only looks at some, and makes others of them. See `compile`.

        Raises:
            RequestError: 400, a grammar takes too much to parse; 503, the process doesn't start or answer.
        """
        for grammar in grammars:
            await self._check_limits(grammar)

    async def compile(self, grammar: Grammar, stated: Iterable[Grammar]) -> None:
        """Check a grammar that the engine is about to compile.

        Args:
            grammar: The grammar, as the engine gets it.
            stated: The grammars of its request: the refusal names the field of the one that is wrong.

        Raises:
            RequestError: 400, it can't be compiled, or is beyond a limit; 503, as for `check`.
        """
        # vLLM writes JSON as this package does, so mostly the text is one of the request's.
        fields = [each.field for each in stated if (each.kind, each.text) == (grammar.kind, grammar.text)]
        grammar = grammar._replace(field=next(iter(fields), grammar.field))
        if not (reason := await self._check_limits(grammar)):
            return
        for each in () if fields else stated:
            if inner := await self._check_limits(each):
                grammar, reason = each, inner
                break
        raise _refusal(grammar, f"can't be compiled: {reason}")

    async def _check_limits(self, grammar: Grammar) -> str:
        """Return why a grammar can't be compiled; empty: it can.

        Raises:
            RequestError: 400, it is too long or takes too much to parse; 503, as for `check`.
        """
        verdict, _, reason = (await self._verdict(grammar)).partition(" ")
        if verdict in self._limits:
            most, what, setting = self._limits[verdict]
            raise _refusal(grammar, f"takes more than {most:g} s to {what} ({setting}); simplify it")
        return str(json.loads(reason)) if verdict == REFUSED else ""

    async def _verdict(self, grammar: Grammar) -> str:
        key = _key(grammar)
        if key not in self._known:
            async with self._lock:
                if key not in self._known:
                    self._known[key] = await self._try(grammar)
        self._known.move_to_end(key)
        while len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
        return self._known[key]

    async def _try(self, grammar: Grammar) -> str:
        """Return the verdict of the process."""
        try:
            process = await self._ready()
        except (OSError, RuntimeError) as error:
            logger.error("the process that checks grammars does not start: %r", error)
            raise _unavailable("does not start") from error
        assert process.stdin
        assert process.stdout
        line = json.dumps([grammar.kind, grammar.text, grammar.compiles]) + "\n"
        verdict = ""
        try:
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(self._wait_s):
                    process.stdin.write(line.encode())
                    await process.stdin.drain()
                    verdict = (await process.stdout.readline()).decode().strip()
        finally:
            if not verdict:
                # The next check would read the answer of one that is cancelled.
                self._kill()
        if not verdict:
            # Its own limits are of CPU time: it got no core, or was killed.
            logger.error("a grammar of %d characters got no verdict", len(grammar.text))
            raise _unavailable(f"ended, or has not answered for {self._wait_s:g} s")
        if verdict in self._limits:
            size = len(grammar.text)
            logger.warning("refused a grammar of %d characters: %s takes too long", size, verdict)
        return verdict

    async def _ready(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            limits = [str(self._limits[stage][0]) for stage in (PARSING, COMPILING)]
            arguments = [*limits, str(MEMORY_BYTES), str(os.getpid())]
            self._process = process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "serve_app.engine.grammar_worker", *arguments),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
            use_usual_priority(process.pid)
            assert process.stdin
            assert process.stdout
            ready = False
            try:
                async with asyncio.timeout(self._wait_s):
                    process.stdin.write(f"{self._vocabulary}\n".encode())
                    await process.stdin.drain()
                    while (line := await process.stdout.readline()) != f"{READY}\n".encode():
                        if not line:
                            raise RuntimeError("the process that checks grammars ended at once")
                ready = True
            finally:
                if not ready:
                    self._kill()
            return process
        return self._process

    async def stop(self) -> None:
        """End the process."""
        if process := self._kill():
            await process.wait()

    def _kill(self) -> asyncio.subprocess.Process | None:
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
        return process


def _key(grammar: Grammar) -> bytes:
    known = f"{grammar.kind} {grammar.compiles} {grammar.text}"
    return hashlib.sha256(known.encode(errors="surrogatepass")).digest()


def check_lengths(grammars: Iterable[Grammar]) -> None:
    """Refuse grammars that are too long.

    Raises:
        RequestError: 400.
    """
    for grammar in grammars:
        if len(grammar.text) > MAX_CHARS:
            raise _refusal(grammar, f"has {len(grammar.text)} characters; at most {MAX_CHARS} are allowed")


def _unavailable(reason: str) -> RequestError:
    message = f"grammars can't be checked now, since the process that checks them {reason}"
    return RequestError(503, "service_unavailable", message, retry_after_s=RETRY_S)


def _refusal(grammar: Grammar, reason: str) -> RequestError:
    message = f"{grammar.field}: this {grammar.kind} {reason}"
    return RequestError(400, "invalid_request_error", message, param=grammar.field)
