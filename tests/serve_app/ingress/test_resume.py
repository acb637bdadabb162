"""A stream that broke, told on from another engine: the client gets the text once, and as one stream."""

import json
from array import array
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.api.protocol import JSON
from serve_app.ingress.body import BodyBudget
from serve_app.ingress.context import RequestContext
from serve_app.ingress.resume import ResumableStream, UnresumableError
from serve_app.wire.frame import DONE, Piece, ResumeMode, to_ids
from serve_app.wire.request import RelayRequest


def event(body: object) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def chunk(delta: JSON, finish: str | None = None, id: str = "a", created: int = 1) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return event({"id": id, "created": created, "model": "demo", "choices": [choice]})


def text(value: str, finish: str | None = None, id: str = "a", created: int = 1) -> bytes:
    choice = {"index": 0, "text": value, "finish_reason": finish}
    return event({"id": id, "created": created, "model": "demo", "choices": [choice]})


def usage(tokens: int, id: str = "a", created: int = 1) -> bytes:
    return event({"id": id, "created": created, "choices": [], "usage": {"completion_tokens": tokens}})


def told(data: bytes) -> list[JSON]:
    """Return the events of a stream; `{}` is its end."""
    lines = [line.removeprefix(b"data: ") for line in data.split(b"\n\n") if line]
    return [{} if line == b"[DONE]" else json.loads(line) for line in lines]


def answer(data: bytes) -> str:
    choices = [choice for each in told(data) for choice in each.get("choices", ())]
    return "".join(choice.get("text", choice.get("delta", {}).get("content", "")) for choice in choices)


def resumable(resume: ResumeMode = "tokens", budget: BodyBudget | None = None) -> ResumableStream:
    return ResumableStream(resume, RequestContext({}, budget or BodyBudget(1 << 30)).body)


def spliced(sent: bytes) -> Callable[[bytes], bytes]:
    """Return what gives the client its part of another engine's stream, behind what was sent."""
    stream = resumable("again")
    stream.add(piece(sent))
    stream.rest_of(request())
    stream.go_on("again")
    return lambda body: stream.add(piece(body))


# Splicing


def test_the_rest_follows_and_nothing_comes_twice() -> None:
    splice = spliced(chunk({"role": "assistant", "content": ""}) + chunk({"content": "Hel"}))
    rest = splice(chunk({"role": "assistant", "content": ""}, id="b", created=9))
    assert rest == b""
    rest = splice(chunk({"content": "Hello"}, id="b", created=9) + chunk({"content": "!"}, "stop"))
    rest += splice(usage(3, id="b") + DONE)
    first, second, third, end = told(rest)
    assert first["choices"][0]["delta"] == {"content": "lo"}
    assert second["choices"][0] == {"index": 0, "delta": {"content": "!"}, "finish_reason": "stop"}
    assert third["usage"] == {"completion_tokens": 3}
    assert end == {}
    assert {(each["id"], each["created"]) for each in (first, second, third)} == {("a", 1)}


def test_reasoning_goes_on_like_content() -> None:
    splice = spliced(chunk({"reasoning": "so"}))
    rest = splice(chunk({"reasoning": "so it"}) + chunk({"content": "4"}, "stop"))
    assert [each["choices"][0]["delta"] for each in told(rest)] == [{"reasoning": " it"}, {"content": "4"}]


def test_the_end_alone_may_be_what_is_missing() -> None:
    splice = spliced(text("ab") + text("c", "length"))
    assert (
        splice(text("ab") + text("c", "length") + usage(3, id="b") + DONE)
        == usage(3).replace(b", ", b",").replace(b'": ', b'":') + DONE
    )


def test_a_usage_is_not_sent_twice() -> None:
    splice = spliced(text("a", "length") + usage(1))
    assert splice(text("a", "length") + usage(1) + DONE) == DONE


def test_an_answer_that_ends_where_the_old_one_broke_still_says_why() -> None:
    splice = spliced(text("abc"))
    (last,) = told(splice(text("abc", "length")))
    assert last["choices"][0] == {"index": 0, "text": "", "finish_reason": "length"}


def test_an_error_of_the_other_engine_comes_through() -> None:
    assert told(spliced(text("a"))(event({"error": {"code": 500}}))) == [{"error": {"code": 500}}]


def test_an_error_of_the_other_engine_ends_the_stream_however_short_its_text_is() -> None:
    splice = spliced(text("abc"))
    rest = splice(text("a")) + splice(event({"error": {"code": 400}}) + DONE)
    assert told(rest) == [{"error": {"code": 400}}, {}]


@pytest.mark.parametrize("other", [text("ax"), text("x"), text("a", "stop"), text("a") + DONE])
def test_another_text_is_not_passed_on(other: bytes) -> None:
    splice = spliced(text("abc"))
    with pytest.raises(UnresumableError, match="text"):
        splice(other)


