"""A process that parses and compiles grammars as vLLM will, so that a hostile one ends it and not an engine.

    python -m serve_app.engine.grammar_worker PARSE_S COMPILE_S MEMORY_BYTES PARENT

The first line of its input is the vocabulary, as xgrammar's `TokenizerInfo` writes it; an empty one: grammars
are parsed only. It reads a line of JSON per grammar, `[kind, text, compiles]`, and answers each with its
verdict; behind the verdict `REFUSED`, the reason as JSON. Each grammar gets a process of its own, forked from
this one, which has made its imports.
"""

import json
import mmap
import os
import re
import resource
import signal
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from serve_app.system.parent_death import end_with

READY = "ready"

PASSES, REFUSED, PARSING, COMPILING = "passes", "refused", "parsing", "compiling"
"""Verdicts: the grammar can be compiled, or can't, or what takes too long, or too much memory."""

REASON_BYTES = 2_000
REASON_CHARS = 300
"""Longest reason, with the place in a schema and without it."""

SOURCE = re.compile(r"(\[\d\d:\d\d:\d\d\] )?/\S+:\d+: (Check failed: .*? is false: )?", re.DOTALL)
"""Place in xgrammar's source, in front of a reason."""

CRASHES = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL}
"""Signals that end a process by a fault of its own."""

THREADS = 2
"""Threads that compile a grammar."""

ESCAPES = {"\\": r"\\", '"': r"\"", "\n": r"\n", "\r": r"\r", "\t": r"\t"}
"""Characters of a literal with an escape of their own."""

NAMED = ("$defs", "definitions")
MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
LISTS = ("prefixItems", "allOf", "anyOf", "oneOf", "items")
SINGLE = ("items", "additionalProperties", "propertyNames", "unevaluatedProperties", "unevaluatedItems")
"""Keywords of a JSON schema that hold schemas: to refer to, by name, in order, or one."""

LITERAL = {"const", "enum", "default", "examples"}
"""Keywords that hold values, which are no schemas."""

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
    # Memory that a process shares with its forks: a byte for the stage, and the reason of a refusal.
    shared = mmap.mmap(-1, 1 + REASON_BYTES)
    for line in lines:
        kind, text, compiles = json.loads(line)
        shared[:] = bytes(1 + REASON_BYTES)
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                # The caller ends a check by ending this process.
                end_with(worker, signal.SIGKILL)
                resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
                # The kernel ends the process when its time is up: native code doesn't run Python's handlers.
                signal.signal(signal.SIGPROF, signal.SIG_DFL)
                # A parent that blocks signals, as Ray's workers do, hands that on.
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
                times = (parse_s, compile_s if info is not None and compiles else 0.0)
                status = _check(xgrammar, info, kind, text, times, shared)
            finally:
                os._exit(status)
        _, status = os.waitpid(pid, 0)
        print(_verdict(status, shared), flush=True)


def _check(
    xgrammar: Any, info: Any, kind: str, text: str, times: tuple[float, float], shared: mmap.mmap
) -> int:
    """Parse and compile a grammar; note the stage and the reason of a refusal, and return the exit status.

    Args:
        xgrammar: The library.
        info: The vocabulary.
        kind: The kind of the grammar.
        text: The grammar.
        times: Seconds of CPU to parse and to compile; 0: it isn't compiled.
        shared: Gets the stage and the reason.
    """
    parse_s, compile_s = times
    try:
        signal.setitimer(signal.ITIMER_PROF, parse_s)
        _parse(xgrammar, kind, text)
        shared[0] = 1
        if compile_s:
            signal.setitimer(signal.ITIMER_PROF, compile_s)
            _compile(xgrammar, info, kind, text)
    except Exception as error:
        # The client gets the reason; a stack would tell of its mistake. What isn't of xgrammar passes: vLLM
        # finds it too, and says what is wrong.
        if isinstance(error, MemoryError) or "bad_alloc" in str(error):
            return 1
        if isinstance(error, RuntimeError | RefusedGrammarError) and not isinstance(error, RecursionError):
            reason = _words(error)
            _refuse(shared, reason)
            if kind == "json" and (path := _path(xgrammar, text, reason)):
                _refuse(shared, f"{reason} (at {path})")
    return 0


def _refuse(shared: mmap.mmap, reason: str) -> None:
    shared[1:] = reason.encode(errors="replace")[:REASON_BYTES].ljust(REASON_BYTES, b"\0")


def _verdict(status: int, shared: mmap.mmap) -> str:
    """Return the verdict of a process that has ended."""
    reason = shared[1:].rstrip(b"\0").decode(errors="ignore")
    if not reason and os.WIFSIGNALED(status) and os.WTERMSIG(status) in CRASHES:
        reason = f"xgrammar crashes on it ({signal.Signals(os.WTERMSIG(status)).name})"
    if reason:
        return f"{REFUSED} {json.dumps(reason)}"
    return (COMPILING if shared[0] else PARSING) if status else PASSES


class RefusedGrammarError(Exception):
    """A grammar that xgrammar compiles, and that no answer can follow."""


