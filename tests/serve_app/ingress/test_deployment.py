"""The Ingress' own application, in front of engines that the test plays."""

import asyncio
import gzip
import json
import logging
from collections import Counter
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest
from ray.exceptions import ActorDiedError
from ray.serve.exceptions import BackPressureError

from serve_app.api.errors import RequestError
from serve_app.api.protocol import JSON
from serve_app.api.routes import MOVED, OPENAI
from serve_app.api.scheduling import Scheduling
from serve_app.auth.keys import hash_key
from serve_app.ingress.deployment import Ingress
from serve_app.ingress.status import Health, HealthReport, ModelState
from serve_app.settings.schema import parse
from serve_app.wire.frame import DONE, KEEPALIVE_S
from serve_app.wire.request import RelayRequest
from serve_app.wire.usage import RequestUsage, Tokens
from tests.batcher.virtual import blocked, now, virtual
from tests.serve_app.answers import END, complete, message, refused
from tests.serve_app.ingress.engine_doubles import (
    CHAT,
    LIMIT_S,
    PLAIN,
    STREAM,
    Answering,
    Call,
    Client,
    Engine,
    answer,
    application,
    check_error,
    echo,
    health,
)

__all__ = ["health"]

JSON_TYPE = {"content-type": "application/json"}


# Routing


async def test_a_request_goes_to_the_engine_of_its_model_and_its_answer_comes_back() -> None:
    engines = {
        "a": Engine(answer(complete(PLAIN, b"from a"))),
        "b": Engine(answer(message(head=PLAIN, body=b"from "), message(body=b"b"), END)),
    }
    async with Client(engines) as client:
        response = await client.post(CHAT, json={"model": "b", "messages": []})
    assert (response.status_code, response.content) == (200, b"from b")
    assert response.headers["x-mine"] == "1"
    assert engines["a"].requests == []
    (request,) = engines["b"].requests
    assert (request.method, request.path) == ("POST", CHAT)
    assert json.loads(request.body) == {"model": "b", "messages": []}


@pytest.mark.parametrize(
    ("path", "headers", "spaces"),
    [
        ("/generate", {"x-keep-alive": "1"}, True),
        ("/generate", {}, False),
        (CHAT, {"x-keep-alive": "1"}, False),
    ],
)
@virtual
async def test_a_call_that_asks_for_signs_of_life_gets_them(
    path: str, headers: dict[str, str], spaces: bool
) -> None:
    async def late(request: RelayRequest) -> AsyncGenerator[bytes, None]:
        await asyncio.sleep(1.5 * KEEPALIVE_S)
        yield complete(PLAIN, b'{"results": []}')

    async with Client({"a": Engine(late)}) as client:
        response = await client.post(path, json={"prompts": ["x"]}, headers=headers)
    assert response.json() == {"results": []}
    assert response.content.startswith(b" ") == spaces


@pytest.mark.parametrize("path", [CHAT, "/generate"])
async def test_an_unknown_model_is_answered_with_those_that_are_served(path: str) -> None:
    async with Client({"a": Engine(echo), "b": Engine(echo)}) as client:
        response = await client.post(path, json={"model": "c", "prompts": ["x"]})
        message = check_error(response, 404, "not_found_error", "model")
        assert "'c'" in message
        assert "served here: a, b" in message
        assert not any(engine.requests for engine in client.engines.values())


@pytest.mark.parametrize("path", [CHAT, "/generate"])
@pytest.mark.parametrize("body", [{"prompts": ["x"]}, {"prompts": ["x"], "model": None}])
async def test_the_model_has_to_be_named_where_several_are_served(path: str, body: object) -> None:
    async with Client({"a": Engine(echo), "b": Engine(echo)}) as client:
        message = check_error(await client.post(path, json=body), 400, "invalid_request_error", "model")
    assert "a, b" in message


@pytest.mark.parametrize("path", [CHAT, "/generate"])
async def test_the_model_may_be_left_out_where_one_is_served(path: str) -> None:
    async with Client() as client:
        assert (await client.post(path, json={"prompts": ["x"]})).status_code == 200


async def test_a_request_without_a_body_names_its_model_in_the_query() -> None:
    engines = {"a": Engine(echo), "b": Engine(echo)}
    async with Client(engines) as client:
        assert (await client.post("/v1/audio/transcriptions?model=b")).status_code == 200
        assert (await client.post("/v1/audio/transcriptions?model=c")).status_code == 404
    assert [request.query for request in engines["b"].requests] == [b"model=b"]


async def test_the_file_of_a_form_is_relayed_unread() -> None:
    async with Client() as client:
        files = {"file": ("a.wav", b"\xff\xfe{", "audio/wav")}
        assert (await client.post("/v1/audio/transcriptions", files=files)).status_code == 200
        assert b"\xff\xfe{" in client.engine.requests[0].body


