"""Grammars are found wherever a request can hold them; hostile ones are refused, and harmless ones pass."""

import asyncio
import json
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import xgrammar

from serve_app.api.errors import RequestError
from serve_app.engine.grammars import (
    MAX_BYTES,
    MAX_CHARS,
    RETRY_S,
    Grammar,
    GrammarCheck,
    check_lengths,
    grammars_of,
)
from tests.progress import STILL_S

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
TEXT = json.dumps(SCHEMA)
TOOL = Grammar("json", TEXT, "tools[0]", compiles=False)
TAG = {"type": "structural_tag", "structures": [], "triggers": []}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
            Grammar("json", TEXT, "response_format"),
        ),
        (
            {"text": {"format": {"type": "json_schema", "schema": SCHEMA}}},
            Grammar("json", TEXT, "text.format"),
        ),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
            Grammar("json", TEXT, "output_config.format"),
        ),
        ({"response_format": TAG}, Grammar("structural_tag", json.dumps(TAG), "response_format")),
        ({"structured_outputs": {"json": SCHEMA}}, Grammar("json", TEXT, "structured_outputs.json")),
        ({"structured_outputs": {"json": TEXT}}, Grammar("json", TEXT, "structured_outputs.json")),
        ({"structured_outputs": {"regex": "a+"}}, Grammar("regex", "a+", "structured_outputs.regex")),
        (
            {"structured_outputs": {"choice": ["a", "b"]}},
            Grammar("choice", '["a", "b"]', "structured_outputs.choice"),
        ),
        (
            {"tools": [{"type": "function", "function": {"parameters": SCHEMA}}]},
            TOOL,
        ),
        (
            {"tools": [{"type": "function", "parameters": SCHEMA}]},
            TOOL,
        ),
        (
            {"tools": [{"name": "a", "input_schema": SCHEMA}]},
            TOOL,
        ),
    ],
)
def test_a_grammar_is_found_with_its_field(body: dict[str, Any], expected: Grammar) -> None:
    text = json.dumps(body)
    assert grammars_of(text.encode()) == [expected]
    (field, *_) = body
    escaped = f"\\u{ord(field[0]):04x}{field[1:]}"
    assert grammars_of(text.replace(field, escaped, 1).encode()) == [expected]


@pytest.mark.parametrize("more", [{"tool_choice": "required"}, {"tool_choice": {"type": "function"}}, {}])
def test_tools_are_compiled_together_where_an_answer_has_to_follow_them(more: dict[str, Any]) -> None:
    function = {"name": "a", "parameters": SCHEMA, "strict": not more}
    body = {"tools": [{"type": "function", "function": function}] * 2} | more
    *_, together = grammars_of(json.dumps(body).encode())
    assert together == Grammar("json", json.dumps({"anyOf": [SCHEMA, SCHEMA]}), "tools")


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b"[]",
        b"{",
        b'{"prompt": "tools"}',
        b'{"tools": 5, "response_format": [], "structured_outputs": "x", "text": {"format": 5}}',
        b'{"tools": [5, null, {}], "response_format": {"type": "json_object"}}',
        b'{"response_format": {"type": "json_schema", "json_schema": 5}}',
    ],
)
def test_other_bodies_have_none(body: bytes) -> None:
    assert grammars_of(body) == []


@pytest.mark.parametrize("other", ['"a\\u00e9"', "NaN", '"\\ud800"', "[1, 2]"])
def test_grammars_are_found_beside_any_other_value(other: str) -> None:
    body = f'{{"tools": [], "response_format": 1, "tools": [{{"parameters": {TEXT}}}], "x": {other}}}'
    assert grammars_of(body.encode()) == [TOOL]


# The check.

LIMIT_S = STILL_S
CPU_S = 0.25
COMPILE_S = 0.2
PATTERN = "^" + "(a|b|c|d|e){1,1000}" * 12 + "$"
HOSTILE = Grammar("json", json.dumps({"type": "string", "pattern": PATTERN}), "response_format")
HARMLESS = [
    Grammar("json", json.dumps({"type": "object", "properties": {"a": {"type": "string"}}}), "tools[0]"),
    Grammar("regex", "[a-z]+", "structured_outputs.regex"),
    Grammar("grammar", 'root ::= "a" | "b"', "structured_outputs.grammar"),
    Grammar("choice", '["a", "b"]', "structured_outputs.choice"),
    # Wrong ones too: vLLM may only look at them.
    Grammar("json", "5", "response_format"),
    Grammar("regex", "(", "structured_outputs.regex"),
]


