"""Keys on a live service: access, limits and expiry of each; slow clients; the content of the logs."""

import copy
import json
import secrets
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml

from serve_app.auth.keys import hash_key, new_key
from tests.e2e.service import ROOT, Service
from tests.e2e.services import is_healthy, wait_until
from tests.progress import ANSWER_S, STILL_S

PREFIX = "/guarded"
KEYS = {name: new_key() for name in ("ada", "bob", "slow", "seldom", "late", "home", "root")}
QUESTION = "What is 1+1?"
LIMIT_S = STILL_S
BODY_TIMEOUT_S = 2.0


def entry(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "sha256": hash_key(KEYS[name].encode()), "tenant": name} | more


ENTRIES = [
    entry("ada"),
    entry("bob", tiers=["flex"]),
    entry("slow", quota={"max_concurrency": 1}),
    entry("seldom", quota={"requests_per_minute": 3}),
    entry("home", allow_from=["127.0.0.2/32"]),
    entry("root", admin=True),
]


@pytest.fixture(scope="module")
def keys_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    path.write_text(yaml.safe_dump(ENTRIES))
    return path


@pytest.fixture(scope="module")
def guarded(service: Service, keys_file: Path) -> str:
    """The URL of an Ingress that asks for keys, in front of the Engines of the shared service."""
    config = copy.deepcopy(service.config)
    (app,) = config["applications"]
    other = copy.deepcopy(app) | {"name": "guarded", "route_prefix": PREFIX}
    other["import_path"] = "tests.e2e.guarded:build"
    # The replica has to find these tests.
    other["runtime_env"]["env_vars"]["PYTHONPATH"] = str(ROOT)
    other["args"]["access"] = {"keys_file": str(keys_file), "trusted_proxies": ["127.0.0.1"]}
    other["args"]["ingress"] = {"body_timeout_s": BODY_TIMEOUT_S, "max_tokens": 1000, "max_n": 4}
    other["deployments"] = [{"name": "Guarded", "ray_actor_options": {"num_cpus": 0}}]
    config["applications"].append(other)
    service.deploy(config)
    url = service.url + PREFIX
    wait_until(lambda: is_healthy(url))
    return url


def caller(url: str, name: str, **headers: str) -> httpx.Client:
    headers["authorization"] = f"Bearer {KEYS[name]}"
    return httpx.Client(base_url=url, headers=headers, timeout=ANSWER_S)


def test_a_key_is_held_to_its_addresses_behind_the_proxy(guarded: str) -> None:
    for address, forwarded, status in (
        ("127.0.0.2", {}, 200),
        ("127.0.0.3", {}, 403),
        # The proxy appends the address: one that the client wrote itself counts nothing.
        ("127.0.0.3", {"x-forwarded-for": "127.0.0.2"}, 403),
    ):
        headers = {"authorization": f"Bearer {KEYS['home']}"} | forwarded
        transport = httpx.HTTPTransport(local_address=address)
        with httpx.Client(base_url=guarded, headers=headers, transport=transport, timeout=ANSWER_S) as client:
            answer = generate(client)
        assert answer.status_code == status
        if status == 403:
            assert answer.json()["error"]["message"].endswith("127.0.0.3.")


def test_an_administrator_sees_the_keys(guarded: str) -> None:
    with caller(guarded, "root") as client:
        names = [key["name"] for key in client.get("/v1/admin/keys").json()["data"]]
        assert names == [key["name"] for key in ENTRIES]
        assert client.get("/v1/admin/usage").status_code == 200
    with caller(guarded, "ada") as client:
        assert client.get("/v1/admin/keys").status_code == 403


def generate(client: httpx.Client, **more: Any) -> httpx.Response:
    return client.post("/generate", json={"prompts": [QUESTION]} | more)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/stats"),
        ("GET", "/v1/models"),
        ("POST", "/generate"),
        ("POST", "/process"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/no/such/path"),
    ],
)
def test_without_a_key_there_is_only_what_is_about_the_service(guarded: str, method: str, path: str) -> None:
    for open in ("/health", "/ping", "/version", "/openapi.json", "/docs", "/", "/page.js", "/page.css"):
        assert httpx.get(guarded + open, timeout=ANSWER_S).status_code == 200
    for headers in ({}, {"authorization": "Bearer sk-wrong"}):
        response = httpx.request(method, guarded + path, headers=headers)
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.json()["error"]["type"] == "authentication_error"