async def test_the_model_of_a_form_decides_between_two() -> None:
    engines = {"a": Engine(echo), "b": Engine(echo)}
    async with Client(engines) as client:
        files = {"file": ("a.wav", b"\xff\xfe{", "audio/wav")}
        for path in ("/v1/audio/transcriptions", "/v1/audio/translations"):
            assert (await client.post(path, files=files, data={"model": "b"})).status_code == 200
            response = await client.post(f"{path}?model=a", files=files, data={"model": "c"})
            check_error(response, 404, "not_found_error", "model")
            response = await client.post(path, files=files)
            check_error(response, 400, "invalid_request_error", "model")
    assert (len(engines["a"].requests), len(engines["b"].requests)) == (0, 2)


async def test_embeddings_are_read_whatever_type_their_body_has() -> None:
    # curl sends another one unless it is told; a function answers all the same.
    engines = {"a": Engine(echo), "embed": Engine(echo)}
    async with Client(engines, max_prompts=2) as client:
        for type in ("application/x-www-form-urlencoded", "text/plain"):
            headers = {"content-type": type}
            body = b'{"input": "x", "model": "%s"}'
            assert (
                await client.post("/v1/embeddings", content=body % b"a", headers=headers)
            ).status_code == 200
            response = await client.post("/v1/embeddings", content=body % b"b", headers=headers)
            check_error(response, 404, "not_found_error", "model")
            response = await client.post(
                "/v1/embeddings", content=b'{"input": ["x", "x", "x"]}', headers=headers
            )
            check_error(response, 400, "invalid_request_error", "input")
    assert (len(engines["a"].requests), len(engines["embed"].requests)) == (2, 0)


async def test_json_is_read_however_its_type_is_written() -> None:
    async with Client() as client:
        response = await client.post(
            CHAT, content=b'{"n": 1000}', headers={"content-type": "Application/JSON"}
        )
        check_error(response, 400, "invalid_request_error", "n")


@pytest.mark.parametrize("path", OPENAI)
async def test_the_routes_of_openai_s_api_are_relayed(path: str) -> None:
    async with Client() as client:
        response = await client.post(f"{path}?x=1", json={})
        assert response.json()["path"] == MOVED.get(path, path)
        (request,) = client.engine.requests
        assert (request.method, request.query) == ("POST", b"x=1")


@pytest.mark.parametrize(
    "path",
    [
        "/sleep",
        "/wake_up",
        "/collective_rpc",
        "/metrics",
        "/v1//chat/completions",
        "/V1/chat/completions",
        "/v1/chat/completions%2F..%2F..%2Fsleep",
        "/v1/responses/abc/cancel",
    ],
)
async def test_no_other_route_is_relayed(path: str) -> None:
    async with Client() as client:
        for method in ("GET", "POST", "PUT", "DELETE"):
            assert (await client.request(method, path)).status_code in {404, 405}
        assert client.engine.requests == []


@pytest.mark.parametrize("path", [*OPENAI, "/generate", "/tokenize"])
async def test_a_byte_order_mark_before_the_body_is_taken(path: str) -> None:
    body = b'{"prompts": ["x"]}'
    async with Client() as client:
        response = await client.post(path, content=b"\xef\xbb\xbf" + body, headers=JSON_TYPE)
        assert response.status_code == 200
        assert client.engine.requests[0].body == body


@pytest.mark.parametrize("path", ["/v1/tokenize", "/tokenize", "/v1/detokenize", "/detokenize"])
async def test_tokenize_is_found_under_v1_and_beside_it(path: str) -> None:
    async with Client() as client:
        response = await client.post(path, json={"prompt": "x"})
        assert response.json()["path"] == path.removeprefix("/v1")


async def test_generate_is_relayed_to_the_engine_s_own_generate() -> None:
    async with Client() as client:
        body = b'{"prompts": ["x"], "task_id": "t"}'
        response = await client.post("/generate", content=body)
        assert response.json() == {"path": "/generate", "body": body.decode()}


async def test_hop_by_hop_headers_and_keys_stay_here_and_all_others_go_along() -> None:
    headers = {
        "connection": "keep-alive",
        "keep-alive": "timeout=5",
        "te": "trailers",
        "upgrade": "h2c",
        "transfer-encoding": "chunked",
        "authorization": "Bearer x",
        "x-api-key": "x",
        "cookie": "a=b",
        "x-request-id": "7",
    }
    async with Client() as client:
        await client.post(CHAT, content=b"{}", headers=headers)
        names = dict(client.engine.requests[0].headers)
    assert not {b"connection", b"keep-alive", b"te", b"upgrade", b"transfer-encoding", b"host"} & set(names)
    assert not {b"authorization", b"x-api-key", b"cookie"} & set(names)
    assert names[b"x-request-id"] == b"7"


async def test_bytes_cross_the_handle_as_they_are() -> None:
    async with Client() as client:
        options = client.engine.options_given[0]
    assert options["response_serialization"] == "noop"


# Functions


async def test_process_is_relayed_to_a_function() -> None:
    engines = {"a": Engine(echo), "rank": Engine(echo)}
    async with Client(engines) as client:
        response = await client.post("/process", content=b'{"records": [1]}')
        assert response.json() == {"path": "/process", "body": '{"records": [1]}'}
        assert (await client.post("/generate", json={"prompts": ["x"]})).status_code == 200
    assert len(engines["a"].requests) == len(engines["rank"].requests) == 1


