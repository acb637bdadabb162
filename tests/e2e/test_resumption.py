"""A stream that goes on from the tokens of a broken one, on the real engine, is the whole stream."""

import json

import pytest

from serve_app.api.protocol import JSON
from tests.e2e.service import Service

SCRIPT = """
import asyncio, json, sys
import ray
from ray import serve
from serve_app.ingress.resume import Splice
from serve_app.wire.frame import unpack
from serve_app.wire.request import RelayRequest

# Tokens that are produced faster than they are read travel together: a short answer may have no seam.
TRIES = 20

ray.init(address="auto", log_to_driver=False)
handle = serve.get_deployment_handle("Engine:demo", "llm").options(
    method_name="relay", stream=True, _by_reference=False,
    request_serialization="pickle", response_serialization="noop",
)
HEADERS = [(b"content-type", b"application/json")]

async def ask(path, body, **resumed):
    messages = handle.remote(RelayRequest("POST", path, b"", HEADERS, body, **resumed))
    pieces = [unpack(message) async for message in messages]
    bodies = [piece.body for piece in pieces]
    resume = pieces[0].head.resume
    if not resume:
        return "", [], b"".join(bodies)
    return resume, [piece.token_ids for piece in pieces], bodies

async def main():
    results = []
    for case in json.load(sys.stdin):
        path, body = case["path"], json.dumps(case["body"]).encode()
        for _ in range(TRIES):
            resume, ids, bodies = await ask(path, body)
            if not case["resume"] or (resume and len(bodies) > 2):
                break
        whole = b"".join(bodies) if resume else bodies
        result = {"resume": resume, "whole": whole.decode(), "spliced": []}
        results.append(result)
        if resume:
            for count in range(1, len(bodies)):
                kept = b"".join(ids[:count]) if resume == "tokens" else b""
                sent = b"".join(bodies[:count])
                if b"[DONE]" in sent:
                    break
                _, _, others = await ask(path, body, resumes=True, token_ids=kept)
                splice = Splice(sent)
                result["spliced"].append((sent + b"".join(map(splice.rest, others))).decode())
    print(json.dumps(results))

asyncio.run(main())
"""

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
GREEDY: JSON = {"model": "demo", "stream": True, "temperature": 0, "stream_options": {"include_usage": True}}
SUM = [{"role": "user", "content": "What is 23+18?"}]


def told(stream: str) -> tuple[str, str | None, JSON]:
    """Return the text of a stream, its finish reason and its usage."""
    *events, done = [line.removeprefix("data: ") for line in stream.split("\n\n") if line]
    assert done == "[DONE]"
    read: list[JSON] = [json.loads(event) for event in events]
    assert len({(event["id"], event["created"]) for event in read}) == 1
    choices = [choice for event in read for choice in event["choices"]]
    text = "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)
    reasons = [choice["finish_reason"] for choice in choices if choice.get("finish_reason")]
    assert len(reasons) == 1
    usage: JSON = read[-1]["usage"]
    return text, reasons[0], usage


CASES: dict[str, tuple[str, JSON, str]] = {
    "to the limit": (COMPLETIONS, {"prompt": "once", "max_tokens": 12, "ignore_eos": True}, "tokens"),
    "to its own end": (CHAT, {"messages": SUM, "max_tokens": 32}, "tokens"),
    "to a stop string": (
        COMPLETIONS,
        {"prompt": "What is 10+17?", "max_tokens": 64, "ignore_eos": True, "stop": ["6679"]},
        "tokens",
    ),
    "with a shortest length": (
        COMPLETIONS,
        {"prompt": "What is 4+3?", "max_tokens": 12, "min_tokens": 8},
        "tokens",
    ),
    "with a repetition penalty": (
        COMPLETIONS,
        {"prompt": "x", "max_tokens": 12, "repetition_penalty": 1.2, "ignore_eos": True},
        "tokens",
    ),
    "with a presence penalty": (
        COMPLETIONS,
        {"prompt": "x", "max_tokens": 12, "presence_penalty": 1, "ignore_eos": True},
        "again",
    ),
    "with a seed": (
        COMPLETIONS,
        {"prompt": "x", "max_tokens": 12, "temperature": 1, "seed": 7, "ignore_eos": True},
        "again",
    ),
    "two texts": (
        COMPLETIONS,
        {"prompt": "x", "max_tokens": 4, "n": 2, "temperature": 1, "ignore_eos": True},
        "",
    ),
}


@pytest.fixture(scope="module")
def results(service: Service) -> dict[str, JSON]:
    asked = [{"path": path, "body": GREEDY | body, "resume": resume} for path, body, resume in CASES.values()]
    return dict(zip(CASES, service.run_python(SCRIPT, asked), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_a_stream_that_broke_anywhere_is_whole(name: str, results: dict[str, JSON]) -> None:
    result = results[name]
    assert result["resume"] == CASES[name][2]
    if not result["resume"]:
        return
    *undisturbed, usage = told(result["whole"])
    assert result["spliced"]
    for spliced in result["spliced"]:
        *text_and_reason, counted = told(spliced)
        assert text_and_reason == undisturbed
        if name == "to a stop string":
            # vLLM counts the tokens that came together with its end: the more, the busier the machine.
            assert 0 < counted["completion_tokens"] <= CASES[name][1]["max_tokens"]
        else:
            assert counted["completion_tokens"] == usage["completion_tokens"]
        assert counted["prompt_tokens"] == usage["prompt_tokens"]
