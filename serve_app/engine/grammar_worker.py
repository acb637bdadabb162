"""A process that parses and compiles grammars as vLLM will, so that a hostile one ends it and not an engine.

    python -m serve_app.engine.grammar_worker PARSE_S COMPILE_S MEMORY_BYTES PARENT

The first line of its input is the vocabulary, as xgrammar's `TokenizerInfo` writes it; an empty one: grammars
are parsed only. It reads a line of JSON per grammar, `[kind, text, compiles]`, and answers each with its
verdict. Each grammar gets a process of its own, forked from this one, which has made its imports.
"""

import json
import mmap
import os
import resource
import signal
import sys
from contextlib import suppress
from typing import Any

from serve_app.system.parent_death import end_with

READY = "ready"

PASSES, PARSING, COMPILING = "passes", "parsing", "compiling"
"""Verdicts: the grammar is within the limits, or what took too long, or too much memory."""

THREADS = 2
"""Threads that compile a grammar."""

NICENESS = 10
"""Priority at which they do: the engine's steps go first."""


def main() -> None:
    """Answer until standard input ends."""
    parse_s, compile_s = map(float, sys.argv[1:3])
    memory, parent = map(int, sys.argv[3:5])
    end_with(parent, signal.SIGKILL)
    # Imported here, by the process that needs it: it takes seconds.
    import xgrammar

    # Bytes, since the locale may name another encoding than the one in which they were written.
    lines = sys.stdin.buffer
    vocabulary = lines.readline().decode().strip()
    info = xgrammar.TokenizerInfo.deserialize_json(vocabulary) if vocabulary else None
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    if most != resource.RLIM_INFINITY:
        # A process without privileges can't raise the limit that it was started with.
        memory = min(memory, most)
    os.nice(NICENESS)
    worker = os.getpid()
    print(READY, flush=True)
    # Memory that a process shares with its forks.
    parsed = mmap.mmap(-1, 1)
    for line in lines:
        kind, text, compiles = json.loads(line)
        parsed[0] = 0
        pid = os.fork()
        if pid == 0:
            # The caller ends a check by ending this process.
            end_with(worker, signal.SIGKILL)
            resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
            # The kernel ends the process when its time is up: native code doesn't run Python's handlers.
            signal.signal(signal.SIGPROF, signal.SIG_DFL)
            # A parent that blocks signals, as Ray's workers do, hands that on.
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
            no_memory = False
            try:
                signal.setitimer(signal.ITIMER_PROF, parse_s)
                _parse(xgrammar, kind, text)
                parsed[0] = 1
                if info is not None and compiles:
                    signal.setitimer(signal.ITIMER_PROF, compile_s)
                    _compile(xgrammar, info, kind, text)
            except Exception as error:
                # vLLM reports other errors.
                no_memory = isinstance(error, MemoryError) or "bad_alloc" in str(error)
            os._exit(no_memory)
        _, status = os.waitpid(pid, 0)
        print((COMPILING if parsed[0] else PARSING) if status else PASSES, flush=True)


def _parse(xgrammar: Any, kind: str, text: str) -> None:
    """Parse a grammar in each way in which vLLM may."""
    grammar = xgrammar.Grammar
    match kind:
        case "json":
            grammar.from_json_schema(text)
        case "regex":
            grammar.from_regex(text)
        case "grammar":
            with suppress(RuntimeError):
                grammar.from_lark(text)
            grammar.from_ebnf(text)
        case "structural_tag":
            grammar.from_structural_tag(*_tag(xgrammar, text))
        case "choice":
            grammar.from_ebnf(_choice(text))


def _compile(xgrammar: Any, info: Any, kind: str, text: str) -> None:
    compiler = xgrammar.GrammarCompiler(info, max_threads=THREADS, cache_enabled=False)
    match kind:
        case "json":
            compiler.compile_json_schema(text)
        case "regex":
            compiler.compile_regex(text)
        case "grammar":
            with suppress(RuntimeError):
                compiler.compile_lark(text)
            compiler.compile_grammar(text)
        case "structural_tag":
            compiler.compile_structural_tag(*_tag(xgrammar, text))
        case "choice":
            compiler.compile_grammar(_choice(text))


def _tag(xgrammar: Any, text: str) -> list[Any]:
    """Return the arguments for a structural tag, of which there is an older form."""
    tag = json.loads(text)
    if "structures" not in tag:
        return [text]
    items = [
        xgrammar.StructuralTagItem(begin=one["begin"], schema=json.dumps(one["schema"]), end=one["end"])
        for one in tag["structures"]
    ]
    return [items, tag["triggers"]]


def _choice(text: str) -> str:
    return "root ::= " + " | ".join(json.dumps(str(choice)) for choice in json.loads(text))


if __name__ == "__main__":
    main()
