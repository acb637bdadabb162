"""Limits on the grammars of a request, checked before vLLM parses them on its event loop."""

import asyncio
import hashlib
import json
import logging
import os
import sys
from collections import OrderedDict
from contextlib import suppress

from serve_app.api.errors import RequestError
from serve_app.engine.grammar_worker import READY
from serve_app.engine.grammars import Grammar

logger = logging.getLogger("ray.serve")

MAX_CHARS = 262_144
"""Longest grammar."""

MEMORY_BYTES = 4 << 30
"""Memory of the process that parses grammars."""

REMEMBERED = 1_000
"""Grammars whose result is kept."""

WAIT_S = 30.0
"""Longest wait for the process, which may start first or not get a core."""


class GrammarCheck:
    """Parses grammars in a process of its own, and refuses those that take too long.

    vLLM parses a grammar on the event loop of its server, without a limit of time: a schema of 300 bytes can
    take minutes, in which the engine sends nothing to anybody. What passes here takes vLLM as long again.

    Args:
        cpu_s: Seconds of CPU that a grammar may take.
    """

    def __init__(self, cpu_s: float) -> None:
        self._cpu_s = cpu_s
        self._process: asyncio.subprocess.Process | None = None
        self._known: OrderedDict[bytes, bool] = OrderedDict()
        self._lock = asyncio.Lock()

    async def start(self) -> None:
        """Start the process; without this the first check does."""
        async with self._lock:
            await self._ready()

    async def check(self, grammars: list[Grammar]) -> None:
        """Check the grammars of a request.

        Raises:
            RequestError: 400, one is too long or takes too much to parse.
        """
        for grammar in grammars:
            if len(grammar.text) > MAX_CHARS:
                raise _refusal(
                    grammar, f"has {len(grammar.text)} characters; at most {MAX_CHARS} are allowed"
                )
        for grammar in grammars:
            if not await self._passes(grammar):
                reason = f"takes more than {self._cpu_s:g} s to parse (grammar_cpu_s); simplify it"
                raise _refusal(grammar, reason)

    async def _passes(self, grammar: Grammar) -> bool:
        key = hashlib.sha256(f"{grammar.kind} {grammar.text}".encode()).digest()
        if key not in self._known:
            async with self._lock:
                if key not in self._known:
                    self._known[key] = await self._parse(grammar)
        self._known.move_to_end(key)
        while len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
        return self._known[key]

    async def _parse(self, grammar: Grammar) -> bool:
        process = await self._ready()
        assert process.stdin
        assert process.stdout
        line = json.dumps([grammar.kind, grammar.text]) + "\n"
        answered = False
        try:
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(WAIT_S):
                    process.stdin.write(line.encode())
                    await process.stdin.drain()
                    answered = bool(await process.stdout.readline())
        finally:
            if not answered:
                # The next check would read the answer of one that is cancelled.
                self._kill()
        if not answered:
            logger.warning("refused a grammar of %d characters that takes too long", len(grammar.text))
        return answered

    async def _ready(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            arguments = [str(self._cpu_s), str(MEMORY_BYTES), str(os.getpid())]
            self._process = process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "serve_app.engine.grammar_worker", *arguments),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
            assert process.stdout
            ready = False
            try:
                async with asyncio.timeout(WAIT_S):
                    while (line := await process.stdout.readline()) != f"{READY}\n".encode():
                        if not line:
                            raise RuntimeError("the process that parses grammars did not start")
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


def _refusal(grammar: Grammar, reason: str) -> RequestError:
    message = f"{grammar.field}: this {grammar.kind} {reason}"
    return RequestError(400, "invalid_request_error", message, param=grammar.field)
