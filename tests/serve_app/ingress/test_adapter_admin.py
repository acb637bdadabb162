"""Loading and unloading of adapters, in front of replicas that the test plays."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from serve_app.ingress.deployment import Ingress
from serve_app.ingress.status import ModelState
from serve_app.settings.adapters import AdapterSettings
from serve_app.settings.schema import parse
from serve_app.wire.request import RelayRequest
from tests.serve_app.ingress.engine_doubles import CHAT, LIMIT_S, Engine, check_error, echo, health

__all__ = ["health"]

LOAD = "/v1/load_lora_adapter"
UNLOAD = "/v1/unload_lora_adapter"


class Replica:
    """The methods of one replica."""

    def __init__(self, folder: dict[str, AdapterSettings]) -> None:
        self._folder = folder
        self.served: dict[str, AdapterSettings] = {}
        self.prepared: dict[str, AdapterSettings] = {}
        self.refusal = ""
        self.fails_at = ""

    def call(self, method: str, *arguments: Any) -> Any:
        if method == self.fails_at:
            raise ConnectionError("the replica is gone")
        return getattr(self, method)(*arguments)

    def prepare_adapter(self, id: str, settings: AdapterSettings) -> str:
        if not self.refusal:
            self.prepared[id] = settings
        return self.refusal

    def refresh_adapters(self) -> list[Any]:
        self.served, self.prepared = dict(self._folder), {}
        return self.stats()["adapters"]  # type: ignore[no-any-return]

    def stats(self) -> Any:
        return {
            "max_model_len": 10,
            "adapters": [{"id": id, "root": one.root} for id, one in self.served.items()],
        }


class Fleet(Engine):
    """The handle of an Engine with two replicas."""

    def __init__(self) -> None:
        super().__init__(echo)
        self.folder: dict[str, AdapterSettings] = {}
        self.members = [Replica(self.folder) for _ in range(2)]
        self.full = ""
        self.failure: BaseException | None = None
        self._calls: list[Any] = []

    def broadcast(self, method: str, *arguments: Any) -> "Fleet":
        self.broadcasts.append(method)
        self._calls.append((method, arguments))
        return self

    async def results_async(self) -> list[Any]:
        method, arguments = self._calls.pop(0)
        await asyncio.sleep(0)
        return [member.call(method, *arguments) for member in self.members]

    def remote(self, *arguments: Any) -> Any:
        if isinstance(arguments[0], RelayRequest):
            return super().remote(*arguments)
        assert self.options_given[-1]["method_name"] == "keep_adapter"
        return self._keep(*arguments)

    async def _keep(self, id: str, settings: AdapterSettings | None) -> str:
        if self.failure is not None:
            raise self.failure
        if settings is None:
            self.folder.pop(id, None)
        elif not self.full:
            self.folder[id] = settings
        return self.full


@pytest.fixture
def fleet(health: dict[str, ModelState]) -> Fleet:
    health["demo"] = ModelState(2, False, "")
    return Fleet()


@pytest.fixture
async def client(fleet: Fleet) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(fleet) as client:
        yield client


def client_of(fleet: Fleet, **ingress: Any) -> httpx.AsyncClient:
    model = {"id": "demo", "source": "x", "adapters_folder": "/adapters"}
    settings = parse({"models": [model], "ingress": {"open_adapters": True} | ingress})
    engines: Any = {"demo": fleet}
    transport = httpx.ASGITransport(Ingress(settings, engines).__serve_build_asgi_app__())
    return httpx.AsyncClient(transport=transport, base_url="http://saturate", timeout=LIMIT_S)


async def load(client: httpx.AsyncClient, name: str = "words", **more: Any) -> httpx.Response:
    return await client.post(LOAD, json={"lora_name": name, "lora_path": f"/adapters/{name}"} | more)


async def test_one_call_loads_an_adapter_on_every_replica(client: httpx.AsyncClient, fleet: Fleet) -> None:
    answer = await load(client)
    assert answer.json() == {
        "object": "adapter",
        "id": "words",
        "model": "demo",
        "status": "loaded",
        "replicas": 2,
    }
    wanted = {"words": AdapterSettings(source="/adapters/words", id="words")}
    assert [member.served for member in fleet.members] == [wanted, wanted]
    shown = {one["id"]: one for one in (await client.get("/v1/models")).json()["data"]}
    assert (shown["words"]["parent"], shown["words"]["root"]) == ("demo", "words")
    response = await client.post(CHAT, json={"model": "words", "messages": []})
    assert response.status_code == 200
    assert fleet.requests[-1].adapter == "words"
    assert check_error(await load(client), 400, "invalid_request_error", "lora_name")


async def test_one_that_a_replica_refuses_is_loaded_on_none(client: httpx.AsyncClient, fleet: Fleet) -> None:
    fleet.members[1].refusal = "has rank 64, and the engine takes 16"
    message = check_error(await load(client), 400, "invalid_request_error", "lora_path")
    assert message == "lora_path: /adapters/words has rank 64, and the engine takes 16"
    assert fleet.folder == {}
    assert [(member.served, member.prepared) for member in fleet.members] == [({}, {}), ({}, {})]


async def test_a_replica_that_stops_meanwhile_leaves_all_as_it_was(
    client: httpx.AsyncClient, fleet: Fleet
) -> None:
    fleet.members[1].fails_at = "prepare_adapter"
    message = check_error(await load(client), 503, "service_unavailable")
    assert "Nothing has changed" in message
    assert fleet.folder == {}
    assert fleet.members[0].prepared == {}


async def test_a_folder_that_can_not_be_written_leaves_all_as_it_was(
    client: httpx.AsyncClient, fleet: Fleet
) -> None:
    fleet.full = "adapters_folder: it is full"
    assert "it is full" in check_error(await load(client), 400, "invalid_request_error", "lora_path")
    assert fleet.members[0].served == {}


GONE = asyncio.CancelledError()
"""The error of a call whose replica Serve takes away."""


@pytest.mark.parametrize("failure", [ConnectionError("gone"), GONE], ids=["died", "taken away"])
async def test_a_replica_that_ends_before_it_keeps_an_adapter_leaves_all_as_it_was(
    client: httpx.AsyncClient, fleet: Fleet, failure: BaseException
) -> None:
    fleet.failure = failure
    assert "Try again" in check_error(await load(client), 503, "service_unavailable")
    assert [(member.served, member.prepared) for member in fleet.members] == [({}, {}), ({}, {})]


async def test_a_replica_that_serve_takes_away_while_it_unloads_is_a_503(
    client: httpx.AsyncClient, fleet: Fleet
) -> None:
    await load(client)
    fleet.failure = GONE
    check_error(await client.post(UNLOAD, json={"lora_name": "words"}), 503, "service_unavailable")


async def test_unloading_reaches_every_replica(client: httpx.AsyncClient, fleet: Fleet) -> None:
    await load(client)
    answer = await client.post(UNLOAD, json={"lora_name": "words"})
    assert (answer.status_code, answer.json()["status"]) == (200, "unloaded")
    assert [member.served for member in fleet.members] == [{}, {}]
    response = await client.post(CHAT, json={"model": "words", "messages": []})
    assert "served here: demo" in check_error(response, 404, "not_found_error", "model")
    answer = await client.post(UNLOAD, json={"lora_name": "words"})
    check_error(answer, 404, "not_found_error", "model")
    answer = await client.post(UNLOAD, json={"lora_name": "demo"})
    assert "is a model" in check_error(answer, 400, "invalid_request_error", "lora_name")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"lora_name": "words"}, "lora_path"),
        ({"lora_name": "a b", "lora_path": "/x"}, "lora_name"),
        ({"lora_name": "words", "lora_path": "words"}, "lora_path"),
        ({"lora_name": "words", "lora_path": "http://host/words"}, "lora_path"),
        ({"lora_name": "words", "lora_path": "zip::s3://bucket/words.zip"}, "lora_path"),
        ({"lora_name": "words", "lora_path": "/x", "load_inplace": True}, "load_inplace"),
        ({"lora_name": "words", "lora_path": "/x", "model": "other"}, "model"),
        ({"lora_name": "demo", "lora_path": "/x"}, "lora_name"),
    ],
)
async def test_a_wrong_body_is_a_400(client: httpx.AsyncClient, body: Any, param: str) -> None:
    check_error(await client.post(LOAD, json=body), 400, "invalid_request_error", param)


async def test_a_service_without_keys_allows_it_by_a_setting_only(fleet: Fleet) -> None:
    async with client_of(fleet, open_adapters=False) as client:
        assert "args.access" in check_error(await load(client), 403, "permission_error")
        answer = await client.post(UNLOAD, json={"lora_name": "words"})
        check_error(answer, 403, "permission_error")


async def test_a_model_that_sleeps_can_not_check_an_adapter(
    client: httpx.AsyncClient, health: dict[str, ModelState]
) -> None:
    health["demo"] = ModelState(0, True, "")
    assert "no replica now" in check_error(await load(client), 503, "service_unavailable")