@pytest.mark.parametrize(
    "sent",
    [
        text("a") + DONE,
        event({"error": {"code": 400}}),
        text("a")[:-1],
        chunk({"tool_calls": [{"index": 0}]}),
    ],
)
def test_some_streams_have_no_rest(sent: bytes) -> None:
    with pytest.raises(UnresumableError):
        spliced(sent)


@given(st.text(max_size=40), st.data())
def test_the_client_gets_the_text_wherever_it_broke_and_however_it_is_cut(
    whole: str, data: st.DataObject
) -> None:
    def cut(value: str) -> list[bytes]:
        places = sorted(data.draw(st.lists(st.integers(0, len(value)), max_size=5)))
        ends = [*places, len(value)]
        return [text(value[start:end]) for start, end in zip([0, *places], ends, strict=True)]

    sent = b"".join(cut(whole[: data.draw(st.integers(0, len(whole)))]))
    splice = spliced(sent)
    rest = b"".join(splice(piece) for piece in [*cut(whole), text("", "length"), DONE])
    assert answer(sent + rest) == whole
    assert [each.get("choices", [{}])[0].get("finish_reason") for each in told(rest)[-2:]] == ["length", None]


# Pieces that are kept


def request(**body: Any) -> RelayRequest:
    return RelayRequest("POST", "/v1/completions", b"", [], json.dumps({"prompt": "x"} | body).encode())


def ids_of(*token_ids: int) -> bytes:
    return array("I", token_ids).tobytes()


def piece(body: bytes, token_ids: bytes = b"") -> Piece:
    return Piece(body=body, token_ids=token_ids)


def test_tokens_travel_beside_the_text() -> None:
    sent = resumable()
    for token_ids, body in ((ids_of(1, 2), text("a")), (b"", text("b")), (ids_of(70_000), text("c"))):
        assert sent.add(piece(body, token_ids)) == body
    again = sent.rest_of(request())
    assert again.resumes
    assert to_ids(again.token_ids) == [1, 2, 70_000]
    sent.go_on("tokens")
    assert answer(sent.add(piece(text("abcd")))) == "d"


def test_a_text_drawn_with_a_seed_is_drawn_again_from_the_start() -> None:
    sent = resumable("again")
    sent.add(piece(text("a")))
    assert sent.rest_of(request(seed=1)).token_ids == b""


def test_it_can_break_again() -> None:
    sent = resumable()
    sent.add(piece(text("a"), ids_of(1)))
    sent.rest_of(request())
    sent.go_on("tokens")
    told = [
        sent.add(piece(text("ab", id="b"), ids_of(1, 2))),
        sent.add(piece(text("c", id="b"), ids_of(3))),
    ]
    assert list(map(answer, told)) == ["b", "c"]
    assert to_ids(sent.rest_of(request()).token_ids) == [1, 2, 3]
    sent.go_on("tokens")
    assert answer(sent.add(piece(text("abcd", id="c")))) == "d"


@pytest.mark.parametrize(
    "body",
    [
        {"n": 2},
        {"prompt": ["a", "b"]},
        {"prompt": [[1], [2]]},
        {"logprobs": 1},
        {"tools": [{}]},
        {"echo": True},
        {"return_token_ids": True},
    ],
)
def test_an_answer_that_is_not_one_text_does_not_go_on(body: JSON) -> None:
    sent = resumable()
    with pytest.raises(UnresumableError):
        sent.rest_of(request(**body))


@pytest.mark.parametrize("prompt", ["a", ["a"], [1, 2], [[1, 2]]])
def test_one_prompt_has_many_shapes(prompt: object) -> None:
    sent = resumable()
    sent.add(piece(text("a")))
    assert sent.rest_of(request(prompt=prompt)).resumes


def test_parameters_may_forbid_it() -> None:
    with pytest.raises(UnresumableError, match="parameters"):
        resumable("").rest_of(request())


def test_the_kept_pieces_are_bounded() -> None:
    sent = resumable()
    for _ in range(3):
        sent.add(piece(b"x" * (1 << 19)))
    with pytest.raises(UnresumableError, match="long"):
        sent.rest_of(request())


def test_comments_between_events_are_passed_over() -> None:
    splice = spliced(b": keep-alive\n\n" + text("a") + b": keep-alive\n\n")
    assert answer(splice(b": keep-alive\n\n" + text("ab"))) == "b"


@pytest.mark.parametrize("value", [None, False, [], {}])
def test_a_field_that_asks_for_nothing_does_not_keep_a_stream_from_going_on(value: object) -> None:
    sent = resumable()
    sent.add(piece(text("a")))
    assert sent.rest_of(request(logprobs=value, tools=value)).resumes


def test_no_logprobs_beside_the_token_itself_are_logprobs_too() -> None:
    sent = resumable()
    sent.add(piece(text("a")))
    with pytest.raises(UnresumableError, match="logprobs"):
        sent.rest_of(request(logprobs=0))