async def test_embeddings_go_to_the_function_that_has_vectors() -> None:
    engines = {"a": Engine(echo), "embed": Engine(echo)}
    async with Client(engines) as client:
        assert (await client.post("/v1/embeddings", json={"input": "x"})).status_code == 200
        assert (await client.post("/v1/embeddings", json={"input": "x", "model": "a"})).status_code == 200
    assert len(engines["a"].requests) == len(engines["embed"].requests) == 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"prompts": ["x"], "model": "rank"}),
        (CHAT, {"model": "rank"}),
        ("/v1/embeddings", {"model": "rank"}),
        ("/process", {"records": ["x"], "model": "a"}),
    ],
)
async def test_a_model_of_the_wrong_kind_is_not_asked(path: str, body: object) -> None:
    async with Client({"a": Engine(echo), "rank": Engine(echo)}) as client:
        response = await client.post(path, json=body)
        assert "POST /" in check_error(response, 400, "invalid_request_error", "model")
        assert not any(engine.requests for engine in client.engines.values())


async def test_a_bad_field_of_process_is_refused_with_its_name() -> None:
    async with Client(Engine(echo), max_prompts=2) as client:
        for body, param in (
            ({"records": []}, "records"),
            ({"records": ["x"] * 3}, "records"),
            ({"records": ["x"], "tenant": 5}, "tenant"),
        ):
            check_error(await client.post("/process", json=body), 400, "invalid_request_error", param)
        assert client.engine.requests == []


# Scheduling


@pytest.mark.parametrize(
    ("path", "body"),
    [("/generate", {"prompts": ["x"]}), ("/process", {"records": ["x"], "model": "rank"})],
)
async def test_scheduling_comes_from_the_body_and_the_headers(path: str, body: dict[str, Any]) -> None:
    engines = {"a": Engine(echo), "rank": Engine(echo)}
    requests = engines["rank" if path == "/process" else "a"].requests
    async with Client(engines) as client:
        await client.post(path, json=body)
        fields = {"service_tier": "flex", "tenant": "body", "queue_timeout_s": 5}
        await client.post(path, json=body | fields)
        headers = {"X-Tenant": "header", "X-Queue-Timeout-Seconds": "2.5"}
        await client.post(path, json=body | fields, headers=headers)
        await client.post(path, json=body, headers={"authorization": "Bearer sk-secret"})
    assert [request.scheduling for request in requests] == [
        Scheduling(),
        Scheduling(1, "body", 5),
        Scheduling(1, "header", 2.5),
        Scheduling(0, "key-746b4ad1ca91", hashed=True),
    ]


async def test_a_service_tier_of_openai_is_read_and_goes_along() -> None:
    async with Client() as client:
        body = b'{"service_tier":  "flex", "tenant": 5}'
        assert (await client.post(CHAT, content=body, headers={"x-tenant": "me"})).status_code == 200
        await client.post("/v1/score", json={}, headers={"x-queue-timeout-seconds": "3"})
        flex, plain = client.engine.requests
        assert (flex.scheduling, flex.body) == (Scheduling(1, "me"), body)
        assert plain.scheduling == Scheduling(0, "default", 3)


async def test_a_name_that_vllm_does_not_know_is_translated() -> None:
    async with Client() as client:
        await client.post(CHAT, json={"service_tier": "fast", "messages": []})
        (request,) = client.engine.requests
        assert request.scheduling.priority == -1
        assert json.loads(request.body) == {"service_tier": "priority", "messages": []}
        # The rest is as it was.
        body = b'{"service_tier": "fast", "x": ' + b"9" * 4000 + b"}"
        assert (await client.post(CHAT, content=body)).status_code == 200
        assert b"9" * 4000 in client.engine.requests[1].body


@pytest.mark.parametrize("path", [CHAT, "/generate"])
async def test_a_wrong_service_tier_is_refused(path: str) -> None:
    async with Client() as client:
        for tier in ("best", 5):
            response = await client.post(path, json={"prompts": ["x"], "service_tier": tier})
            check_error(response, 400, "invalid_request_error", "service_tier")
        response = await client.post(path, json={"prompts": ["x"], "service_tier": None})
        assert response.status_code == 200


@pytest.mark.parametrize("path", [CHAT, "/generate"])
@pytest.mark.parametrize(("name", "value"), [("x-tenant", ""), ("x-queue-timeout-seconds", "soon")])
async def test_a_wrong_header_is_refused_with_its_name(path: str, name: str, value: str) -> None:
    async with Client() as client:
        response = await client.post(path, json={"prompts": ["x"]}, headers={name: value})
        assert name in check_error(response, 400, "invalid_request_error", name)
        assert client.engine.requests == []


# Bad input


@pytest.mark.parametrize(
    "body", [b"", b"{", b"\xff", b"[]", b"5", b'{"prompts": ["\\ud800"]}', b"[" * 10_000]
)
async def test_malformed_json_is_refused_before_it_reaches_an_engine(body: bytes) -> None:
    async with Client() as client:
        check_error(await client.post("/generate", content=body), 400, "invalid_request_error")
        if body:
            check_error(await client.post(CHAT, content=body), 400, "invalid_request_error")
        assert client.engine.requests == []