SLOW_TO_COMPILE = Grammar(
    "json", json.dumps({"enum": [str(number) * 20 for number in range(3000)]}), "response_format"
)
"""It parses in 20 ms, and takes more than a second of CPU to compile for the 256 tokens below."""


def vocabulary() -> str:
    tokens = [bytes([number]) for number in range(256)]
    info = xgrammar.TokenizerInfo(tokens, vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[0])
    return str(info.serialize_json())


@pytest.fixture
async def grammars() -> AsyncIterator[GrammarCheck]:
    check = GrammarCheck(CPU_S, COMPILE_S, vocabulary(), LIMIT_S)
    yield check
    await check.stop()


async def test_a_harmless_grammar_passes(grammars: GrammarCheck) -> None:
    async with asyncio.timeout(LIMIT_S):
        await grammars.check(HARMLESS)


async def test_a_hostile_one_is_refused_with_its_field_and_the_next_one_passes(
    grammars: GrammarCheck,
) -> None:
    async with asyncio.timeout(LIMIT_S):
        await grammars.start()
        with pytest.raises(RequestError) as caught:
            await grammars.check([HOSTILE])
        assert (caught.value.status, caught.value.param) == (400, "response_format")
        assert "grammar_cpu_s" in caught.value.message
        await grammars.check(HARMLESS)


async def test_one_that_takes_long_to_compile_is_refused_with_the_limit(grammars: GrammarCheck) -> None:
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(RequestError, match=r"0\.2 s to compile") as caught:
            await grammars.check([SLOW_TO_COMPILE])
        assert (caught.value.status, caught.value.param) == (400, "response_format")
        # A tool's schema that no answer has to follow is not compiled.
        await grammars.check([SLOW_TO_COMPILE._replace(compiles=False)])


TUPLE = {"type": "array", "items": [{"type": "string"}]}


def stated(field: str, schema: object, *, compiles: bool = True) -> Grammar:
    return Grammar("json", json.dumps(schema), field, compiles)


@pytest.mark.parametrize(
    ("compiled", "others", "field", "reason"),
    [
        # The grammar that the request states.
        (
            stated("structured_outputs", {"properties": {"a": TUPLE}}),
            [stated("text.format", {"properties": {"a": TUPLE}})],
            "text.format",
            "text.format: this json can't be compiled: items must be a boolean or an object "
            "(at #/properties/a)",
        ),
        # A grammar that vLLM has made of several, of which one is wrong.
        (
            stated("structured_outputs", {"anyOf": [{"type": "string"}, TUPLE]}),
            [stated("tools[0]", {"type": "string"}), stated("tools[1]", TUPLE, compiles=False)],
            "tools[1]",
            "tools[1]: this json can't be compiled: items must be a boolean or an object",
        ),
        # A grammar that is unrelated to those of the request.
        (
            Grammar("grammar", "start: x", "structured_outputs"),
            [stated("tools[0]", {"type": "string"})],
            "structured_outputs",
            "structured_outputs: this grammar can't be compiled: Lark error",
        ),
    ],
)
async def test_a_grammar_that_the_engine_can_not_compile_is_refused_with_the_field_that_is_wrong(
    grammars: GrammarCheck, compiled: Grammar, others: list[Grammar], field: str, reason: str
) -> None:
    async with asyncio.timeout(LIMIT_S):
        # The grammars of the request are only looked at.
        await grammars.check(others)
        with pytest.raises(RequestError) as caught:
            await grammars.compile(compiled, others)
    assert (caught.value.status, caught.value.param) == (400, field)
    assert caught.value.message.startswith(reason)


async def test_a_grammar_that_the_engine_can_compile_passes_whatever_else_is_stated(
    grammars: GrammarCheck,
) -> None:
    async with asyncio.timeout(LIMIT_S):
        await grammars.compile(HARMLESS[0], [stated("tools[0]", TUPLE, compiles=False)])


async def test_without_a_vocabulary_grammars_are_only_parsed() -> None:
    check = GrammarCheck(CPU_S, COMPILE_S, wait_s=LIMIT_S)
    try:
        async with asyncio.timeout(LIMIT_S):
            await check.check([SLOW_TO_COMPILE])
            with pytest.raises(RequestError):
                await check.check([HOSTILE])
    finally:
        await check.stop()


async def test_a_refusal_ends_no_process(grammars: GrammarCheck) -> None:
    async with asyncio.timeout(LIMIT_S):
        await grammars.start()
        process = grammars.process
        with pytest.raises(RequestError):
            await grammars.check([HOSTILE])
        assert grammars.process is process


