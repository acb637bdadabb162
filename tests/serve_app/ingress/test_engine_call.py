"""Answers to a client while the Engines behind the Ingress die, one after the other."""

import asyncio
import json
from array import array
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from ray import ActorID
from ray.exceptions import ActorDiedError, ActorUnavailableError
from ray.serve.handle import DeploymentResponseGenerator
from starlette.types import Message, Send

from serve_app.api.errors import RequestError, engine_failed
from serve_app.ingress.body import BodyBudget
from serve_app.ingress.context import RequestContext, context_of
from serve_app.ingress.engine_call import Attempt, EngineCall, EngineResponse
from serve_app.ingress.replica_choice import ReplicaCharge, ReplicaLoad
from serve_app.wire.frame import DONE, KEEPALIVE_S, Head, ResumeMode, to_ids
from serve_app.wire.request import RelayRequest
from serve_app.wire.usage import RequestUsage, Tokens
from tests.batcher.virtual import blocked, now, virtual
from tests.serve_app.answers import LOST, message, refused

PLAIN = [(b"content-type", b"application/json")]
STREAM = [(b"content-type", b"text/event-stream")]
USAGE = RequestUsage(Tokens(3, 0, 4), engine_s=0.5)
ANSWER = message(head=Head(200, PLAIN), body=b'{"text": "abc"}', usage=USAGE)
FULL = refused(RequestError(429, "rate_limit_error", "full", retry_after_s=2))
STOPS = refused(engine_failed())
DEAD = ActorDiedError()
GONE = asyncio.CancelledError()
"""The error of a call whose replica Serve takes away."""

AWAY = ActorUnavailableError("Actor is unavailable.", ActorID.nil().binary())
CUT, BROKEN, ENDED, WRONG, ARGUMENT = (
    grpc.aio.AioRpcError(status, grpc.aio.Metadata(), grpc.aio.Metadata())
    for status in (
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.INVALID_ARGUMENT,
    )
)
SILENT = TimeoutError("never")
"""Stands for no message, until the call is given up."""

Script = list[bytes | BaseException]


class Answer(DeploymentResponseGenerator[bytes]):
    """The result of a handle: the messages of a script; an exception in it is raised."""

    def __init__(self, script: Script) -> None:
        self.left = False
        self._given_up = asyncio.Event()
        self._script = iter(script)

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        await asyncio.sleep(0)
        for each in self._script:
            if each is SILENT:
                await self._given_up.wait()
                raise asyncio.CancelledError
            if isinstance(each, BaseException):
                raise each
            return each
        raise StopAsyncIteration

    def cancel(self) -> None:
        self.left = True
        self._given_up.set()


async def served() -> bool:
    return True


@dataclass
class Engines:
    """The replicas that one request meets, in this order; the last one answers all that follow.

    Attributes:
        actors: Their ids, the last one for all that follow; none: they aren't known.
        load: The load of the replica that has the request.
        taken: Whether a replica takes the request.
        times: The times at which they were asked.
    """

    scripts: list[Script]
    actors: str = ""
    asked: list[RelayRequest] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    load: ReplicaLoad = field(default_factory=ReplicaLoad)
    taken: bool = True
    times: list[float] = field(default_factory=list)

    def ask(self, request: RelayRequest) -> Attempt:
        assert isinstance(request.charge, ReplicaCharge)
        assert self.load.tokens == 0, "an earlier try is still charged"
        assert request.charge.met == {str(number) for number in range(len(self.asked))}
        request.charge.met.add(str(len(self.asked)))
        request.charge.put(self.load, 1, None)
        result: Any = Answer(self.scripts[min(len(self.asked), len(self.scripts) - 1)])
        if self.actors:
            actor = self.actors[min(len(self.asked), len(self.actors) - 1)]
            result._replica_result = SimpleNamespace(_actor_id=SimpleNamespace(hex=lambda: actor))
        if not self.taken:
            result._replica_result = None
        self.answers.append(result)
        self.asked.append(request)
        self.times.append(now())
        return Attempt(result, served)


