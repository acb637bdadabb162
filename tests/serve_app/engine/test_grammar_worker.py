"""The process that parses and compiles grammars: its verdicts, its limits and its end."""

import ctypes
import json
import os
import resource
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil
import pytest
import xgrammar
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.structured_output.utils import choice_as_grammar, grammar_is_likely_lark

from serve_app.engine.grammar_worker import (
    COMPILING,
    NICENESS,
    PARSING,
    PASSES,
    READY,
    REASON_BYTES,
    REFUSED,
    choice_grammar,
    is_lark,
)
from tests.progress import STILL_S, wait_until

LIMIT_S = STILL_S
PARSE_S, COMPILE_S, LONG_S = 0.5, 0.2, 600.0
MEMORY = 4 << 30

NOBODY = 2**22 + 1
"""An id that no process has; in a container the tests may be process 1."""

SLOW_TO_PARSE = {"type": "string", "pattern": "^" + "(a|b|c|d|e){1,1000}" * 12 + "$"}
"""It takes more than 5 seconds of CPU."""

WORDS = [str(number) * 20 for number in range(3000)]
"""A choice of them parses in 0.1 seconds of CPU, and takes 0.8 to compile for the 256 tokens below."""


def vocabulary() -> str:
    tokens = [bytes([number]) for number in range(256)]
    info = xgrammar.TokenizerInfo(tokens, vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[0])
    return str(info.serialize_json())


def tag(schema: object) -> str:
    content = {"type": "json_schema", "json_schema": schema}
    return json.dumps({"type": "structural_tag", "format": content})


def older_tag(schema: object) -> str:
    structure = {"begin": "<f>", "schema": schema, "end": "</f>"}
    return json.dumps({"structures": [structure], "triggers": ["<f"]})


class Worker:
    """A worker that has begun.

    Args:
        process: Its process.
    """

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self.process = process

    def send(self, *grammars: tuple[str, str, bool]) -> None:
        """Send grammars: the kind, the text, and whether each is compiled."""
        assert self.process.stdin
        self.process.stdin.write("".join(json.dumps(grammar) + "\n" for grammar in grammars).encode())
        self.process.stdin.flush()

    def line(self) -> str:
        """Return its next line."""
        assert self.process.stdout
        readable, _, _ = select.select([self.process.stdout], [], [], LIMIT_S)
        assert readable, f"no line in {LIMIT_S} s"
        return self.process.stdout.readline().decode().strip()

    def verdict(self, kind: str, text: str, compiles: bool = True) -> str:
        """Return what it says of a grammar."""
        self.send((kind, text, compiles))
        return self.line()


@contextmanager
def started(
    parse_s: float = PARSE_S,
    compile_s: float = COMPILE_S,
    memory: int = MEMORY,
    tokens: str = "",
    **more: Any,
) -> Iterator[Worker]:
    process = subprocess.Popen(
        [sys.executable, "-m", "serve_app.engine.grammar_worker"]
        + [str(argument) for argument in (parse_s, compile_s, memory, os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        # Lines that are buffered here would be missed by `select`.
        bufsize=0,
        **more,
    )
    with process:
        try:
            assert process.stdin
            process.stdin.write(f"{tokens}\n".encode())
            worker = Worker(process)
            assert worker.line() == READY
            yield worker
        finally:
            process.kill()


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with started(tokens=vocabulary()) as worker:
        yield worker


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json", json.dumps({"type": "object", "properties": {"é": {"enum": ["模", "\0"]}}})),
        ("regex", "[a-z]+"),
        ("grammar", 'root ::= "a" | "b"'),
        ("grammar", 'start: "a" | "b"'),
        ("choice", '["a", "\\"", "\\n", "模", 5]'),
        ("structural_tag", tag({"type": "string"})),
        ("structural_tag", older_tag({"type": "string"})),
        ("grammar", 'root ::= ""'),
        ("grammar", 'root ::= "a" root | "b"'),
        ("choice", '["\\ud83d\\ude00", "\\u007f", "a\\\\"]'),
        ("json", "true"),
        ("json", json.dumps({"$ref": "#/$defs/a", "$defs": {"a": {"type": "string"}}})),
        # A tree: it leads back to itself by a property that may be missing.
        ("json", json.dumps({"type": "object", "properties": {"child": {"$ref": "#"}}})),
        ("json", json.dumps({"const": {"$ref": "#"}})),
        # vLLM says what is wrong with the others: they don't get as far as xgrammar.
        ("regex", "\ud800"),
        ("choice", '["\\ud800"]'),
        ("structural_tag", "5"),
        ("structural_tag", '{"structures": [5]}'),
        ("structural_tag", "[" * 100_000),
        ("of no kind", "a"),
    ],
)
def test_a_grammar_that_takes_little_passes(worker: Worker, kind: str, text: str) -> None:
    assert worker.verdict(kind, text) == PASSES