async def test_a_model_that_is_no_string_is_refused_with_its_field() -> None:
    async with Client() as client:
        for path in (CHAT, "/generate"):
            response = await client.post(path, json={"prompts": ["x"], "model": 5})
            check_error(response, 400, "invalid_request_error", "model")


async def test_a_bad_field_of_generate_is_refused_with_its_name() -> None:
    async with Client(max_prompts=2) as client:
        for body, param in (
            ({"prompts": []}, "prompts"),
            ({"prompts": ["x"] * 3}, "prompts"),
            ({"messages": [[]] * 3}, "messages"),
            ({"prompts": ["x"], "max_tokens": "5"}, "max_tokens"),
            ({"prompts": ["x"], "queue_timeout_s": 0}, "queue_timeout_s"),
        ):
            check_error(await client.post("/generate", json=body), 400, "invalid_request_error", param)
        assert client.engine.requests == []


@pytest.mark.parametrize("path", [CHAT, "/generate", "/tokenize"])
async def test_a_body_over_the_limit_by_its_length_is_not_even_read(path: str) -> None:
    read = []

    async def body() -> AsyncGenerator[bytes, None]:
        read.append(1)
        yield b" " * 101

    async with Client(max_body_bytes=100) as client:
        headers = {"content-length": "101"}
        response = await client.post(path, content=body(), headers=headers)
        assert "100 bytes" in check_error(response, 413, "request_too_large")
        assert read == []
        assert client.engine.requests == []


async def test_a_body_over_the_limit_that_comes_in_pieces_is_read_no_further() -> None:
    read = []

    async def body() -> AsyncGenerator[bytes, None]:
        for i in range(100):
            read.append(i)
            yield b" " * 30

    async with Client(max_body_bytes=100) as client:
        check_error(await client.post(CHAT, content=body()), 413, "request_too_large")
        assert len(read) == 4
        assert client.engine.requests == []


async def test_a_length_that_is_too_small_does_not_get_a_body_past_the_limit() -> None:
    async with Client(max_body_bytes=100) as client:
        response = await client.post(CHAT, content=b" " * 101, headers={"content-length": "5"})
        check_error(response, 413, "request_too_large")


async def test_a_body_at_the_limit_is_taken_whole() -> None:
    async with Client(max_body_bytes=100) as client:
        body = b"{}".ljust(100)

        async def pieces() -> AsyncGenerator[bytes, None]:
            for start in range(0, 100, 7):
                yield body[start : start + 7]

        for content in (body, pieces()):
            assert (await client.post(CHAT, content=content)).status_code == 200
        assert [request.body for request in client.engine.requests] == [body, body]


@pytest.mark.parametrize("path", [CHAT, "/generate", "/process"])
async def test_a_large_body_is_read_beside_the_event_loop(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    in_executor = loop.run_in_executor
    beside: list[int] = []
    many = 1

    def run(executor: Any, call: Any) -> Any:
        beside.append(many)
        return in_executor(executor, call)

    monkeypatch.setattr(loop, "run_in_executor", run)
    async with Client(Engine(echo)) as client:
        for many in (1, 100_000):
            values: list[JSON] = [{}] * many
            await client.post(path, json={"messages": values, "records": values})
    assert beside == [100_000]


@pytest.mark.parametrize("path", ["/nope", "/v2/chat/completions", "/generate/x"])
async def test_a_path_that_is_not_there(path: str) -> None:
    async with Client() as client:
        assert path in check_error(await client.post(path, json={}), 404, "not_found_error")


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/generate"), ("POST", "/health"), ("PUT", "/tokenize")]
)
async def test_a_method_that_is_not_there(method: str, path: str) -> None:
    async with Client() as client:
        response = await client.request(method, path)
        check_error(response, 405, "invalid_request_error")
        assert response.headers["allow"]


# An engine that fails