@dataclass
class Reply:
    """The answer that the client got."""

    status: int = 0
    headers: dict[bytes, bytes] = field(default_factory=dict)
    body: bytes = b""
    ended: bool = False
    usage: RequestUsage | None = None

    async def take(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = dict(message["headers"])
            return
        assert not self.ended
        self.body += message["body"]
        self.ended = not message.get("more_body", False)

    @property
    def events(self) -> list[Any]:
        lines = [line.removeprefix(b"data: ") for line in self.body.split(b"\n\n") if line]
        return [line.decode() if line == b"[DONE]" else json.loads(line) for line in lines]

    @property
    def text(self) -> str:
        choices = [
            choice for event in self.events if event != "[DONE]" for choice in event.get("choices", ())
        ]
        return "".join(choice["text"] for choice in choices)


def scope_of() -> dict[str, Any]:
    """Return the scope of a request that has its context."""
    scope: dict[str, Any] = {"type": "http"}
    scope["state"] = {"context": RequestContext(scope, BodyBudget(1 << 30))}
    return scope


async def no_body() -> Message:
    raise AssertionError("the body was read before")


async def reply(
    engines: Engines, take: Send | None = None, died: Callable[[], None] | None = None, **body: Any
) -> Reply:
    request = RelayRequest("POST", "/v1/completions", b"", [], json.dumps({"prompt": "x"} | body).encode())
    received = Reply()
    scope = scope_of()
    response = EngineResponse(EngineCall(engines.ask, request, died=died))
    await response(scope, no_body, take or received.take)
    received.usage = context_of(scope).usage
    assert take is not None or received.ended
    assert all(answer.left for answer in engines.answers), "no call is left running"
    assert engines.load.tokens == 0, "no call is left charged"
    return received


# Before anything was sent


@pytest.mark.parametrize(
    "failure",
    [DEAD, AWAY, CUT, BROKEN, LOST, STOPS, GONE, ENDED],
    ids=["died", "away", "cut", "broken", "lost", "stops", "gone", "ended"],
)
@virtual
async def test_another_engine_is_asked_for_the_same(failure: bytes | Exception) -> None:
    engines = Engines([[failure], [ANSWER]])
    received = await reply(engines)
    assert (received.status, received.body) == (200, b'{"text": "abc"}')
    assert received.usage == USAGE
    assert engines.asked[0] == engines.asked[1]


@pytest.mark.parametrize(
    ("script", "calls"),
    [
        ([DEAD], 1),
        ([message(head=Head(200, STREAM), body=b"data: a\n\n"), CUT], 1),
        # The replica lives, and writes the row itself; or the engine never had the request.
        ([LOST], 0),
        ([STOPS], 0),
        ([GONE], 0),
    ],
    ids=["died", "died in a stream", "its engine died", "stops", "gone"],
)
@virtual
async def test_a_call_whose_engine_s_process_died_is_told_of(script: Script, calls: int) -> None:
    died: list[None] = []
    await reply(Engines([script, [ANSWER]]), died=lambda: died.append(None))
    assert len(died) == calls


@pytest.mark.parametrize("failure", [STOPS, GONE, ENDED], ids=["stops", "gone", "ended"])
@virtual
async def test_engines_that_stop_are_no_loss_and_tries_are_bounded(
    failure: bytes | Exception,
) -> None:
    engines = Engines([[failure]])
    received = await reply(engines)
    assert received.status == 503
    assert len(engines.asked) == 5
    # The pauses double, and the spread of each is half of it: many requests may have lost the same engine.
    shares = [
        (after - before) / (0.15 * 2**number)
        for number, (before, after) in enumerate(pairwise(engines.times))
    ]
    assert 0.5 <= min(shares) < max(shares) - 1e-4 <= 1.5


@pytest.mark.parametrize(
    "failure", [DEAD, AWAY, CUT, BROKEN, LOST], ids=["died", "away", "cut", "broken", "lost"]
)
@virtual
async def test_a_request_survives_two_engines_and_no_third(failure: bytes | Exception) -> None:
    surviving = Engines([[STOPS], [failure], [STOPS], [failure], [STOPS], [ANSWER]])
    assert (await reply(surviving)).status == 200
    engines = Engines([[STOPS], [failure], [failure], [failure], [ANSWER]])
    received = await reply(engines)
    assert received.status == 500
    assert received.headers[b"x-should-retry"] == b"false"
    assert "3 engines failed one after the other" in json.loads(received.body)["error"]["message"]
    assert len(engines.asked) == 4


@pytest.mark.parametrize(("taken", "status", "asked"), [(True, 500, 3), (False, 503, 5)])
@virtual
async def test_a_silent_engine_is_lost_with_a_request_that_it_has_taken(
    taken: bool, status: int, asked: int
) -> None:
    engines = Engines([[SILENT]], taken=taken)
    assert (await reply(engines)).status == status
    assert len(engines.asked) == asked


@pytest.mark.parametrize(
    "error",
    [
        RequestError(503, "service_unavailable", "The quotas have not answered.", retry_after_s=2),
        RequestError(503, "service_unavailable", "Grammars can't be checked now.", retry_after_s=2),
    ],
    ids=["quotas", "grammars"],
)
@virtual
async def test_a_503_that_no_other_engine_can_better_is_not_tried_again(error: RequestError) -> None:
    engines = Engines([[refused(error)], [ANSWER]])
    received = await reply(engines)
    assert (received.status, received.headers[b"retry-after"]) == (503, b"2")
    assert len(engines.asked) == 1


@virtual
async def test_an_engine_that_dies_refuses_for_a_while_and_its_loss_is_not_forgotten() -> None:
    """With one replica, or since the dying one has the shortest queue."""
    scripts: list[Script] = [[DEAD], [STOPS], [STOPS]]
    engines = Engines([*scripts, *scripts, [DEAD], [ANSWER]])
    received = await reply(engines)
    assert (received.status, len(engines.asked)) == (500, 7)
    assert received.headers[b"x-should-retry"] == b"false"
    assert (await reply(Engines([*scripts, *scripts, [ANSWER]]))).status == 200


@virtual
async def test_the_tries_of_one_engine_that_is_lost_each_time_are_bounded() -> None:
    engines = Engines([[LOST]], actors="a")
    assert (await reply(engines)).status == 503
    assert len(engines.asked) == 5


@virtual
async def test_an_engine_that_takes_a_request_again_while_it_ends_is_lost_once() -> None:
    dying: Script = [DEAD]
    assert (await reply(Engines([*[dying] * 4, [ANSWER]], actors="aabac"))).status == 200
    engines = Engines([dying], actors="aababc")
    assert (await reply(engines)).status == 500
    assert len(engines.asked) == 6


@virtual
async def test_the_last_refusal_is_the_answer() -> None:
    received = await reply(Engines([[STOPS]]))
    assert received.status == 503
    assert json.loads(received.body)["error"]["type"] == "service_unavailable"


@pytest.mark.parametrize(
    "failure",
    [RuntimeError("a bug"), WRONG, ARGUMENT, grpc.RpcError()],
    ids=["raised", "over gRPC", "an argument", "no status"],
)
@virtual
async def test_a_fault_is_not_tried_again(failure: Exception) -> None:
    engines = Engines([[failure], [ANSWER]])
    assert (await reply(engines)).status == 500
    assert len(engines.asked) == 1


@virtual
async def test_a_message_that_grpc_does_not_take_is_a_413() -> None:
    full = grpc.aio.AioRpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.aio.Metadata(), grpc.aio.Metadata())
    engines = Engines([[full], [ANSWER]])
    received = await reply(engines)
    assert received.status == 413
    assert "GRPC_MAX_MESSAGE_LENGTH" in json.loads(received.body)["error"]["message"]
    assert len(engines.asked) == 1


