"""Grammars that constrain answers, such as JSON schemas: compiled first in a process that may be ended.

vLLM parses a grammar on the event loop of its server, and compiles it in its engine, without a limit of time:
a schema of 300 bytes can take minutes. So the engine's own compiler runs in a process beforehand, within
limits of CPU and memory. The process is forked from a server that has made the imports (`forkserver`), and a
new process is there at once.
"""

import asyncio
import fcntl
import hashlib
import logging
import multiprocessing
import os
import re
import resource
import signal
import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from threading import Lock
from typing import Any

import msgspec

from serve_app.api.errors import RequestError

logger = logging.getLogger("ray.serve")

MAX_CHARS = 262_144
"""Longest grammar."""

MEMORY_BYTES = 4 << 30
"""Memory of the process."""

REMEMBERED = 4_096
"""Grammars whose verdict is kept, and bodies whose grammars are known: 2 MB at most."""

WAIT_S = 90.0
"""Longest wait for a verdict by default. The process has a limit of CPU: it got no core until then."""

RETRY_S = 5.0
"""Seconds after which a request may be tried again whose grammar has got no verdict."""

NICENESS = 10
"""Priority at which grammars are compiled: the engine's steps go first."""

REASON_CHARS = 300
"""Longest reason."""

SOURCE = re.compile(r"(\[\d\d:\d\d:\d\d\] )?/\S+:\d+: (Check failed: .*? is false: )?", re.DOTALL)
"""Place in xgrammar's source, in front of a reason."""

Compiler = Callable[[str, str], None]
"""Compiles a grammar of a kind; an exception has the reason why it can't."""