async def test_the_event_loop_goes_on_meanwhile(grammars: GrammarCheck) -> None:
    gaps: list[float] = []

    async def tick() -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(0.01)
            gaps.append(time.monotonic() - last)
            last = time.monotonic()

    await grammars.start()
    ticking = asyncio.ensure_future(tick())
    began = time.monotonic()
    with pytest.raises(RequestError):
        await grammars.check([HOSTILE])
    took = time.monotonic() - began
    ticking.cancel()
    # A parse on the loop would be one gap.
    assert max(gaps) < 0.5 * took


async def test_a_grammar_that_is_known_is_not_parsed_again(grammars: GrammarCheck) -> None:
    async with asyncio.timeout(LIMIT_S):
        assert grammars.unknown([HOSTILE])
        with pytest.raises(RequestError):
            await grammars.check([HOSTILE])
        assert not grammars.unknown([HOSTILE])
        assert grammars.unknown([HOSTILE, HARMLESS[0]])
        await grammars.stop()
        with pytest.raises(RequestError):
            await grammars.check([HOSTILE])
        assert grammars.process is None


def test_a_grammar_that_is_too_long_is_refused_unseen() -> None:
    check_lengths([*HARMLESS, HOSTILE])
    long = Grammar("regex", "a" * (MAX_CHARS + 1), "structured_outputs.regex")
    with pytest.raises(RequestError, match=f"at most {MAX_CHARS}") as caught:
        check_lengths([HARMLESS[0], long])
    assert (caught.value.status, caught.value.param) == (400, "structured_outputs.regex")


async def test_the_limit_holds_for_a_caller_that_blocks_signals(grammars: GrammarCheck) -> None:
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPROF})
    try:
        async with asyncio.timeout(LIMIT_S):
            with pytest.raises(RequestError):
                await grammars.check([HOSTILE])
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


async def test_a_check_that_is_cancelled_leaves_no_answer_for_the_next_one(grammars: GrammarCheck) -> None:
    async with asyncio.timeout(LIMIT_S):
        await grammars.start()
        check = asyncio.ensure_future(grammars.check(HARMLESS[:1]))
        # It has sent its grammar now, and waits for the answer.
        await asyncio.sleep(0)
        check.cancel()
        await asyncio.wait([check])
        with pytest.raises(RequestError):
            await grammars.check([HOSTILE])


async def test_a_grammar_that_was_not_checked_to_the_end_is_checked_again(grammars: GrammarCheck) -> None:
    async with asyncio.timeout(LIMIT_S):
        await grammars.start()
        assert grammars.process is not None
        # As when the machine has no memory left.
        grammars.process.kill()
        with pytest.raises(RequestError, match="the process that checks them ended") as caught:
            await grammars.check(HARMLESS[:1])
        assert (caught.value.status, caught.value.retry_after_s) == (503, RETRY_S)
        await grammars.check(HARMLESS[:1])


async def test_a_process_that_does_not_start_is_told_and_the_next_check_starts_another(
    grammars: GrammarCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with asyncio.timeout(LIMIT_S):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "executable", shutil.which("false"))
            with pytest.raises(RequestError, match="does not start") as caught:
                await grammars.check(HARMLESS[:1])
        assert (caught.value.status, caught.value.retry_after_s) == (503, RETRY_S)
        await grammars.check(HARMLESS[:1])


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"response_format": {"a": "%s"}}' % (b"x" * MAX_BYTES), "response_format"),
        (b'{"tools": [%s{}]}' % (b"{}," * (MAX_BYTES // 3)), "tools"),
        (b'{"text": "%s", "tools": ["%s"]}' % (b"x" * (MAX_BYTES // 2), b"x" * (MAX_BYTES // 2)), "tools"),
        (b'{"text": {}, "temperature": NaN, "prompt": "%s"}' % (b"x" * MAX_BYTES), None),
    ],
)
def test_fields_for_grammars_are_not_parsed_before_their_length_is_known(
    body: bytes, param: str | None
) -> None:
    with pytest.raises(RequestError, match=f"at most {MAX_BYTES} are allowed") as caught:
        grammars_of(body)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_a_long_prompt_beside_a_grammar_is_not_among_its_bytes() -> None:
    body = b'{"prompt": "%s", "structured_outputs": {"regex": "a+"}}' % (b"x" * MAX_BYTES)
    assert grammars_of(body) == [Grammar("regex", "a+", "structured_outputs.regex")]