@virtual
async def test_a_full_queue_is_not_tried_elsewhere() -> None:
    engines = Engines([[FULL], [ANSWER]])
    assert (await reply(engines)).status == 429
    assert len(engines.asked) == 1


@virtual
async def test_an_engine_that_dies_behind_its_whole_answer_has_answered() -> None:
    engines = Engines([[ANSWER, DEAD], [FULL]])
    assert (await reply(engines)).status == 200


@virtual
async def test_nothing_is_tried_for_a_client_that_has_left() -> None:
    engines = Engines([[DEAD], [ANSWER]])
    task = asyncio.create_task(reply(engines))
    # The pause before the second try has begun.
    await asyncio.sleep(0.05)
    task.cancel()
    await asyncio.wait({task})
    await asyncio.sleep(1.5)
    assert len(engines.asked) == 1


@virtual
async def test_nothing_runs_before_the_answer_begins() -> None:
    engines = Engines([[ANSWER]])
    EngineResponse(EngineCall(engines.ask, RelayRequest("POST", "/generate", b"", [], b"{}")))
    await blocked()
    assert engines.asked == []


# Signs of life


class LateAnswer(Answer):
    """An answer that takes some keep-alives' time."""

    late_s = 3.5 * KEEPALIVE_S

    async def __anext__(self) -> bytes:
        late_s, self.late_s = self.late_s, 0.0
        await asyncio.sleep(late_s)
        return await super().__anext__()