def test_a_key_is_accepted_on_every_route(guarded: str) -> None:
    with caller(guarded, "ada") as client:
        assert generate(client).json()["results"] == ["2"]
        for path in ("/", "/stats", "/v1/models"):
            assert client.get(path).status_code == 200
    with openai.OpenAI(base_url=f"{guarded}/v1", api_key=KEYS["ada"]) as sdk:
        chat: Any = [{"role": "user", "content": QUESTION}]
        answer = sdk.chat.completions.create(model="demo", messages=chat, temperature=0)
        assert answer.choices[0].message.content == "2"


def test_a_key_is_for_its_tenant_and_its_tiers(guarded: str) -> None:
    with caller(guarded, "bob") as client:
        assert generate(client).status_code == 200
        assert generate(client, tenant="bob", service_tier="flex").status_code == 200
        for body in ({"tenant": "ada"}, {"service_tier": "priority"}):
            response = generate(client, **body)
            assert response.status_code == 403
            assert response.json()["error"]["param"] in body
    with caller(guarded, "bob", **{"x-tenant": "ada"}) as client:
        assert generate(client).status_code == 403


def test_a_request_is_bounded(guarded: str) -> None:
    with caller(guarded, "ada") as client:
        for path, body in (
            ("/v1/completions", {"prompt": QUESTION, "n": 5}),
            ("/v1/completions", {"prompt": QUESTION, "max_tokens": 1001}),
            ("/v1/chat/completions", {"messages": [], "max_completion_tokens": 1001}),
            ("/generate", {"prompts": [QUESTION], "max_tokens": 1001}),
        ):
            response = client.post(path, json={"model": "demo"} | body)
            assert response.status_code == 400
            assert "is more than the limit of" in response.json()["error"]["message"]


def test_a_key_above_its_rate_is_told_when_the_next_request_fits(guarded: str) -> None:
    with caller(guarded, "seldom") as client, caller(guarded, "ada") as other:
        statuses = []
        while (response := generate(client)).status_code == 200:
            statuses.append(response.status_code)
        assert response.status_code == 429
        assert response.json()["error"]["message"].startswith("key seldom: requests_per_minute 3: ")
        # A minute may have begun meanwhile.
        assert len(statuses) in range(3, 7)
        # The unit tests wait for it, with a clock of their own.
        assert 1 <= int(response.headers["retry-after"]) <= 60
        assert generate(other).status_code == 200


def test_requests_in_flight_are_counted_and_given_back(guarded: str) -> None:
    long = {"model": "demo", "prompt": "once upon", "max_tokens": 1000, "ignore_eos": True, "stream": True}
    with caller(guarded, "slow") as client, caller(guarded, "slow") as other:
        with client.stream("POST", "/v1/completions", json=long) as response:
            assert response.status_code == 200
            pieces = response.iter_raw()
            next(pieces)
            refused = generate(other)
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) >= 1
        wait_until(lambda: generate(other).status_code != 429, every_s=0.0)


def test_keys_change_without_a_restart(guarded: str, keys_file: Path) -> None:
    with caller(guarded, "bob") as old, caller(guarded, "late") as new:
        assert (generate(old).status_code, generate(new).status_code) == (200, 401)
        keys_file.write_text(
            yaml.safe_dump([each for each in ENTRIES if each["name"] != "bob"] + [entry("late")])
        )
        wait_until(lambda: (generate(old).status_code, generate(new).status_code) == (401, 200), every_s=0.0)


def drip(service: Service, data: bytes, drop: bytes) -> bytes:
    """Send `data`, then `drop` again and again, until the other side ends it; return the answer."""
    said = b""
    with socket.create_connection(("127.0.0.1", int(service.url.rsplit(":", 1)[1]))) as connection:
        connection.sendall(data)
        connection.settimeout(0.25)
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            try:
                if not (piece := connection.recv(65536)):
                    return said
                said += piece
                if b"\r\n\r\n" in said:
                    return said
            except TimeoutError:
                with suppress(OSError):
                    connection.sendall(drop)
            except OSError:
                return said
    raise AssertionError(f"still connected after {LIMIT_S} s")


