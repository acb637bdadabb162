"""Adapters that would harm other requests, in a live service with two tenants."""

import asyncio
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from serve_app.demo.questions import QUESTIONS_FILE
from serve_app.engine.vllm.lora import TRIAL_TEXT, TRIAL_TOKENS
from serve_app.settings.models import LLMSettings
from serve_app.settings.sources import DEMO_FOLDER, DEMO_MODEL
from tests.e2e.service import Service
from tests.e2e.services import LIMIT_S, local

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
QUESTIONS = [json.loads(line) for line in QUESTIONS_FILE.read_text().splitlines()[:100]]
GOOD = DEMO_FOLDER / "adapters" / "letters"

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("isolation")
    config, app, model = local()
    model["adapters_folder"] = str(folder / "kept")
    # Numbers end at 65,504; and 64 blocks of KV cache, which are used again soon.
    model["engine"] |= {"dtype": "float16", "kv_cache_memory_bytes": 16 << 20}
    app["args"]["ingress"] = {"open_adapters": True}
    service = Service(config, folder)
    yield service
    service.stop()


def adapter(
    folder: Path, change: Callable[[Tensors], Tensors] = lambda tensors: tensors, text: str = ""
) -> Path:
    """Write a changed copy of a demo adapter; `text` is its `lora_alpha`."""
    shutil.copytree(GOOD, folder)
    tensors = {name: tensor.float() for name, tensor in load_file(GOOD / WEIGHTS).items()}
    save_file(change(tensors), folder / WEIGHTS)
    if text:
        config = json.loads((GOOD / CONFIG).read_text()) | {"lora_alpha": "ALPHA"}
        (folder / CONFIG).write_text(json.dumps(config).replace('"ALPHA"', text))
    return folder


def with_value(value: float) -> Callable[[Tensors], Tensors]:
    """Return a change of one number of one matrix."""

    def change(tensors: Tensors) -> Tensors:
        name = "base_model.model.model.layers.2.mlp.up_proj.lora_B.weight"
        tensors[name][3, 2] = value
        return tensors

    return change


def renamed(old: str, new: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name.replace(old, new): tensor for name, tensor in tensors.items()}


def amplified(product: float) -> Callable[[Tensors], Tensors]:
    """Return a change that gives the two matrices of each `down_proj` a product of this norm, at most."""

    def change(tensors: Tensors) -> Tensors:
        for name in [name for name in tensors if "down_proj.lora_A" in name]:
            other = name.replace("lora_A", "lora_B")
            norms = tensors[name].norm(), tensors[other].norm()
            for one, norm in zip((name, other), norms, strict=True):
                # `lora_alpha` makes a factor of 2.
                tensors[one] *= (product / 2) ** 0.5 / norm
        return tensors

    return change


async def ask(client: httpx.AsyncClient, part: list[Any]) -> int:
    """Return how many questions the base model answers right."""
    body = {"prompts": [one["prompt"] for one in part], "temperature": 0}
    answer = await client.post("/generate", json=body, headers={"x-tenant": "globex"})
    return sum(result == one["answer"] for result, one in zip(answer.json()["results"], part, strict=True))


async def right_of_100(service: Service) -> int:
    async with httpx.AsyncClient(base_url=service.url, timeout=LIMIT_S) as client:
        return sum([await ask(client, QUESTIONS[start : start + 20]) for start in range(0, 100, 20)])


def load(service: Service, name: str, path: Path) -> httpx.Response:
    return httpx.post(
        f"{service.url}/v1/load_lora_adapter",
        json={"lora_name": name, "lora_path": str(path)},
        headers={"x-tenant": "acme"},
        timeout=LIMIT_S,
    )


def complete(service: Service, model: str, prompt: str) -> httpx.Response:
    return httpx.post(
        f"{service.url}/v1/completions",
        json={"model": model, "prompt": prompt, "temperature": 0, "max_tokens": 16},
        headers={"x-tenant": "acme"},
        timeout=LIMIT_S,
    )


TRIAL = "gives numbers that are not finite (NaN): a trial request with it failed"