@pytest.mark.parametrize(
    ("script", "status", "body"),
    [
        ([ANSWER], 200, {"text": "abc"}),
        ([FULL], 429, None),
        ([RuntimeError("a bug")], 500, None),
    ],
    ids=["answered", "refused", "a bug"],
)
@virtual
async def test_spaces_come_before_an_answer_that_takes_long(script: Script, status: int, body: Any) -> None:
    received = Reply()
    scope = scope_of()
    request = RelayRequest("POST", "/generate", b"", [], b"{}")
    response = EngineResponse(
        EngineCall(lambda _: Attempt(LateAnswer(script), served), request), keep_alive=True
    )
    await response(scope, no_body, received.take)
    assert received.ended
    assert received.status == 200
    assert context_of(scope).status == status
    assert received.body.startswith(b"   {")
    answer = json.loads(received.body)
    if body is None:
        assert answer["error"]["code"] == status
    else:
        assert answer == body
        assert context_of(scope).usage == USAGE


@pytest.mark.parametrize(("script", "status"), [([ANSWER], 200), ([FULL], 429)])
@virtual
async def test_an_answer_that_comes_soon_keeps_its_status(script: Script, status: int) -> None:
    engines = Engines([script])
    received = Reply()
    scope = scope_of()
    request = RelayRequest("POST", "/generate", b"", [], b"{}")
    await EngineResponse(EngineCall(engines.ask, request), keep_alive=True)(scope, no_body, received.take)
    assert received.status == status
    assert received.body.startswith(b"{")
    assert context_of(scope).status == 0


@virtual
async def test_a_client_that_leaves_ends_a_call_that_is_kept_alive() -> None:
    answer = LateAnswer([ANSWER])
    received = Reply()
    request = RelayRequest("POST", "/generate", b"", [], b"{}")
    response = EngineResponse(EngineCall(lambda _: Attempt(answer, served), request), keep_alive=True)
    task = asyncio.ensure_future(response(scope_of(), no_body, received.take))
    await asyncio.sleep(1.5 * KEEPALIVE_S)
    assert received.body == b" "
    task.cancel()
    await asyncio.wait([task])
    await blocked()
    assert answer.left
    assert asyncio.all_tasks() == {asyncio.current_task()}


# In the middle of a stream


def event(text: str, finish: str | None = None, id: str = "a") -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": finish}
    return f"data: {json.dumps({'id': id, 'created': 1, 'choices': [choice]})}\n\n".encode()


def stream(
    *pieces: tuple[list[int], bytes], resume: ResumeMode = "tokens", then: bytes | BaseException | None = None
) -> Script:
    script: Script = []
    for ids, body in pieces:
        head = None if script else Head(200, STREAM, resume)
        usage = USAGE if body.endswith(DONE) else None
        script.append(message(head=head, body=body, token_ids=array("I", ids).tobytes(), usage=usage))
    return script if then is None else [*script, then]


WHOLE = stream(([1, 2], event("ab", id="b")), ([3], event("c", "length", id="b") + DONE))


@pytest.mark.parametrize(
    "failure", [LOST, DEAD, AWAY, CUT, GONE], ids=["lost", "died", "away", "cut", "gone"]
)
@virtual
async def test_a_stream_goes_on_from_its_tokens(failure: bytes | Exception) -> None:
    engines = Engines([stream(([1], event("a")), then=failure), WHOLE])
    received = await reply(engines)
    assert received.text == "abc"
    assert [one if one == "[DONE]" else one["id"] for one in received.events] == ["a", "a", "a", "[DONE]"]
    assert engines.asked[1].resumes
    assert to_ids(engines.asked[1].token_ids) == [1]


@virtual
async def test_a_stream_goes_on_as_often_as_there_are_tries() -> None:
    engines = Engines(
        [stream(([1], event("a")), then=GONE), [STOPS], stream(([1, 2], event("ab")), then=LOST), WHOLE]
    )
    received = await reply(engines)
    assert received.text == "abc"
    assert [to_ids(request.token_ids) for request in engines.asked] == [[], [1], [1], [1, 2]]


@pytest.mark.parametrize("third", [[DEAD], stream(([1, 2], event("ab")), then=LOST)])
@virtual
async def test_a_stream_survives_two_engines_and_no_third(third: Script) -> None:
    dying: list[Script] = [stream(([1], event("a")), then=DEAD), [DEAD]]
    assert (await reply(Engines([*dying, WHOLE]))).text == "abc"
    engines = Engines([*dying, third, WHOLE])
    received = await reply(engines)
    assert received.events[-1]["error"]["code"] == 500
    assert "not tried again" in received.events[-1]["error"]["message"]
    assert b"[DONE]" not in received.body
    assert len(engines.asked) == 3