class Recent:
    """Values by their keys, of which the latest are kept.

    Args:
        most: Values that are kept.
    """

    def __init__(self, most: int = REMEMBERED) -> None:
        self._most = most
        self._values: OrderedDict[Hashable, str] = OrderedDict()
        self._lock = Lock()

    def get(self, key: Hashable) -> str | None:
        """Return a value, which counts as used; None: it isn't kept."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
            return self._values.get(key)

    def set(self, key: Hashable, value: str) -> None:
        """Keep a value."""
        with self._lock:
            self._values[key] = value
            if len(self._values) > self._most:
                self._values.popitem(last=False)


class _Stated(msgspec.Struct):
    """The fields of a body that state a grammar."""

    response_format: Any = None
    text: Any = None
    output_config: Any = None
    structured_outputs: Any = None
    tools: Any = None


def field_of(body: bytes, kind: str) -> str:
    """Return the field of a body that states the grammar of its request.

    Args:
        body: The body.
        kind: The kind of the grammar, as vLLM names it.
    """
    stated = _Stated()
    with suppress(msgspec.MsgspecError, RecursionError):
        stated = msgspec.json.decode(body, type=_Stated)
    for field, value in (
        ("response_format", stated.response_format),
        ("text.format", _get(stated.text, "format")),
        ("output_config.format", _get(stated.output_config, "format")),
    ):
        if _get(value, "type") in ("json_schema", "structural_tag"):
            return field
    if stated.tools and _get(stated.structured_outputs, kind) is None:
        return "tools"
    return f"structured_outputs.{kind}"


def _get(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else None


class Grammars:
    """Compiles grammars in a process, one at a time, and remembers the verdicts.

    Args:
        make: Makes the compiler, in the process. A function of a module, or a partial of one.
        cpu_s: Seconds of CPU that a grammar may take.
        wait_s: Longest wait for a verdict, which includes the start of the process.
        memory: Bytes that the process may have.
        remembered: Verdicts that are kept.
    """

    def __init__(
        self,
        make: Callable[[], Compiler],
        cpu_s: float,
        *,
        wait_s: float = WAIT_S,
        memory: int = MEMORY_BYTES,
        remembered: int = REMEMBERED,
    ) -> None:
        self._make = make
        self._cpu_s = cpu_s
        self._wait_s = wait_s
        self._memory = memory
        self._verdicts = Recent(remembered)
        # To start a process, and to wait for it, blocks.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._process: BaseProcess | None = None
        self._stopped = False

    def start(self) -> None:
        """Start the process; without this the first grammar does."""
        if not self._stopped:
            self._thread.submit(self._ready)

    async def check(self, kind: str, text: str, field: Callable[[], str]) -> None:
        """Check that the engine can compile a grammar.

        Args:
            kind: Its kind, as vLLM names it: "json", "regex", "grammar", "choice" or "structural_tag".
            text: Its text; JSON for "json", "choice" and "structural_tag".
            field: Returns the field that a refusal names.

        Raises:
            RequestError: 400, it can't; 503, there is no verdict now.
        """
        if len(text) > MAX_CHARS:
            reason = f"has {len(text)} characters; at most {MAX_CHARS} are allowed"
            raise _refusal(kind, field(), reason)
        key = hashlib.sha256(f"{kind} {text}".encode(errors="surrogatepass")).digest()
        verdict = self._verdicts.get(key)
        if verdict is None:
            loop = asyncio.get_running_loop()
            try:
                async with asyncio.timeout(self._wait_s):
                    verdict = await loop.run_in_executor(self._thread, self._verdict, key, kind, text)
            except (TimeoutError, OSError, RuntimeError) as error:
                logger.error("a grammar of %d characters got no verdict: %r", len(text), error)
                message = "grammars can't be compiled now: the process that compiles them gives no verdict"
                raise RequestError(503, "service_unavailable", message, retry_after_s=RETRY_S) from error
        if verdict:
            raise _refusal(kind, field(), verdict)

    def _verdict(self, key: bytes, kind: str, text: str) -> str:
        """Return why a grammar can't be compiled; empty: it can. Runs in the thread.

        Raises:
            OSError: The process doesn't start.
            RuntimeError: It ended without a verdict.
        """
        if (known := self._verdicts.get(key)) is not None:
            return known
        process = self._ready()
        verdict: str | None = None
        with suppress(EOFError, OSError):
            self._connection.send((kind, text))
            if self._connection.poll(self._wait_s):
                verdict = self._connection.recv()
        if verdict is None:
            verdict = self._ended(process)
            logger.warning(
                "a grammar of %d characters ended the process that compiles it: it %s", len(text), verdict
            )
            # It has made its imports, and is there soon.
            self.start()
        self._verdicts.set(key, verdict)
        return verdict

    def _ended(self, process: BaseProcess) -> str:
        """Return what of a grammar has ended the process.

        Raises:
            RuntimeError: Something else has.
        """
        # A process that is busy got no core, and the memory of the machine may end any process: no verdicts.
        process.kill()
        process.join()
        self._process = None
        match -(process.exitcode or 0):
            case signal.SIGPROF:
                return f"takes more than {self._cpu_s:g} s to compile (grammar_compile_cpu_s); simplify it"
            case signal.SIGSEGV | signal.SIGABRT | signal.SIGBUS | signal.SIGFPE | signal.SIGILL as number:
                return f"can't be compiled: the compiler crashes ({signal.Signals(number).name})"
        raise RuntimeError(f"the process that compiles grammars ended (exit code {process.exitcode})")

    def _ready(self) -> BaseProcess:
        """Return the process, once it has its compiler. Runs in the thread."""
        if self._process is None or not self._process.is_alive():
            context = multiprocessing.get_context("forkserver")
            # A process imports the main module of its caller, and a replica's is of Ray.
            where = getattr(self._make, "func", self._make).__module__
            context.set_forkserver_preload([*({"ray"} & sys.modules.keys()), where])
            self._connection, theirs = context.Pipe()
            arguments = (theirs, self._make, self._cpu_s, self._memory)
            process = context.Process(target=answer, args=arguments, daemon=True, name="grammars")
            process.start()
            theirs.close()
            self._process = process
            if self._stopped:
                process.kill()
            with suppress(EOFError, OSError):
                self._connection.recv()
        return self._process

    def stop(self) -> None:
        """End the process."""
        self._stopped = True
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._process is not None:
            self._process.kill()


def answer(connection: Connection, make: Callable[[], Compiler], cpu_s: float, memory: int) -> None:
    """Answer each grammar of a connection with its verdict: the process.

    Args:
        connection: It ends with the process at its other end.
        make: Makes the compiler.
        cpu_s: Seconds of CPU that a grammar may take.
        memory: Bytes that this process may have.
    """
    # A grammar that is at work doesn't look at the connection, and the server from which the process was
    # forked lives as long as the process.
    _end_with_engine()
    compile_grammar = make()
    os.nice(NICENESS)
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    # A process without privileges can't raise the limit that it was started with.
    memory = memory if most == resource.RLIM_INFINITY else min(memory, most)
    resource.setrlimit(resource.RLIMIT_DATA, (memory, most))
    # The kernel ends the process when its time is up: native code doesn't run Python's handlers. A parent
    # that blocks signals, as Ray's workers do, hands that on.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    connection.send("")
    with suppress(EOFError):
        while True:
            kind, text = connection.recv()
            signal.setitimer(signal.ITIMER_PROF, cpu_s)
            verdict = ""
            try:
                compile_grammar(kind, text)
            except Exception as error:
                # The compiler raises errors of any class: each is the reason why a grammar is refused.
                verdict = f"can't be compiled: {_words(error)}"
            signal.setitimer(signal.ITIMER_PROF, 0.0)
            connection.send(verdict)


def _end_with_engine() -> None:
    """Make the kernel end this process when the pipe closes whose other end the engine holds."""
    engine = multiprocessing.parent_process()
    if engine is None:
        return
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGIO})
    fcntl.fcntl(engine.sentinel, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(engine.sentinel, fcntl.F_SETFL, os.O_ASYNC)
    # The engine may have ended before the call.
    if not engine.is_alive():
        os._exit(1)


def _words(error: Exception) -> str:
    """Return the reason of a compiler, without its place in xgrammar's source and the text of the grammar."""
    if isinstance(error, MemoryError) or "bad_alloc" in str(error):
        return "it takes too much memory"
    text = re.sub(SOURCE, "", str(error)[: 10 * REASON_CHARS]).partition("The JSON string is:")[0]
    text = " ".join(text.split()).rstrip(". ")
    return text if len(text) <= REASON_CHARS else f"{text[:REASON_CHARS]}..."


def _refusal(kind: str, field: str, reason: str) -> RequestError:
    # vLLM makes a structural tag of tools.
    what = "schema" if field == "tools" else kind
    return RequestError(400, "invalid_request_error", f"{field}: this {what} {reason}", param=field)