def _words(error: Exception) -> str:
    """Return the reason of xgrammar, without its place in xgrammar's source and the text of the grammar."""
    text = re.sub(SOURCE, "", str(error)[:REASON_BYTES]).partition("The JSON string is:")[0]
    text = " ".join(text.split()).rstrip(". ")
    return text if len(text) <= REASON_CHARS else f"{text[:REASON_CHARS]}..."


def _path(xgrammar: Any, text: str, reason: str) -> str:
    """Return the part of a JSON schema that is refused for a reason, as a JSON pointer; empty: none is."""
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError):
        return ""
    names = {name: whole[name] for name in NAMED if isinstance(whole, dict) and name in whole}
    part, path = whole, "#"
    while True:
        for name, inner in _parts(part):
            # Alone, it would miss the parts that it refers to.
            alone = names | inner if isinstance(inner, dict) else inner
            try:
                xgrammar.Grammar.from_json_schema(json.dumps(alone))
            except RuntimeError as error:
                if _words(error) == reason:
                    part, path = inner, f"{path}/{name}"
                    break
        else:
            return "" if path == "#" else path


def _parts(schema: Any) -> Iterator[tuple[str, Any]]:
    """Yield the schemas in a JSON schema, with their pointers; the named ones first."""
    if not isinstance(schema, dict):
        return
    for key in sorted(schema, key=lambda key: key not in NAMED):
        value = schema[key]
        if key in MAPS and isinstance(value, dict):
            yield from ((f"{key}/{_escaped(name)}", inner) for name, inner in value.items())
        elif key in LISTS and isinstance(value, list):
            yield from ((f"{key}/{index}", inner) for index, inner in enumerate(value))
        elif key in SINGLE and isinstance(value, dict | bool):
            yield key, value


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _check_references(schema: Any) -> None:
    """Refuse a reference of a JSON schema that leads to itself, where an answer would have no way on.

    Raises:
        RefusedGrammarError: There is one.
    """
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            waiting += [value for key, value in part.items() if key not in LITERAL]
        elif isinstance(part, list):
            waiting += part
        seen: set[str] = set()
        while isinstance(part, dict) and isinstance(reference := part.get("$ref"), str):
            if reference in seen:
                raise RefusedGrammarError(f'"$ref": {json.dumps(reference[:100])} leads to itself')
            seen.add(reference)
            part = _target(schema, reference)


def _target(schema: Any, reference: str) -> Any:
    """Return the part of a schema that a reference names; None: there is none."""
    if reference != "#" and not reference.startswith("#/"):
        return None
    part = schema
    for name in reference.split("/")[1:]:
        part = part.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(part, dict) else None
    return part


def is_lark(text: str) -> bool:
    """Return whether vLLM takes a grammar for one in Lark's notation: no line has a rule of EBNF's."""
    return not any("::=" in re.sub(r"(#|//).*$", "", line) for line in text.split("\n"))


def _parse(xgrammar: Any, kind: str, text: str) -> None:
    """Parse a grammar as vLLM does."""
    grammar = xgrammar.Grammar
    match kind:
        case "json":
            grammar.from_json_schema(text)
            _check_references(json.loads(text))
        case "regex":
            grammar.from_regex(text)
        case "grammar":
            (grammar.from_lark if is_lark(text) else grammar.from_ebnf)(text)
        case "structural_tag":
            grammar.from_structural_tag(*_tag(xgrammar, text))
        case "choice":
            grammar.from_ebnf(choice_grammar(json.loads(text)))


def _compile(xgrammar: Any, info: Any, kind: str, text: str) -> None:
    compiler = xgrammar.GrammarCompiler(info, max_threads=THREADS, cache_enabled=False)
    match kind:
        case "json":
            compiled = compiler.compile_json_schema(text)
        case "regex":
            compiled = compiler.compile_regex(text)
        case "grammar":
            compiled = (compiler.compile_lark if is_lark(text) else compiler.compile_grammar)(text)
        case "structural_tag":
            compiled = compiler.compile_structural_tag(*_tag(xgrammar, text))
        case "choice":
            compiled = compiler.compile_grammar(choice_grammar(json.loads(text)))
        case _:
            return
    matcher = xgrammar.GrammarMatcher(compiled)
    mask = xgrammar.allocate_token_bitmask(1, info.vocab_size)
    matcher.fill_next_token_bitmask(mask, 0)
    if not mask.any() and not matcher.is_completed():
        raise RefusedGrammarError("no text matches it, as where a rule leads to itself alone")


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


def choice_grammar(choices: Iterable[object]) -> str:
    """Return the grammar of a choice, as vLLM writes it."""
    return "root ::= " + " | ".join(f'"{_literal(str(choice))}"' for choice in choices)


def _literal(text: str) -> str:
    """Return a text as vLLM writes it between the quotes of a literal."""
    return "".join(
        ESCAPES.get(char) or (f"\\u{ord(char):04x}" if ord(char) < 0x20 or ord(char) == 0x7F else char)
        for char in text
    )


if __name__ == "__main__":
    main()