@virtual
async def test_a_stream_that_had_run_for_long_goes_on_after_any_kill() -> None:
    engines = Engines(
        [
            stream(([1], event("a")), then=DEAD),
            stream(([1, 2], event("ab")), then=LOST),
            stream(([1, 2, 3], event("abc")), then=DEAD),
            stream(([1, 2, 3, 4], event("abcd", "length") + DONE)),
        ]
    )
    received = Reply()

    async def take(message: Message) -> None:
        await received.take(message)
        # The client is slow to take what each engine sends.
        await asyncio.sleep(300.0)

    await reply(engines, take)
    assert received.text == "abcd"


@virtual
async def test_a_stream_with_a_seed_starts_again_and_the_client_sees_no_seam() -> None:
    again = stream(([], event("abc", "length", id="b") + DONE), resume="again")
    engines = Engines([stream(([], event("a")), resume="again", then=DEAD), again])
    received = await reply(engines, seed=1, temperature=1)
    assert received.text == "abc"
    assert engines.asked[1].token_ids == b""


@pytest.mark.parametrize(
    "script",
    [
        stream(([1], event("a", "length")), ([], DONE), then=AWAY),
        stream(([], event("a", "length")), ([], DONE), resume="", then=AWAY),
    ],
    ids=["may go on", "may not"],
)
@virtual
async def test_an_engine_that_dies_behind_the_last_event_has_answered(script: Script) -> None:
    engines = Engines([script, WHOLE])
    received = await reply(engines)
    assert received.text == "a"
    assert received.events[-1] == "[DONE]"
    assert len(engines.asked) == 1


@pytest.mark.parametrize(
    ("script", "body", "code"),
    [
        (stream(([], event("a")), resume="", then=DEAD), {}, 503),
        (stream(([1], event("a")), then=DEAD), {"n": 2}, 503),
        (stream(([1], event("a")), then=RuntimeError("a bug")), {}, 500),
    ],
    ids=["its parameters", "its body", "a bug"],
)
@virtual
async def test_a_stream_that_can_not_go_on_ends_with_an_error_and_not_as_if_complete(
    script: Script, body: dict[str, Any], code: int
) -> None:
    engines = Engines([script, WHOLE])
    received = await reply(engines, **body)
    *begun, last = received.events
    assert [one["choices"][0]["text"] for one in begun] == ["a"]
    assert last["error"]["code"] == code
    assert b"[DONE]" not in received.body
    assert len(engines.asked) == 1


@pytest.mark.parametrize("other", [[DEAD], [STOPS], [FULL], stream(([1], event("x")))])
@virtual
async def test_a_stream_with_which_no_other_engine_goes_on_ends_with_an_error(other: Script) -> None:
    received = await reply(Engines([stream(([1], event("a")), then=DEAD), other]))
    assert received.text == "a"
    assert received.events[-1]["error"]["code"] == (500 if other == [DEAD] else 503)
    assert b"[DONE]" not in received.body


@virtual
async def test_a_full_queue_ends_a_stream_too_and_is_not_tried_elsewhere() -> None:
    engines = Engines([stream(([1], event("a")), then=DEAD), [FULL], WHOLE])
    assert (await reply(engines)).events[-1]["error"]["code"] == 503
    assert len(engines.asked) == 2


@virtual
async def test_a_stream_leaves_its_usage_in_the_scope() -> None:
    assert (await reply(Engines([WHOLE]))).usage == USAGE


@virtual
async def test_a_stream_that_breaks_leaves_none() -> None:
    assert (await reply(Engines([stream(([], event("a")), resume="", then=DEAD)]))).usage is None


@virtual
async def test_a_stream_that_ends_without_its_usage_broke_off() -> None:
    received = await reply(Engines([stream(([1], event("a")))]))
    assert received.events[-1]["error"]["code"] == 503


@pytest.mark.parametrize("failure", [RuntimeError("too large"), DEAD], ids=["other", "dead"])
@virtual
async def test_an_answer_that_can_not_be_sent_is_no_failure_of_its_engine(
    failure: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    engines = Engines([WHOLE])

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            raise failure

    request = RelayRequest("POST", "/v1/completions", b"", [], b'{"prompt": "x"}')
    with pytest.raises(type(failure)):
        await EngineResponse(EngineCall(engines.ask, request))(scope_of(), no_body, send)
    assert len(engines.asked) == 1
    assert engines.answers[0].left
    assert not caplog.records
