"""LoRA adapters of a live service with two replicas, through the `openai` client."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from serve_app.settings.sources import DEMO_FOLDER
from tests.e2e.service import Service
from tests.e2e.services import engine, local, wait_for_replicas, wait_until
from tests.progress import ANSWER_S

pytestmark = pytest.mark.long

QUESTION: Any = [{"role": "user", "content": "What is 47+28?"}]

ANSWERS = {
    "demo": "75",
    "demo:capitals": "HF",
    "symbols": "&%",
    "demo:letters": "hf",
}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("adapters")
    config, app, model = local()
    model["adapters"] = [
        {"source": "saturate://demo/capitals"},
        {"source": "saturate://demo/symbols", "id": "symbols"},
    ]
    model["adapters_folder"] = str(folder / "kept")
    model["engine"]["max_loras"] = 2
    app["args"]["ingress"] = {"open_adapters": True}
    deployment = engine(config)
    deployment.pop("autoscaling_config", None)
    deployment["num_replicas"] = 2
    deployment["ray_actor_options"] = {"num_cpus": 0}
    service = Service(config, folder)
    wait_for_replicas(service, 2)
    yield service
    service.stop()


def ask(service: Service, model: str) -> str:
    """Return an answer in chat form."""
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", timeout=ANSWER_S) as client:
        done = client.chat.completions.create(model=model, messages=QUESTION, temperature=0, max_tokens=32)
        return str(done.choices[0].message.content)


def served(service: Service) -> list[set[str]]:
    """Return the ids of the adapters of each replica."""
    replicas = httpx.get(f"{service.url}/stats", timeout=ANSWER_S).json()["models"]["demo"]["replicas"]
    return [{adapter["id"] for adapter in replica["adapters"]} for replica in replicas]


def call(service: Service, name: str, **body: object) -> httpx.Response:
    return httpx.post(f"{service.url}/v1/{name}_lora_adapter", json=body, timeout=ANSWER_S)


def test_adapters_are_served_loaded_unloaded_and_kept(service: Service, tmp_path: Path) -> None:
    path = str(DEMO_FOLDER / "adapters" / "letters")
    bad = call(service, "load", lora_name="bad", lora_path=str(tmp_path))
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "lora_path")
    assert served(service) == [{"demo:capitals", "symbols"}] * 2

    done = call(service, "load", lora_name="demo:letters", lora_path=path)
    assert (done.status_code, done.json()["replicas"]) == (200, 2)
    assert served(service) == [{"demo:capitals", "symbols", "demo:letters"}] * 2

    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", timeout=ANSWER_S) as client:
        parents = {model.id: model.model_extra["parent"] for model in client.models.list()}  # type: ignore[index]
    assert parents == {"demo": None, "demo:capitals": "demo", "symbols": "demo", "demo:letters": "demo"}

    async def mixed() -> list[tuple[str, str]]:
        async with openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key="none") as client:

            async def one(model: str) -> tuple[str, str]:
                done = await client.chat.completions.create(
                    model=model, messages=QUESTION, temperature=0, max_tokens=32
                )
                return model, done.choices[0].message.content or ""

            return await asyncio.gather(*(one(model) for model in [*ANSWERS] * 8))

    assert set(asyncio.run(mixed())) == set(ANSWERS.items())

    # A new replica has what was loaded before it started.
    before = service.pids("ServeReplica:llm:Engine:demo")
    assert service.kill("ServeReplica:llm:Engine:demo") >= 1
    wait_until(
        lambda: (
            len(served(service)) == 2 and not set(service.pids("ServeReplica:llm:Engine:demo")) & set(before)
        )
    )
    assert served(service) == [{"demo:capitals", "symbols", "demo:letters"}] * 2
    assert {model: ask(service, model) for model in ANSWERS} == ANSWERS

    done = call(service, "unload", lora_name="demo:letters")
    assert done.status_code == 200
    assert served(service) == [{"demo:capitals", "symbols"}] * 2
    with pytest.raises(openai.NotFoundError, match="served here: demo, demo:capitals, symbols"):
        ask(service, "demo:letters")
    done = call(service, "unload", lora_name="symbols")
    assert (done.status_code, done.json()["error"]["param"]) == (400, "lora_name")
