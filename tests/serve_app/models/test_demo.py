"""The service of the demo model: the repository's config, and its needs on other machines."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from serve_app.models.architecture import read_architecture
from serve_app.models.demo import demo_service
from serve_app.models.devices import Machine, UsableGPU
from serve_app.models.service import serve_config
from serve_app.settings.models import LLMSettings
from serve_app.settings.schema import parse
from serve_app.settings.sources import DEMO_FOLDER
from serve_app.system.yaml_text import Noted
from tests.serve_app.models.doubles import L4, machine
from tests.serve_app.test_configs import unexplained

ROOT = Path(__file__).parents[3]


def written(on: Machine) -> str:
    """Return the config on a machine."""
    return serve_config(demo_service(on, "A test.")).text()


def application(text: str) -> dict[str, Any]:
    """Return the application of a config that Ray Serve takes."""
    content = yaml.safe_load(text)
    ServeDeploySchema.model_validate(content)
    found: dict[str, Any] = content["applications"][0]
    return found


def deployments(text: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = application(text)["deployments"]
    return found


def test_the_demo_is_that_of_the_repository() -> None:
    text = written(machine(cores=2))
    local = (ROOT / "configs/local.yaml").read_text()
    # Their first comments differ.
    assert text.partition("\n\n")[2] == local.partition("\n\n")[2]


def test_the_demo_takes_a_gpu_where_vllm_needs_one() -> None:
    text = written(machine(L4))
    assert deployments(text)[1]["ray_actor_options"] == {"num_cpus": 1, "num_gpus": 1}


@pytest.mark.parametrize("gpus", [(), (L4,), (L4, L4)], ids=len)
@pytest.mark.parametrize("cores", [1, 2, 64])
def test_ray_has_the_cores_for_the_demo(cores: int, gpus: tuple[UsableGPU, ...]) -> None:
    text = written(machine(*gpus, cores=cores))
    found = deployments(text)
    assert sum(one["num_replicas"] * one["ray_actor_options"]["num_cpus"] for one in found) <= cores
    assert unexplained(text) == []


def test_the_kv_cache_holds_the_tokens_that_its_comment_names() -> None:
    service = demo_service(machine(), "")
    model = read_architecture(json.loads((DEMO_FOLDER / "model/config.json").read_text()), service.source)
    cache: Noted = service.engine["kv_cache_memory_bytes"]
    # vLLM runs a model of 32-bit values with 16 bits.
    tokens = cache.value // model.kv_bytes_per_token(2)
    assert f"{cache.value >> 20} MiB hold {tokens:,} tokens of this model." in cache.comment
    (settings,) = parse(application(written(machine()))["args"]).models
    assert isinstance(settings, LLMSettings)
    assert settings.engine.max_model_len is not None
    assert settings.engine.max_model_len <= min(model.context, tokens)
