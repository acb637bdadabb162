"""The service of a model: options for the device, cores that Ray has, and comments that are true."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.models.devices import UsableGPU
from tests.serve_app.models.doubles import (
    BIG_LLAMA,
    GB,
    H100,
    L4,
    QWEN,
    QWEN_7B,
    T4,
    Model,
    machine,
    served,
)

SMALL_CONFIG = QWEN_7B | {"num_hidden_layers": 4}

# Sums


@pytest.mark.parametrize(
    ("gpu", "length", "reason"),
    [
        (H100, None, "max_model_len 32,768: the model's own limit; 31.3 requests of that length fit at once"),
        (
            L4,
            10_000,
            "max_model_len 10,000: 6.2 requests of that length fit at once; the model's own limit is 32,768",
        ),
        # vLLM takes more than the own limit if the model's config scales it.
        (H100, 65_536, "max_model_len 65,536: 15.6 requests of that length fit at once"),
    ],
)
def test_the_reason_of_a_context_names_the_requests_that_fit(
    gpu: UsableGPU, length: int | None, reason: str
) -> None:
    options = {} if length is None else {"max_model_len": length}
    assert served(QWEN, machine(gpu), **options).line("context") == reason


# Cores


@given(st.integers(1, 64), st.integers(0, 8), st.data())
def test_ray_has_the_cores_for_every_replica(cores: int, gpus: int, data: st.DataObject) -> None:
    replicas = data.draw(st.none() | st.integers(1, gpus or 100))
    ingress, engine = served(QWEN, machine(*[L4] * gpus, cores=cores), replicas).deployments
    most = ingress.get("num_replicas") or ingress["autoscaling_config"]["max_replicas"]
    reserved = most * ingress["ray_actor_options"]["num_cpus"]
    reserved += engine["num_replicas"] * engine["ray_actor_options"]["num_cpus"]
    assert reserved <= cores


@pytest.mark.parametrize(
    ("cores", "replicas", "each"), [(1, 1, 0.5), (2, 1, 1), (8, 1, 7), (8, 2, 3), (8, 7, 1), (2, 2, 0.5)]
)
def test_engines_on_the_cpu_leave_cores_to_the_rest_of_the_service(
    cores: int, replicas: int, each: float
) -> None:
    found = served(QWEN, machine(cores=cores), replicas)
    engine = found.deployments[1]
    assert (engine["num_replicas"], engine["ray_actor_options"]) == (replicas, {"num_cpus": each})
    assert (f"# {'One copy' if replicas == 1 else 'Copies'} of the model") in found.text


def test_the_ingress_has_more_replicas_where_cores_are_left() -> None:
    one = served(QWEN, machine(L4, cores=4)).deployments[0]
    assert (one["num_replicas"], one["ray_actor_options"]) == (1, {"num_cpus": 1})
    scaled = served(QWEN, machine(L4, cores=64)).deployments[0]
    assert "num_replicas" not in scaled, "Serve takes one of the two"
    assert scaled["autoscaling_config"]["max_replicas"] == 4


# Options of the engine


def test_a_share_of_the_memory_is_for_gpus_and_a_size_for_cpus() -> None:
    gpu, cpu = served(QWEN, machine(L4)).engine, served(QWEN, machine()).engine
    assert gpu.keys() ^ cpu.keys() == {
        "gpu_memory_utilization",
        "kv_cache_memory_bytes",
        "enforce_eager",
        "distributed_executor_backend",
    }
    assert cpu["distributed_executor_backend"].endswith(".UniProcExecutor")


@pytest.mark.parametrize(
    ("options", "parallel"), [({}, 4), ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, 2)]
)
def test_a_replica_has_the_gpus_of_all_its_stages(options: dict[str, Any], parallel: int) -> None:
    found = served(BIG_LLAMA, machine(*[H100] * 4), **options)
    assert (found.parallel, found.engine["distributed_executor_backend"]) == (parallel, "mp")
    assert found.gpus == 4


OWN = "the type of the published weights."
WEIGHTS = "The weights are published in"


@pytest.mark.parametrize(
    ("config", "gpus", "dtype", "reason"),
    [
        ({}, [L4], None, OWN),
        ({}, [], None, OWN),
        ({}, [T4], None, f"{WEIGHTS} bfloat16, which this GPU lacks."),
        ({"torch_dtype": "float32"}, [L4], None, f"{WEIGHTS} float32, which takes twice the memory."),
        ({"torch_dtype": "float32"}, [T4], None, f"{WEIGHTS} float32, which takes twice the memory."),
        ({"quantization_config": {"quant_method": "awq"}}, [L4], None, "The weights are quantised: awq."),
        ({"quantization_config": {"quant_method": "awq"}}, [L4], "half", "The weights are quantised: awq."),
        # The user's own: the device would have done with the type of the weights.
        ({}, [L4], "auto", f"{WEIGHTS} bfloat16."),
        ({}, [L4], "float16", f"{WEIGHTS} bfloat16."),
        ({}, [], "float32", f"{WEIGHTS} bfloat16."),
        ({"torch_dtype": "float32"}, [L4], "float", f"{WEIGHTS} float32."),
        ({"torch_dtype": "float16"}, [T4], "float32", f"{WEIGHTS} float16."),
    ],
)
def test_the_reason_of_a_type_is_true(
    config: dict[str, Any], gpus: list[UsableGPU], dtype: str | None, reason: str
) -> None:
    options: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
    found = served(Model("a/model", SMALL_CONFIG | config, GB), machine(*gpus), **options)
    assert found.comment("dtype").endswith(reason)


@pytest.mark.parametrize(("context", "answer"), [(100, 50), (3, 1), (1, 1)])
def test_an_answer_leaves_room_for_the_prompt(context: int, answer: int) -> None:
    assert served(QWEN, machine(L4), max_model_len=context).model.sampling.max_tokens == answer