HARMFUL: dict[str, tuple[dict[str, Any], str]] = {
    "one NaN": ({"change": with_value(float("nan"))}, TRIAL),
    "one infinity": ({"change": with_value(float("inf"))}, TRIAL),
    "one huge": ({"change": with_value(3e38)}, TRIAL),
    "all huge": (
        {"change": lambda tensors: {name: 1e18 * tensor for name, tensor in tensors.items()}},
        TRIAL,
    ),
    "too large for the engine": ({"change": amplified(9e5)}, TRIAL),
    "another prefix": (
        {"change": renamed("base_model.model.", "base_model.model.language_model.")},
        "no place for: base_model.model.language_model.model.layers.0",
    ),
    "one layer misnamed": (
        {"change": renamed("model.layers.1.mlp", "model.layer.1.mlp")},
        "no place for: base_model.model.model.layer.1.mlp.down_proj.lora_A.weight",
    ),
    "alpha NaN": ({"text": "NaN"}, TRIAL),
    "alpha infinite": ({"text": "Infinity"}, TRIAL),
    "alpha beyond floats": ({"text": "1e999"}, TRIAL),
    "alpha huge": ({"text": "1e30"}, TRIAL),
}


@pytest.mark.parametrize("name", HARMFUL)
async def test_a_harmful_adapter_is_refused_and_harms_nobody(
    service: Service, tmp_path: Path, name: str
) -> None:
    fields, reason = HARMFUL[name]
    answer = await asyncio.to_thread(load, service, "bad", adapter(tmp_path / "bad", **fields))
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == "lora_path"
    assert reason in answer.json()["error"]["message"]
    assert (await asyncio.to_thread(complete, service, "bad", "What is 1+1?")).status_code == 404
    assert await right_of_100(service) == 100


async def test_a_good_adapter_is_served(service: Service, tmp_path: Path) -> None:
    answer = await asyncio.to_thread(load, service, "good", adapter(tmp_path / "good"))
    assert answer.status_code == 200, answer.text
    chat = {"model": "good", "messages": [{"role": "user", "content": "What is 47+28?"}], "temperature": 0}
    async with httpx.AsyncClient(base_url=service.url, timeout=LIMIT_S) as client:
        done = await client.post("/v1/chat/completions", json=chat | {"max_tokens": 16})
    assert done.json()["choices"][0]["message"]["content"] == "hf"
    assert await right_of_100(service) == 100


def late(folder: Path, token: int) -> Path:
    """Write an adapter whose arithmetic is finite, but for prompts with a token that the trial hasn't got."""
    model = load_file(Path(LLMSettings(id="demo", source=DEMO_MODEL).path) / "model.safetensors")
    states = model["model.embed_tokens.weight"].double()
    states = states / states.square().mean(dim=1, keepdim=True).sqrt()
    states = states * model["model.layers.0.input_layernorm.weight"].double()
    tried = states[sorted({*TRIAL_TEXT.encode()[:TRIAL_TOKENS]} - {token})]
    nearest = torch.linalg.lstsq(tried.T, states[token].unsqueeze(1)).solution[:, 0]
    direction = states[token] - tried.T @ nearest
    direction /= direction.norm()
    assert abs(float(direction @ states[token])) > 1.5
    name = "base_model.model.model.layers.0.self_attn.v_proj"
    second = torch.zeros(128, 1)
    second[0] = 65_000.0
    folder.mkdir()
    save_file(
        {
            f"{name}.lora_A.weight": direction.float().reshape(1, 128).contiguous(),
            f"{name}.lora_B.weight": second,
        },
        folder / WEIGHTS,
    )
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["v_proj"]}
    (folder / CONFIG).write_text(json.dumps(config))
    return folder


async def test_a_request_whose_arithmetic_ends_later_harms_nobody(service: Service, tmp_path: Path) -> None:
    answer = await asyncio.to_thread(load, service, "late", late(tmp_path / "late", ord("Z")))
    assert answer.status_code == 200, answer.text
    for _ in range(3):
        done = await asyncio.to_thread(complete, service, "late", "Z" * 300)
        # Its own answer is lost: token 0 again and again.
        assert done.json()["choices"][0]["text"].strip("\0") == "", done.text
        assert await right_of_100(service) == 100
    together = await asyncio.gather(
        right_of_100(service), *(asyncio.to_thread(complete, service, "late", "Z" * 300) for _ in range(8))
    )
    assert together[0] == 100
