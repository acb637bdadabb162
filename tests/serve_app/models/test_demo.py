"""The service of the demo model: the repository's config, and its needs on other machines."""

import json
from pathlib import Path

import pytest

from serve_app.models.devices import Machine, UsableGPU
from serve_app.settings.sources import DEMO_FOLDER
from tests.serve_app.models.doubles import L4, FakeHub, Model, Served, generated, machine, served
from tests.serve_app.test_configs import unexplained

ROOT = Path(__file__).parents[3]


def demo(on: Machine) -> Served:
    """Return the service of the demo on a machine."""
    return generated("demo", on, FakeHub({}))


def test_the_demo_is_that_of_the_repository() -> None:
    local = (ROOT / "configs/local.yaml").read_text()
    # Their first comments differ.
    assert demo(machine(cores=2)).text.partition("\n\n")[2] == local.partition("\n\n")[2]


def test_the_demo_takes_a_gpu_where_vllm_needs_one() -> None:
    assert demo(machine(L4)).deployments[1]["ray_actor_options"] == {"num_cpus": 1, "num_gpus": 1}


@pytest.mark.parametrize("gpus", [(), (L4,), (L4, L4)], ids=len)
@pytest.mark.parametrize("cores", [1, 2, 64])
def test_ray_has_the_cores_for_the_demo(cores: int, gpus: tuple[UsableGPU, ...]) -> None:
    found = demo(machine(*gpus, cores=cores))
    needs = (one["num_replicas"] * one["ray_actor_options"]["num_cpus"] for one in found.deployments)
    assert sum(needs) <= cores
    assert unexplained(found.text) == []


def test_the_kv_cache_holds_the_tokens_that_its_comment_names() -> None:
    found = demo(machine())
    config = json.loads((DEMO_FOLDER / "model/config.json").read_text())
    cache = found.engine["kv_cache_memory_bytes"]
    # vLLM runs a model of 32-bit values with 16 bits.
    same = served(
        Model("org/demo", config, 1 << 20), machine(), dtype="bfloat16", kv_cache_memory_bytes=cache
    )
    assert f"{cache >> 20} MiB hold {same.tokens:,} tokens of this model." in found.text
    assert found.engine["max_model_len"] <= min(config["max_position_embeddings"], same.tokens)