def test_slow_clients_are_sent_away_and_hold_up_no_others(service: Service, guarded: str) -> None:
    head = b"POST /guarded/generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    body = f"authorization: Bearer {KEYS['ada']}\r\ncontent-length: 1000\r\n\r\n{{".encode()
    slow = [(head, b"x: y\r\n"), (b"", b"G"), (head + body, b" "), (head + body, b"")] * 25
    answers: list[bytes] = []

    def run(data: bytes, drop: bytes) -> None:
        answers.append(drip(service, data, drop))

    threads = [threading.Thread(target=run, args=each) for each in slow]
    for thread in threads:
        thread.start()
    with caller(guarded, "ada") as client:
        assert generate(client).json()["results"] == ["2"]
    for thread in threads:
        thread.join(2 * LIMIT_S)
    assert len(answers) == len(slow)
    assert all(b" 408 " in answer.split(b"\r\n")[0] for answer in answers if answer)
    assert sum(b" 408 " in answer for answer in answers) >= 50


def test_logs_have_ids_and_neither_prompts_nor_keys(service: Service, guarded: str) -> None:
    """Runs last in this file: it also looks at what the others left behind."""
    canary, key, number = f"canary{secrets.token_hex(8)}", f"sk-{secrets.token_hex(8)}", secrets.token_hex(8)
    chat = [{"role": "user", "content": canary}]
    bodies: list[tuple[str, Any]] = [
        ("/generate", {"prompts": [canary]}),
        ("/generate", {"prompts": [canary], "max_tokens": -1}),
        ("/generate", {"prompts": canary}),
        ("/generate", {"prompts": [canary * 500]}),
        ("/generate", {"messages": [chat]}),
        ("/generate", {"messages": [[{"role": canary}]]}),
        ("/process", {"records": [canary]}),
        ("/v1/chat/completions", {"messages": chat, "max_tokens": 4}),
        ("/v1/chat/completions", {"messages": chat, "max_tokens": 4, "stream": True}),
        ("/v1/chat/completions", {"messages": canary}),
        ("/v1/chat/completions", {"messages": [{"role": canary, "content": canary}]}),
        ("/v1/chat/completions", {"messages": chat, "tools": canary, "stop": {"a": canary}}),
        ("/v1/completions", {"prompt": canary, "max_tokens": 4}),
        ("/v1/completions", {"prompt": [canary * 500], "max_tokens": 4}),
        ("/v1/completions", {"prompt": {"a": canary}}),
        ("/v1/responses", {"input": canary, "max_output_tokens": 4}),
        ("/v1/messages", {"messages": chat, "max_tokens": 4}),
        ("/v1/tokenize", {"prompt": canary}),
        ("/v1/embeddings", {"input": canary}),
        (f"/v1/{canary}", {}),
        (f"/generate?q={canary}", {"prompts": ["x"]}),
    ]
    with caller(guarded, "ada", **{"x-request-id": number}) as client:
        for path, body in bodies:
            for model in ("demo", canary):
                response = client.post(path, json={"model": model} | body)
                assert response.status_code < 500
                assert response.headers["x-request-id"] == number
            client.post(path, content=json.dumps(body).encode()[:-2])
            with suppress(httpx.TimeoutException):
                client.post(path, json={"model": "demo"} | body, timeout=0.005)
            client.post(path, json=body, headers={"authorization": f"Bearer {key}"})
        # Ray Serve writes its log a thousand lines at a time.
        for _ in range(1100):
            client.get("/v1/models")
    secret = [canary, key, *KEYS.values(), *(hash_key(each.encode()) for each in KEYS.values())]
    found = service.logs()
    assert any(number in content for content in found.values())
    leaks = {f"{path}: {word[:9]}" for path, text in found.items() for word in secret if word in text}
    assert not leaks
    assert not any(word in service.output for word in secret)
