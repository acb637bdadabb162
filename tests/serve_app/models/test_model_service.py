"""The service of a model: options for the device, cores that Ray has, and comments that are true."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from serve_app.models.architecture import read_architecture
from serve_app.models.choose import choose
from serve_app.models.devices import Machine, UsableGPU
from serve_app.models.memory import MemorySums
from serve_app.models.model_files import ModelFiles
from serve_app.models.model_service import context_reason, model_service, service_id, sums_line
from serve_app.models.service import ONE_PROCESS, ServiceParts
from serve_app.settings.fields import ModelId
from serve_app.system.yaml_text import Noted, Section, is_section
from tests.serve_app.models.doubles import (
    BIG_LLAMA,
    GB,
    H100,
    L4,
    LLAMA_8B,
    LLAMA_8B_BYTES,
    QWEN,
    QWEN_7B,
    T4,
    machine,
)

SMALL_CONFIG = QWEN_7B | {"num_hidden_layers": 4}


def service(
    files: ModelFiles, on: Machine, options: dict[str, Any] | None = None, *, replicas: int | None = None
) -> ServiceParts:
    """Return the service of a model with the settings that are chosen for it."""
    return model_service(choose(files, on, options or {}, replicas=replicas), "id", "A test.")


def values(section: Section) -> dict[str, Any]:
    """Return the values of a section, without its comments."""
    return {
        key: values(item.value) if is_section(item.value) else item.value for key, item in section.items()
    }


# Names


@pytest.mark.parametrize(
    ("source", "id"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", "Qwen2.5-7B-Instruct"),
        ("/models/qwen/", "qwen"),
        ("/models/my model (1)", "my-model--1-"),
        ("/models/.hidden", "hidden"),
        ("/models/é_模型_b", "b"),
        ("/models/模型", "model"),
        ("/", "model"),
        ("", "model"),
        ("/models/" + "x" * 500, "x" * 100),
    ],
)
def test_the_name_is_the_last_part_of_the_source(source: str, id: str) -> None:
    assert service_id(source) == id


@given(st.text() | st.text("./_-a").map(lambda text: text * 20))
def test_the_name_of_any_source_is_one_that_a_config_takes(source: str) -> None:
    assert TypeAdapter(ModelId).validate_python(service_id(source)) == service_id(source)


# Sums


def test_the_sums_are_a_line() -> None:
    sums = MemorySums(
        device=24 * GB, usable=21 * GB, weights=15 * GB, reserve=2 * GB, kv_cache=4 * GB, per_token=2_000
    )
    assert sums_line(sums) == (
        "21.0 GB of 24.0 GB - weights 15.0 GB - reserve 2.0 GB leave 4.0 GB of KV cache: 2,000,000 tokens of "
        "2,000 bytes"
    )


@pytest.mark.parametrize(
    ("context", "reason"),
    [
        (32_768, "the model's own limit; 1.5 requests of that length fit at once"),
        (10_000, "5.0 requests of that length fit at once; the model's own limit is 32,768"),
        # vLLM takes more than the own limit if the model's config scales it.
        (40_000, "1.2 requests of that length fit at once"),
    ],
)
def test_the_reason_of_a_context_names_the_requests_that_fit(context: int, reason: str) -> None:
    architecture = read_architecture(QWEN_7B, "a model")
    assert context_reason(architecture, context, 50_000) == reason


# Cores


@given(st.integers(1, 64), st.integers(0, 8), st.data())
def test_ray_has_the_cores_for_every_replica(cores: int, gpus: int, data: st.DataObject) -> None:
    replicas = data.draw(st.none() | st.integers(1, gpus or 100))
    found = service(QWEN, machine(*[L4] * gpus, cores=cores), replicas=replicas)
    ingress, engine = values(found.ingress), values(found.deployment)
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
    found = service(QWEN, machine(cores=cores), replicas=replicas).deployment
    assert values(found) == {"num_replicas": replicas, "ray_actor_options": {"num_cpus": each}}
    assert found["num_replicas"].comment.startswith("One copy" if replicas == 1 else "Copies of the model")


def test_the_ingress_has_more_replicas_where_cores_are_left() -> None:
    assert values(service(QWEN, machine(L4, cores=4)).ingress) == {
        "num_replicas": 1,
        "ray_actor_options": {"num_cpus": 1},
    }
    scaled = values(service(QWEN, machine(L4, cores=64)).ingress)
    assert "num_replicas" not in scaled, "Serve takes one of the two"
    assert scaled["autoscaling_config"]["max_replicas"] == 4


# Options of the engine


def test_a_share_of_the_memory_is_for_gpus_and_a_size_for_cpus() -> None:
    gpu, cpu = service(QWEN, machine(L4)), service(QWEN, machine())
    assert values(gpu.engine).keys() ^ values(cpu.engine).keys() == {
        "gpu_memory_utilization",
        "kv_cache_memory_bytes",
        "enforce_eager",
        "distributed_executor_backend",
    }
    assert values(cpu.engine)["distributed_executor_backend"] == ONE_PROCESS.value


@pytest.mark.parametrize(
    ("options", "parallel"), [({}, 4), ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, 2)]
)
def test_a_replica_has_the_gpus_of_all_its_stages(options: dict[str, Any], parallel: int) -> None:
    found = service(BIG_LLAMA, machine(*[H100] * 4), options)
    engine = values(found.engine)
    assert (engine["tensor_parallel_size"], engine["distributed_executor_backend"]) == (parallel, "mp")
    assert values(found.deployment)["ray_actor_options"]["num_gpus"] == 4


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
    files = ModelFiles("a/model", SMALL_CONFIG | config, GB)
    options = {} if dtype is None else {"dtype": dtype}
    found: Noted = service(files, machine(*gpus), options).engine["dtype"]
    assert found.comment.endswith(reason)


PARSERS = {"enable_auto_tool_choice", "tool_call_parser", "reasoning_parser"}


@pytest.mark.parametrize(
    ("source", "model_type", "parsers", "answer"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2", {"enable_auto_tool_choice", "tool_call_parser"}, 512),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", "llama", {"reasoning_parser"}, 4096),
        ("a/model", "unheard-of", set(), 512),
    ],
)
def test_a_model_has_the_parsers_of_its_family_and_room_for_its_reasoning(
    source: str, model_type: str, parsers: set[str], answer: int
) -> None:
    files = ModelFiles(source, LLAMA_8B | {"model_type": model_type}, LLAMA_8B_BYTES)
    found = service(files, machine(H100))
    assert found.engine.keys() & PARSERS == parsers
    assert values(found.sampling.value)["max_tokens"] == answer


@pytest.mark.parametrize(("context", "answer"), [(100, 50), (3, 1), (1, 1)])
def test_an_answer_leaves_room_for_the_prompt(context: int, answer: int) -> None:
    found = service(QWEN, machine(L4), {"max_model_len": context})
    assert values(found.sampling.value)["max_tokens"] == answer
