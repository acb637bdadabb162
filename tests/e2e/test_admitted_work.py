"""Sequences and tokens of KV cache that are admitted for a request are those that vLLM runs for it."""

import json
import sys
from typing import Any

import pytest

from tests.e2e.admitted_work import CASES, CONTEXT
from tests.progress import run

pytestmark = pytest.mark.long

SEQUENCES = {
    "prompt: list": 4,
    "prompt: tokens": 4,
    "prompt: list, n": 6,
    "n": 3,
    "n, stream": 3,
    "chat: n": 3,
    "chats": 3,
    "generate": 3,
    "generate: chats": 3,
    # One for each beam and token; the first token has one beam.
    "beams": 1 + 7 * 3,
    "beams: list": 2 * (1 + 7 * 3),
    "chat: beams": 1 + 7 * 3,
    **dict.fromkeys(("count_tokens", "tokenize", "tokenize: chat", "detokenize"), 0),
}
"""Sequences that vLLM runs for a request; one where not given."""

REFUSED = {
    **dict.fromkeys(("tokenize: long", "tokenize: huge", "chat: huge"), f"{CONTEXT} tokens"),
    "detokenize: long": f"at most {CONTEXT} token ids",
    "chats: n": "set `n` to 1",
}
"""Requests that are refused, by what their message says."""


@pytest.fixture(scope="module")
def results() -> Any:
    command = [sys.executable, "-m", "tests.e2e.admitted_work"]
    done = run(command)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", CASES)
def test_a_request_is_admitted_with_all_that_vllm_runs_for_it(results: Any, case: str) -> None:
    found = results[case]
    if case in REFUSED:
        # vLLM refuses it in its slot, which is given back.
        assert (found["status"], found["sequences"], found["left"]) == (400, 0, 0), found
        assert REFUSED[case] in found["text"], found
        return
    assert found["status"] == 200, found
    assert found["sequences"] == SEQUENCES.get(case, 1), found
    # At no moment did vLLM hold more than the batcher had let in.
    assert (found["beyond"], found["uncounted"]) == (0, 0), found
    # A request that ran alone reserved no more than it could need: its beams are fewer at first.
    assert found["peak_cost"] == found["peak_tokens"] or "beams" in case, found
    assert found["left"] == 0, found


@pytest.mark.parametrize("case", CASES)
def test_no_text_is_tokenized_outside_a_slot(results: Any, case: str) -> None:
    found = results[case]
    assert found["outside"] == 0, found
    if "huge" in case:
        assert found["tokenized"] == 0