def stacks(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the kinds of the exceptions whose stacks are in the log, as errors."""
    return [
        type(record.exc_info[1]).__name__
        for record in caplog.records
        if record.exc_info and record.levelno >= logging.ERROR
    ]


async def test_an_engine_that_ends_before_its_head_is_a_503_without_a_stack(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with Client(Engine(answer())) as client:
        response = await client.post(CHAT, json={})
        check_error(response, 503, "service_unavailable")
        assert response.headers["retry-after"] == "1"
        assert client.engine.answers[0].stopped.is_set()
    assert stacks(caplog) == []


@pytest.mark.parametrize(
    "error", [RuntimeError("died"), KeyError("died"), RequestError(400, "internal_error", "died")]
)
async def test_a_fault_before_the_head_is_a_500_with_its_stack_in_the_log(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    async with Client(Engine(answer(error))) as client:
        response = await client.post(CHAT, json={}, headers={"x-request-id": "mine"})
        message = check_error(response, 500, "internal_error")
        assert "died" not in message, "clients are not told of the inside"
        assert client.engine.answers[0].stopped.is_set()
    assert stacks(caplog) == [type(error).__name__]
    assert "mine" in caplog.text


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens", CHAT, "/generate"])
async def test_a_fault_of_the_ingress_is_a_500_with_its_stack_in_the_log(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Engine):
        def remote(self, request: RelayRequest) -> Any:
            raise KeyError("inside")

    app = application({"demo": Broken(echo)})
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        response = await client.post(path, json={"prompts": ["a"]} if path == "/generate" else {})
    assert response.status_code == 500
    error = response.json()
    assert error.get("type") == ("error" if "messages" in path else None)
    assert error["error"]["type"] == ("api_error" if "messages" in path else "internal_error")
    assert "inside" not in response.text
    assert "KeyError" in stacks(caplog)


@pytest.mark.parametrize(("deaths", "status"), [(2, 200), (3, 500)])
@virtual
async def test_requests_survive_two_engines_and_nobody_is_refused_afterwards(
    deaths: int, status: int
) -> None:
    met: Counter[bytes] = Counter()

    async def answering(request: RelayRequest) -> AsyncGenerator[bytes, None]:
        met[request.body] += 1
        if met[request.body] <= deaths:
            # All requests are there when it dies.
            await asyncio.sleep(1.0)
            raise ActorDiedError
        yield complete(PLAIN, b"{}")

    async with Client(Engine(answering)) as client:
        for expected in (status, 200):
            answers = await asyncio.gather(*(client.post(CHAT, json={"user": name}) for name in "abc"))
            assert [found.status_code for found in answers] == [expected] * 3


class Asleep(Engine):
    """An Engine without a replica: nothing takes its requests."""

    def __init__(self) -> None:
        super().__init__(self._wait)

    def remote(self, request: RelayRequest) -> Any:
        answer: Any = super().remote(request)
        # So Ray Serve says that no replica has accepted the request.
        answer._replica_result = None
        return answer

    async def _wait(self, request: RelayRequest) -> AsyncGenerator[bytes, None]:
        yield await self._until_stopped()

    async def _until_stopped(self) -> bytes:
        await self.answers[-1].stopped.wait()
        raise asyncio.CancelledError


@pytest.mark.parametrize(
    ("path", "body", "headers"),
    [
        (CHAT, {}, {"x-queue-timeout-seconds": "2"}),
        (CHAT, {"stream": True}, {"x-queue-timeout-seconds": "2"}),
        ("/v1/embeddings", {"input": "a"}, {"x-queue-timeout-seconds": "2"}),
        ("/generate", {"prompts": ["a"], "queue_timeout_s": 2}, {}),
        ("/generate", {"prompts": ["a"], "queue_timeout_s": 2}, {"x-keep-alive": "1"}),
    ],
    ids=["header", "stream", "embeddings", "field", "kept alive"],
)
@virtual
async def test_the_queue_s_deadline_holds_while_a_model_has_no_replica(
    path: str, body: dict[str, Any], headers: dict[str, str]
) -> None:
    async with Client(Asleep()) as client:
        response = await client.post(path, json=body, headers=headers)
    check_error(response, 408, "timeout_error")
    assert response.headers["x-should-retry"] == "false"
    assert now() == pytest.approx(2.0, abs=0.5)


async def test_serve_s_own_limit_is_a_429() -> None:
    error = BackPressureError(num_queued_requests=1, max_queued_requests=1)
    async with Client(Engine(answer(error))) as client:
        response = await client.post(CHAT, json={})
        check_error(response, 429, "rate_limit_error")
        assert response.headers["retry-after"] == "1"


async def test_an_engine_s_refusal_comes_through_as_it_is() -> None:
    error = RequestError(429, "rate_limit_error", "full", retry_after_s=2.5)
    async with Client(Engine(answer(refused(error)))) as client:
        response = await client.post(CHAT, json={})
        assert check_error(response, 429, "rate_limit_error") == "full"
        assert response.headers["retry-after"] == "3"


async def test_a_stream_that_fails_in_the_middle_ends_with_an_error_event(
    caplog: pytest.LogCaptureFixture,
) -> None:
    messages: list[bytes | Exception] = [
        message(head=STREAM, body=b'data: {"a": 1}\n\n'),
        message(body=b'data: {"a": 2}\n\n'),
        RuntimeError("died"),
    ]
    async with Client(Engine(answer(*messages))) as client:
        response = await client.post(CHAT, json={"stream": True})
    assert response.status_code == 200
    *events, last, end = response.text.split("\n\n")
    assert events == ['data: {"a": 1}', 'data: {"a": 2}']
    assert end == ""
    assert "[DONE]" not in response.text
    error = json.loads(last.removeprefix("data: "))["error"]
    assert (error["type"], error["code"]) == ("internal_error", 500)
    assert stacks(caplog) == ["RuntimeError"]


@virtual
async def test_streams_are_kept_for_another_engine_in_half_of_the_budget_of_bodies() -> None:
    ends = asyncio.Event()
    head = STREAM._replace(resume="tokens")

    def event(text: str) -> bytes:
        choice = {"index": 0, "text": text, "finish_reason": None}
        return f"data: {json.dumps({'id': 'a', 'created': 1, 'choices': [choice]})}\n\n".encode()

    async def answering(request: RelayRequest) -> AsyncGenerator[bytes, None]:
        if b"large" in request.body:
            yield complete(PLAIN, b"{}")
        elif request.resumes:
            yield message(
                head=head, body=event("x" * 300 + "end") + DONE, usage=RequestUsage(Tokens(1, 0, 2))
            )
        else:
            yield message(head=head, body=event("x" * 300))
            await ends.wait()
            raise ActorDiedError

    limits = {"max_body_bytes": 1000, "max_bytes_in_flight": 2000}
    async with Client(Engine(answering), **limits) as client:
        body = {"prompt": "a", "stream": True}
        streams = [asyncio.ensure_future(client.post("/v1/completions", json=body)) for _ in range(4)]
        await blocked()
        # A body has room yet.
        large = {"prompt": "large " + "x" * 900}
        assert (await client.post("/v1/completions", json=large)).status_code == 200
        ends.set()
        texts = [response.text for response in await asyncio.gather(*streams)]
    assert ["end" in text for text in texts] == [True, True, False, False]
    assert ["error" in text for text in texts] == [False, False, True, True]


async def test_a_body_that_fails_in_the_middle_breaks_the_connection() -> None:
    engine = Engine(answer(message(head=PLAIN, body=b'{"a": '), RuntimeError("died")))
    call = Call(application({"demo": engine}), CHAT)
    with pytest.raises(RuntimeError, match="died"):
        await asyncio.wait_for(call.task, LIMIT_S)
    sent = [call.sent.get_nowait() for _ in range(call.sent.qsize())]
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    assert sent[1]["body"] == b'{"a": '
    # A server that has not seen the last piece closes the connection without an end.
    assert sent[1]["more_body"] is True
    assert engine.answers[0].stopped.is_set()


# Streaming, and a client that leaves


def held() -> tuple[Answering, "asyncio.Queue[bytes | None]"]:
    """Return how an engine answers with what the test puts into a queue; None ends it."""
    messages: asyncio.Queue[bytes | None] = asyncio.Queue()

    async def answering(request: RelayRequest) -> AsyncGenerator[bytes, None]:
        while (message := await messages.get()) is not None:
            yield message

    return answering, messages


async def test_each_piece_is_passed_on_when_it_comes() -> None:
    answering, messages = held()
    engine = Engine(answering)
    call = Call(application({"demo": engine}), CHAT)
    messages.put_nowait(message(head=STREAM, body=b"a"))
    start = await call.next()
    assert (start["status"], start["headers"]) == (200, STREAM.headers)
    assert (await call.next())["body"] == b"a"
    for body in (b"b", b"c"):
        messages.put_nowait(message(body=body))
        assert await call.next() == {"type": "http.response.body", "body": body, "more_body": True}
    messages.put_nowait(END)
    messages.put_nowait(None)
    assert await call.next() == {"type": "http.response.body", "body": b"", "more_body": False}
    await asyncio.wait_for(call.task, LIMIT_S)


@pytest.mark.parametrize("when", ["before the answer", "in the middle of it"])
@pytest.mark.parametrize("path", [CHAT, "/generate"])
async def test_a_client_that_leaves_stops_the_engine_s_work(path: str, when: str) -> None:
    answering, messages = held()
    engine = Engine(answering)
    call = Call(application({"demo": engine}), path, b'{"prompts": ["x"]}')
    if when == "in the middle of it":
        messages.put_nowait(message(head=STREAM, body=b"a"))
        await call.next()
        await call.next()
    else:
        await asyncio.wait_for(engine.asked.wait(), LIMIT_S)
    assert not engine.answers[0].stopped.is_set()
    await call.leave()
    assert engine.answers[0].stopped.is_set()
    messages.put_nowait(message(body=b"too late"))
    await asyncio.sleep(0)
    assert call.sent.empty()


# Models, health, statistics, the page


async def test_the_models_are_listed() -> None:
    async with Client({"a": Engine(echo), "org/b": Engine(echo), "rank": Engine(echo)}) as client:
        body = (await client.get("/v1/models")).json()
        assert body["object"] == "list"
        assert [card["id"] for card in body["data"]] == ["a", "org/b", "rank"]
        assert [card["object"] for card in body["data"]] == ["model"] * 3
        assert [card["kind"] for card in body["data"]] == ["llm", "llm", "function"]
        for card in body["data"]:
            assert (await client.get(f"/v1/models/{card['id']}")).json() == card
        response = await client.get("/v1/models/c")
        assert "a, org/b, rank" in check_error(response, 404, "not_found_error", "model")


async def test_health_is_200_once_a_model_is_ready(health: dict[str, ModelState]) -> None:
    health["demo"] = ModelState(0, asleep=False, awaits="1 GPU")
    async with Client() as client:
        response = await client.get("/health")
        assert response.status_code == 503
        assert response.json()["models"]["demo"]["awaits"] == "1 GPU"
        health["demo"] = ModelState(1, asleep=False, awaits="")
        response = await client.get("/health")
        assert response.status_code == 200
        assert response.json()["status"] == "ok"


async def test_health_answers_head_requests_too(health: dict[str, ModelState]) -> None:
    async with Client() as client:
        health["demo"] = ModelState(1, asleep=False, awaits="")
        assert (await client.request("HEAD", "/health")).status_code == 200
        health["demo"] = ModelState(0, asleep=False, awaits="a replica")
        response = await client.request("HEAD", "/health")
        assert response.status_code == 503


@pytest.mark.parametrize("path", ["/health", "/stats"])
async def test_a_controller_that_can_not_be_reached_is_no_500(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def read(self: Health) -> HealthReport:
        raise RuntimeError("the controller is gone")

    monkeypatch.setattr(Health, "read", read)
    async with Client() as client:
        assert (await client.get(path)).status_code == (503 if path == "/health" else 200)


async def test_stats_are_those_of_every_replica(health: dict[str, ModelState]) -> None:
    ready = ModelState(2, asleep=False, awaits="")
    health |= {"a": ready, "b": ready, "c": ModelState(0, asleep=True, awaits=""), "d": ready}
    engines = {
        "a": Engine(echo, stats=[{"replica": "1"}, {"replica": "2"}]),
        "b": Engine(echo, stats=RuntimeError("no answer")),
        "c": Engine(echo),
        "d": Engine(echo, stats=TimeoutError()),
    }
    async with Client(engines) as client:
        response = await client.get("/stats")
    models = response.json()["models"]
    assert [(one["state"], one["detail"], one["ready_replicas"]) for one in models.values()] == [
        ("ready", "", 2),
        ("error", "no answer", 2),
        ("asleep", "", 0),
        ("error", "TimeoutError", 2),
    ]
    assert [one["replicas"] for one in models.values()] == [[{"replica": "1"}, {"replica": "2"}], [], [], []]
    assert [one.get("error") for one in models.values()] == [None, "no answer", None, "TimeoutError"]
    assert engines["a"].broadcasts == ["stats"]
    assert engines["c"].broadcasts == [], "a question to a model that sleeps would wake it or wait"


# Clients of every kind


async def test_a_complete_answer_has_its_length() -> None:
    async with Client() as client:
        response = await client.post("/generate", json={"prompts": ["x"]})
        assert int(response.headers["content-length"]) == len(response.content)


async def test_an_encoded_body_is_refused_with_the_name_of_the_header() -> None:
    async with Client() as client:
        body = gzip.compress(b'{"prompts": ["x"]}')
        response = await client.post("/generate", content=body, headers={"content-encoding": "gzip"})
        message = check_error(response, 415, "invalid_request_error", "content-encoding")
        assert "gzip" in message
        assert client.engine.requests == []


@pytest.mark.parametrize("value", [True, "false", 1, "yes"])
async def test_background_is_refused_by_name(value: object) -> None:
    async with Client() as client:
        response = await client.post("/v1/responses", json={"background": value, "store": "false"})
        check_error(response, 400, "invalid_request_error", "background")
        assert (await client.post("/v1/responses", json={"background": False})).status_code == 200
        assert len(client.engine.requests) == 1


async def test_metrics_say_where_they_are() -> None:
    async with Client() as client:
        message = check_error(await client.get("/metrics"), 404, "not_found_error")
        assert "Prometheus" in message


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
@pytest.mark.parametrize(
    ("request_", "status", "type"),
    [
        ({"json": {"model": "c"}}, 404, "not_found_error"),
        ({"content": b"{"}, 400, "invalid_request_error"),
        ({"json": {"n": 3}}, 400, "invalid_request_error"),
        ({"json": {}, "headers": {"x-queue-timeout-seconds": "soon"}}, 400, "invalid_request_error"),
        ({"json": {}, "headers": {"content-encoding": "br"}}, 415, "invalid_request_error"),
        ({"content": b"{}" + b" " * 2**21}, 413, "request_too_large"),
        ({"method": "GET"}, 405, "invalid_request_error"),
    ],
)
async def test_errors_of_anthropic_s_routes_have_its_shape(
    path: str, request_: dict[str, Any], status: int, type: str
) -> None:
    async with Client(max_n=2, max_body_bytes=2**20) as client:
        response = await client.request(**({"method": "POST", "url": path} | request_))
        assert_anthropic(response, status, type)
        assert ("allow" in response.headers) == (status == 405)


def assert_anthropic(response: httpx.Response, status: int, type: str) -> None:
    """Check an error's status and its shape, which is Anthropic's."""
    assert response.status_code == status, response.text
    body = response.json()
    assert (set(body), body["type"], body["error"]["type"]) == ({"type", "error"}, "error", type)
    assert body["error"]["message"]


@pytest.mark.parametrize(
    ("error", "type"),
    [
        (RequestError(429, "rate_limit_error", "full", retry_after_s=2.5), "rate_limit_error"),
        (RequestError(408, "timeout_error", "late"), "timeout_error"),
        (RequestError(500, "internal_error", "oh"), "api_error"),
        (RequestError(502, "internal_error", "oh"), "api_error"),
        (RequestError(503, "service_unavailable", "gone", retry_after_s=1), "overloaded_error"),
    ],
)
async def test_errors_of_an_engine_on_anthropic_s_routes_have_its_shape(
    error: RequestError, type: str
) -> None:
    path = "/v1/messages"
    async with Client(Engine(answer(refused(error, path)))) as client:
        assert_anthropic(await client.post(path, json={}), error.status, type)


async def test_an_error_in_a_stream_of_anthropic_s_is_its_event() -> None:
    messages: list[bytes | Exception] = [message(head=STREAM, body=b"event: a\n\n"), RuntimeError("died")]
    async with Client(Engine(answer(*messages))) as client:
        text = (await client.post("/v1/messages", json={"stream": True})).text
    event, data = text.removeprefix("event: a\n\n").strip().split("\n")
    assert event == "event: error"
    body = json.loads(data.removeprefix("data: "))
    assert (body["type"], body["error"]["type"]) == ("error", "api_error")


@pytest.mark.parametrize(("key", "status"), [("none", 401), ("far", 403)])
async def test_a_refusal_of_a_key_has_anthropic_s_shape(
    key: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules: dict[str, Any] = {"far": {"allow_from": ["10.0.0.0/8"]}}
    keys = [
        {"name": name, "tenant": "a", "sha256": hash_key(name.encode())} | rule
        for name, rule in rules.items()
    ]
    monkeypatch.setenv("KEYS", json.dumps(keys))
    settings = parse({"models": [{"id": "demo", "source": "x"}], "access": {"keys_env": "KEYS"}})
    engines: Any = {"demo": Engine(echo)}
    transport = httpx.ASGITransport(Ingress(settings, engines).__serve_build_asgi_app__())
    async with httpx.AsyncClient(transport=transport, base_url="http://saturate") as client:
        response = await client.post("/v1/messages", json={}, headers={"x-api-key": key})
    types = {401: "authentication_error", 403: "permission_error"}
    assert_anthropic(response, status, types[status])


async def test_a_service_tier_of_anthropic_is_the_default() -> None:
    async with Client() as client:
        assert (await client.post("/v1/messages", json={"service_tier": "standard_only"})).status_code == 200
        check_error(
            await client.post(CHAT, json={"service_tier": "standard_only"}),
            400,
            "invalid_request_error",
            "service_tier",
        )


async def test_pages_of_allowed_origins_may_call_and_no_others(health: dict[str, ModelState]) -> None:
    origin = "https://chat.example.com"
    preflight = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    health["demo"] = ModelState(1, False, "")
    # Its statistics are none, which is a fault on `/v1/models`.
    engines = {"demo": Engine(echo, stats=[5])}
    for allowed in ([], [origin]):
        app = application(engines, allow_origins=allowed)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://saturate") as client:
            for asked in (origin, "https://other.example.com"):
                expected = asked if asked in allowed else None
                response = await client.options(CHAT, headers={"origin": asked} | preflight)
                assert response.headers.get("access-control-allow-origin") == expected
                for path, status in ((CHAT, 200), ("/v1/models", 500), ("/v1/no", 404)):
                    method = "GET" if path == "/v1/models" else "POST"
                    response = await client.request(method, path, json={}, headers={"origin": asked})
                    assert response.status_code == status
                    assert response.headers.get("access-control-allow-origin") == expected


async def test_a_model_has_its_context_once_a_replica_has_told_it(health: dict[str, ModelState]) -> None:
    health["demo"] = ModelState(0, asleep=True, awaits="")
    async with Client(Engine(echo, stats=[{"max_model_len": 2048}])) as client:
        assert (await client.get("/v1/models/demo")).json()["max_model_len"] is None
        health["demo"] = ModelState(1, asleep=False, awaits="")
        (model,) = (await client.get("/v1/models")).json()["data"]
        assert model["max_model_len"] == 2048
        await client.get("/v1/models")
        assert client.engine.broadcasts == ["stats"]


async def test_routes_are_found_below_a_prefix() -> None:
    engine = Engine(echo)
    app = application({"demo": engine})

    async def mounted(scope: Any, receive: Any, send: Any) -> None:
        await app(scope | {"root_path": "/llm"}, receive, send)

    transport = httpx.ASGITransport(mounted)
    async with httpx.AsyncClient(transport=transport, base_url="http://saturate") as client:
        assert (await client.post(f"/llm{CHAT}", json={})).json()["path"] == CHAT


async def test_a_limit_on_output_goes_along_for_requests_that_state_none() -> None:
    async with Client(max_tokens=10) as client:
        await client.post(CHAT, json={})
        assert client.engine.requests[0].max_tokens == 10


async def test_a_request_without_an_id_gets_one_for_the_engine() -> None:
    async with Client() as client:
        await client.post(CHAT, content=b"{}")
        (request,) = client.engine.requests
    assert len(dict(request.headers)[b"x-request-id"]) == 32
    assert (request.key, request.source) == ("", "http")