def schema(part: object) -> str:
    """Return a schema with a part of another name than its neighbours."""
    there = {"a/b": {"anyOf": [{"type": "string"}, part]}, "c": {"$ref": "#/$defs/d"}}
    return json.dumps({"type": "object", "properties": there, "$defs": {"d": {"type": "integer"}}})


PLACE = "#/properties/a~1b/anyOf/1"


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        (
            "json",
            schema({"items": [{"type": "string"}]}),
            f"items must be a boolean or an object (at {PLACE})",
        ),
        ("json", schema({"type": "string", "pattern": r"\p{L}"}), f"not supported yet (at {PLACE})"),
        ("json", schema({"$ref": "#/$defs/none"}), f"Cannot find field none in #/$defs/none (at {PLACE})"),
        ("json", schema({"type": 7}), f"Type should be a string (at {PLACE})"),
        (
            "json",
            schema({"type": "integer", "minimum": 5, "maximum": 1}),
            f"minimum greater than maximum (at {PLACE})",
        ),
        ("json", schema(False), f"cannot accept any value (at {PLACE})"),
        (
            "json",
            '{"$defs": {"a": {"enum": []}}, "$ref": "#/$defs/a"}',
            "enum array must not be empty (at #/$defs/a)",
        ),
        ("json", '{"$ref": "#"}', '"$ref": "#" leads to itself'),
        (
            "json",
            json.dumps(
                {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
            ),
            "leads to itself",
        ),
        ("json", "", "Failed to parse JSON"),
        ("json", "[" * 100_000, "Failed to parse JSON"),
        ("regex", "(", "The parenthesis is not closed"),
        ("regex", "(?=a)b", "Lookahead is not supported yet"),
        ("regex", "\\", "Escape sequence is not finished"),
        ("regex", "\0", "null characters"),
        ("regex", "(" * 100_000 + ")" * 100_000, "Nest layer exceeded"),
        ("grammar", "root ::= (", "EBNF parser error at line 1, column 11"),
        ("grammar", 'a ::= "a"', 'The root rule with name "root" is not found'),
        ("grammar", "start: x", "Lark error at line 1, column 8: unknown name 'x'"),
        ("grammar", "root ::= root root", "no text matches it"),
        ("grammar", "start: start", "no text matches it"),
        ("choice", "{}", "EBNF parser error"),
        ("structural_tag", "{}", "must have a format field"),
        ("structural_tag", tag({"items": [{}], "type": "array"}), "items must be a boolean or an object"),
        (
            "structural_tag",
            older_tag({"items": [{}], "type": "array"}),
            "items must be a boolean or an object",
        ),
    ],
)
def test_a_grammar_that_can_not_be_compiled_is_refused_with_xgrammar_s_reason(
    worker: Worker, kind: str, text: str, reason: str
) -> None:
    verdict, _, said = worker.verdict(kind, text).partition(" ")
    assert verdict == REFUSED
    assert reason in json.loads(said)
    assert "/project/" not in said
    assert len(said) <= REASON_BYTES


def test_a_reason_is_told_whether_or_not_the_grammar_is_compiled(worker: Worker) -> None:
    assert worker.verdict("regex", "(", compiles=False).startswith(REFUSED)
    # Only the compiled grammar shows that nothing matches it.
    assert worker.verdict("grammar", "root ::= root", compiles=False) == PASSES


