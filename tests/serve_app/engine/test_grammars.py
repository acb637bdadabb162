"""Grammars are compiled in a process that a grammar may end; the body's fields are bounded before a parse."""

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from itertools import count
from typing import Any

import pytest

from serve_app.api.errors import RequestError
from serve_app.engine.grammars import Compiler, Grammars, field_of
from tests.progress import STILL_S

LIMIT_S = STILL_S
CPU_S = 0.2
MEMORY = 2 << 30
AWAY = "503, again in 5 s"


def played() -> Compiler:
    """Return a compiler for which a grammar is what is to happen."""
    calls = count(1)

    def compile_grammar(kind: str, text: str) -> None:
        call = next(calls)
        match text.split()[0]:
            case "slow":
                while True:
                    pass
            case "told":
                print("at work", flush=True)
                while True:
                    pass
            case "asleep":
                signal.pause()
            case "crash":
                os.abort()
            case "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "large":
                bytearray(2 * MEMORY)
            case "wrong":
                raise RuntimeError("[12:00:00] /project/cpp/a.cc:7: Check failed: (x) is false: no x. ")
            case "long":
                raise ValueError("x" * 1_000_000)
            case "calls":
                raise ValueError(f"call {call} of process {os.getpid()}")

    return compile_grammar


def unmade() -> Compiler:
    raise RuntimeError("no compiler")


@pytest.fixture(scope="module")
def kept() -> Any:
    """Return the check of all tests that end no process."""
    grammars = Grammars(played, CPU_S, wait_s=LIMIT_S, memory=MEMORY)
    yield grammars
    grammars.stop()


@pytest.fixture
async def own() -> AsyncIterator[Callable[..., Grammars]]:
    """Return what makes a check whose process may end."""
    made: list[Grammars] = []

    def make(compiler: Callable[[], Compiler] = played, **limits: Any) -> Grammars:
        made.append(Grammars(compiler, CPU_S, memory=MEMORY, **{"wait_s": LIMIT_S} | limits))
        return made[-1]

    yield make
    for each in made:
        each.stop()


async def verdict(grammars: Grammars, text: str) -> str:
    """Return the words of a refusal, or the status of another error; empty: the grammar passes."""
    try:
        await grammars.check("regex", text, lambda: "f")
    except RequestError as error:
        if error.status != 400:
            return f"{error.status}, again in {error.retry_after_s:g} s"
        return error.message.removeprefix(f"{error.param}: this regex ")
    return ""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("good", ""),
        ("wrong", "can't be compiled: no x"),
        ("large", "can't be compiled: it takes too much memory"),
        ("long", f"can't be compiled: {'x' * 300}..."),
        ("x" * 262_145, "has 262145 characters; at most 262144 are allowed"),
        ("good \ud800", ""),
    ],
)
async def test_a_grammar_passes_or_is_refused_with_the_reason(kept: Grammars, text: str, words: str) -> None:
    assert await verdict(kept, text) == words


async def test_a_verdict_is_kept_and_another_kind_is_another_grammar(kept: Grammars) -> None:
    assert await verdict(kept, "calls a") == await verdict(kept, "calls a") != await verdict(kept, "calls b")
    with pytest.raises(RequestError, match="f: this choice can't"):
        await kept.check("choice", "calls a", lambda: "f")


async def test_the_least_recently_used_verdict_is_forgotten(own: Callable[..., Grammars]) -> None:
    grammars = own(remembered=2)
    first, second = [await verdict(grammars, f"calls {name}") for name in "ab"]
    assert await verdict(grammars, "calls a") == first
    await verdict(grammars, "calls c")
    assert await verdict(grammars, "calls a") == first
    assert await verdict(grammars, "calls b") != second


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("slow", f"takes more than {CPU_S} s to compile (grammar_compile_cpu_s); simplify it"),
        ("crash", "can't be compiled: the compiler crashes (SIGABRT)"),
    ],
)
async def test_a_grammar_that_ends_the_process_is_refused_and_the_next_one_passes(
    own: Callable[..., Grammars], text: str, words: str
) -> None:
    grammars = own()
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPROF})
    try:
        ended, then = await asyncio.gather(verdict(grammars, text), verdict(grammars, "good"))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    assert (ended, then) == (words, "")
    assert await verdict(grammars, text) == words


@pytest.mark.parametrize("text", ["asleep", "killed"])
async def test_a_grammar_without_a_verdict_is_a_503_and_is_tried_again(
    own: Callable[..., Grammars], text: str
) -> None:
    grammars = own()
    assert await verdict(grammars, "good") == ""
    grammars._wait_s = 0.05 if text == "asleep" else LIMIT_S
    assert await verdict(grammars, text) == AWAY
    grammars._wait_s = LIMIT_S
    assert await verdict(grammars, "good again") == ""
    assert (await verdict(grammars, "calls")).startswith("can't be compiled: call 2 of")


async def test_a_process_that_does_not_start_is_a_503(own: Callable[..., Grammars]) -> None:
    assert await verdict(own(unmade), "good") == AWAY


async def test_a_client_that_leaves_takes_no_verdict_from_the_next(own: Callable[..., Grammars]) -> None:
    grammars = own()
    leaves = asyncio.ensure_future(verdict(grammars, "wrong"))
    await asyncio.sleep(0)
    leaves.cancel()
    assert await verdict(grammars, "good") == ""


PARENT = """
import asyncio
from serve_app.engine.grammars import Grammars
from tests.serve_app.engine.test_grammars import played, verdict
grammars = Grammars(played, 600.0)
if __name__ == "__main__":
    print(asyncio.run(verdict(grammars, "calls")), flush=True)
    asyncio.run(verdict(grammars, "told"))
"""


def test_the_process_ends_when_its_engine_is_killed() -> None:
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout
        said = parent.stdout.readline()
        child = os.pidfd_open(int(said.split()[-1]))
        try:
            assert parent.stdout.readline() == "at work\n"
            parent.kill()
            assert select.select([child], [], [], LIMIT_S)[0], "the process outlives its engine"
        finally:
            os.close(child)


# The body.

SCHEMA = {"type": "json_schema"}


@pytest.mark.parametrize(
    ("body", "kind", "field"),
    [
        ({"response_format": SCHEMA, "tools": [{}]}, "json", "response_format"),
        ({"response_format": {"type": "structural_tag"}}, "structural_tag", "response_format"),
        ({"response_format": {"type": "text"}, "text": {"format": SCHEMA}}, "json", "text.format"),
        ({"output_config": {"format": SCHEMA}}, "json", "output_config.format"),
        ({"structured_outputs": {"regex": "a"}, "tools": [{}]}, "regex", "structured_outputs.regex"),
        ({"tools": [{}], "response_format": []}, "json", "tools"),
        ({}, "json", "structured_outputs.json"),
    ],
)
def test_a_refusal_names_the_field_that_states_the_grammar(
    body: dict[str, object], kind: str, field: str
) -> None:
    assert field_of(json.dumps(body).encode(), kind) == field
    assert field_of(b"{", kind) == f"structured_outputs.{kind}"