@given(st.lists(st.text(), min_size=1, max_size=3), st.text(alphabet=list("ab:=#/\n ")))
def test_choices_and_notations_are_those_of_vllm(choices: list[str], grammar: str) -> None:
    assert choice_grammar(choices) == choice_as_grammar(choices)
    assert not grammar or is_lark(grammar) == grammar_is_likely_lark(grammar)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json", json.dumps(SLOW_TO_PARSE)),
        ("structural_tag", tag(SLOW_TO_PARSE)),
        ("structural_tag", older_tag(SLOW_TO_PARSE)),
    ],
)
def test_a_grammar_that_takes_long_to_parse_is_told_whether_or_not_it_compiles(
    worker: Worker, kind: str, text: str
) -> None:
    assert worker.verdict(kind, text) == PARSING
    assert worker.verdict(kind, text, compiles=False) == PARSING


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json", json.dumps({"enum": WORDS})),
        ("regex", "|".join(WORDS)),
        ("grammar", "root ::= " + " | ".join(map(json.dumps, WORDS))),
        ("choice", json.dumps(WORDS)),
        ("structural_tag", tag({"enum": WORDS})),
        ("structural_tag", older_tag({"enum": WORDS})),
    ],
)
def test_a_grammar_that_takes_long_to_compile_passes_where_it_is_only_parsed(
    worker: Worker, kind: str, text: str
) -> None:
    assert worker.verdict(kind, text) == COMPILING
    assert worker.verdict(kind, text, compiles=False) == PASSES


def test_grammars_that_are_sent_at_once_are_answered_in_their_order(worker: Worker) -> None:
    slow, fast = ("json", json.dumps(SLOW_TO_PARSE), True), ("regex", "a", True)
    worker.send(fast, slow, fast, ("choice", json.dumps(WORDS), True))
    assert [worker.line() for _ in range(4)] == [PASSES, PARSING, PASSES, COMPILING]


def test_the_steps_of_an_engine_go_before_the_check(worker: Worker) -> None:
    assert psutil.Process(worker.process.pid).nice() == min(19, os.nice(0) + NICENESS)


def test_a_grammar_that_takes_too_much_memory_is_told_and_the_next_one_passes() -> None:
    with started(parse_s=LONG_S, memory=512 << 20) as worker:
        # 10 million lists, of 64 bytes each.
        assert worker.verdict("choice", f"[{'[],' * 10_000_000}[]]") == PARSING
        assert worker.verdict("choice", "[[]]") == PASSES


def test_the_worker_ends_with_its_input() -> None:
    with started() as worker:
        worker.send(("regex", "a", False))
        assert worker.process.stdin
        worker.process.stdin.close()
        assert worker.line() == PASSES
        assert worker.process.wait(LIMIT_S) == 0


def test_a_grammar_is_not_parsed_on_when_the_worker_is_killed() -> None:
    with started(parse_s=LONG_S) as worker:
        worker.send(("json", json.dumps(SLOW_TO_PARSE), False))
        child = psutil.Process(child_of(worker))
        parsing = os.pidfd_open(child.pid)
        try:
            worker.process.kill()
            while not select.select([parsing], [], [], 0.05)[0]:
                with suppress(psutil.NoSuchProcess):
                    used = child.cpu_times()
                    # The parse alone takes more than 5 seconds.
                    assert used.user + used.system < 4.0
        finally:
            os.close(parsing)


def child_of(worker: Worker) -> int:
    """Return the id of the process that has a grammar."""
    (child, *_) = wait_until(psutil.Process(worker.process.pid).children, every_s=0.0)
    return int(child.pid)


def test_a_worker_whose_parent_is_another_process_ends_at_once() -> None:
    command = [sys.executable, "-m", "serve_app.engine.grammar_worker", "1", "1", str(MEMORY), str(NOBODY)]
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=LIMIT_S)
    assert (ended.returncode, ended.stdout) == (1, b"")


def limit_memory() -> Callable[[], None]:
    """Return what limits the memory of this process below `MEMORY`, for good."""
    prctl = ctypes.CDLL(None).prctl
    drop_from_bounds, sys_resource = 24, 24

    def limit() -> None:
        # Root could raise the limit again; for others this has no effect.
        prctl(drop_from_bounds, sys_resource, 0, 0, 0)
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY // 2, MEMORY // 2))

    return limit


def test_a_process_with_a_lower_limit_of_memory_gives_the_same_verdicts() -> None:
    with started(preexec_fn=limit_memory()) as worker:
        assert worker.verdict("regex", "[a-z]+") == PASSES
        assert worker.verdict("json", json.dumps(SLOW_TO_PARSE)) == PARSING


def test_a_vocabulary_is_read_in_any_locale() -> None:
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    assert not vocabulary().isascii()
    with started(tokens=vocabulary(), env=os.environ | ascii_only) as worker:
        assert worker.verdict("regex", "[a-z]+") == PASSES
