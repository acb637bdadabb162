"""The configs that `saturate serve MODEL` runs; the files in configs/ here have some in full.

`python -m tests.serve_app.models.test_generated` writes them anew.
"""

import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from serve_app.cli.serve_config import read_config
from serve_app.models.devices import Machine
from serve_app.models.errors import ModelError, OptionError
from serve_app.settings.batches import BatchesSettings
from serve_app.settings.ingress import IngressSettings
from serve_app.settings.models import BatcherSettings
from tests.pages import blocks
from tests.serve_app.models.doubles import (
    H100,
    L4,
    LLAMA_8B,
    LLAMA_8B_BYTES,
    LLAMA_70B,
    LLAMA_70B_BYTES,
    LLAMA_405B,
    LLAMA_405B_BYTES,
    QWEN_7B,
    QWEN_7B_BYTES,
    FakeHub,
    Model,
    Served,
    generated,
    machine,
    served,
    write_model,
)
from tests.serve_app.test_configs import unexplained

ROOT = Path(__file__).parents[3]
GOLDEN = Path(__file__).parent / "configs"

QWEN, LLAMA, BIG, HUGE = (
    "Qwen/Qwen2.5-7B-Instruct",
    "meta-llama/Llama-3.1-8B-Instruct",
    "meta-llama/Llama-3.3-70B-Instruct",
    "meta-llama/Llama-3.1-405B-Instruct",
)

CASES: dict[str, tuple[str, Machine]] = {
    "demo": ("demo", machine(cores=2)),
    "qwen2.5-7b-one-l4": (QWEN, machine(L4, cores=8)),
    "llama-8b-two-h100": (LLAMA, machine(H100, H100, cores=32)),
    "llama-70b-four-h100": (BIG, machine(H100, H100, H100, H100, cores=64)),
    "llama-405b-two-machines": (HUGE, machine(*[H100] * 8, cores=128, nodes=2)),
}
"""Arguments and machines, by the names of the files."""


def hub(folder: Path) -> FakeHub:
    """Return a hub with four models."""
    return FakeHub(
        {
            QWEN: write_model(folder / "qwen", QWEN_7B, QWEN_7B_BYTES, files=4),
            LLAMA: write_model(folder / "llama", LLAMA_8B, LLAMA_8B_BYTES, files=4),
            BIG: write_model(folder / "big", LLAMA_70B, LLAMA_70B_BYTES, files=30),
            HUGE: write_model(folder / "huge", LLAMA_405B, LLAMA_405B_BYTES, files=191),
        }
    )


@pytest.fixture
def models(tmp_path: Path) -> FakeHub:
    return hub(tmp_path / "hub")


@pytest.mark.parametrize("case", CASES)
def test_the_config_is_the_file_and_passes_the_check_of_a_config(
    case: str, models: FakeHub, tmp_path: Path
) -> None:
    found = generated(*CASES[case], models)
    assert found.text == (GOLDEN / f"{case}.yaml").read_text()
    (tmp_path / "config.yaml").write_text(found.text)
    assert [app.name for app in read_config(tmp_path / "config.yaml").applications] == ["llm"]
    assert unexplained(found.text) == []
    assert max(len(line) for line in found.text.splitlines() if line.lstrip()[:1] == "#") <= 110
    assert 3 <= len(found.summary) <= 12
    assert found.summary[0].startswith("model ")
    assert any("http://127.0.0.1:8000" in line for line in found.summary)


def test_the_summary_has_the_url_of_an_ipv6_address(models: FakeHub) -> None:
    found = generated("demo", machine(), models, "http.host=::1")
    assert any("http://[::1]:8000," in line for line in found.summary)


def test_the_summary_is_the_one_in_the_docs(models: FakeHub) -> None:
    (block,) = (b for b in blocks() if b.page == "configs/README.md" and b.detail == "needs an L4")
    assert "\n".join(generated(*CASES["qwen2.5-7b-one-l4"], models).summary) == block.text.strip()


def test_the_summary_says_what_was_chosen_and_why(models: FakeHub) -> None:
    said = "\n".join(generated(*CASES["llama-70b-four-h100"], models).summary)
    assert "model      meta-llama/Llama-3.3-70B-Instruct: llama, 141.1 GB of weights, downloaded" in said
    assert "device     4 x NVIDIA H100 80GB HBM3 (85.0 GB each)" in said
    assert "weights 35.3 GB - reserve 2.5 GB leave" in said
    assert "tensor_parallel_size 4: fewer GPUs have no room" in said
    assert "tools: llama3_json, reasoning: none" in said


def test_the_summary_says_why_a_model_takes_several_machines(models: FakeHub) -> None:
    found = generated(*CASES["llama-405b-two-machines"], models)
    assert (
        "spread     1 replica on 2 machines each, tensor_parallel_size 8 and pipeline_parallel_size 2. "
        "16 GPUs of 2 machines hold the 811.7 GB of weights; 8 GPUs have no room for them and for requests."
    ) in found.summary
    assert found.model.bundles == [{"CPU": 8, "GPU": 8}] * 2
    # HAProxy on one machine connects to an Ingress on the other.
    assert found.content["http_options"]["host"] == "0.0.0.0"


def test_a_cpu_has_the_settings_of_the_local_config(models: FakeHub) -> None:
    found = generated(QWEN, machine(cores=8), models)
    local = yaml.safe_load((ROOT / "configs/local.yaml").read_text())["applications"][0]
    engine = local["args"]["models"][0]["engine"]
    same = ("enforce_eager", "distributed_executor_backend")
    assert {name: getattr(found.model.engine, name) for name in same} == {name: engine[name] for name in same}
    assert found.deployments[1]["ray_actor_options"] == {"num_cpus": 7}


def test_a_build_for_the_cpu_leaves_gpus_alone(models: FakeHub) -> None:
    found = generated(QWEN, machine(L4), models, build="cpu")
    assert found.model.engine.gpu_memory_utilization is None
    assert any(
        "1 x NVIDIA L4 (23.7 GB) found, but the installed vLLM is its CPU build" in s for s in found.summary
    )


def test_a_build_for_gpus_needs_one(models: FakeHub) -> None:
    with pytest.raises(ModelError, match="no GPU found"):
        generated(QWEN, machine(), models, build="gpu")


# Values of the user


def test_values_of_the_user_are_in_the_config(models: FakeHub) -> None:
    found = generated(
        QWEN,
        machine(L4),
        models,
        "id=qwen",
        "batcher.goals.ttft_p99_s=0.5",
        "sampling.max_tokens=64",
        "ingress.max_n=4",
        "http.port=9000",
        "deployment.ray_actor_options.num_cpus=2",
        "telemetry.request_log=text",
        "engine.max_model_len=8192",
        "engine.max_logprobs=50",
        "engine.tool_call_parser=qwen3_json",
    )
    assert found.model.id == "qwen"
    set_here = {"max_model_len": 8192, "max_logprobs": 50, "tool_call_parser": "qwen3_json"}
    assert found.engine.items() >= set_here.items()
    assert found.model.batcher.goals is not None
    assert found.model.sampling.max_tokens == 64
    whole = found.content
    assert whole["http_options"] == {"host": "127.0.0.1", "port": 9000}
    args = whole["applications"][0]["args"]
    assert (args["ingress"]["max_n"], args["telemetry"]) == (4, {"request_log": "text"})
    assert found.deployments[1]["name"] == "Engine:qwen"
    assert found.deployments[1]["ray_actor_options"]["num_cpus"] == 2
    assert unexplained(found.text) == []
    assert "saturate serve Qwen/Qwen2.5-7B-Instruct --set id=qwen" in found.text


def test_the_demo_takes_values_too(models: FakeHub) -> None:
    found = generated("demo", machine(), models, "id=toy", "engine.max_model_len=1024")
    assert (found.model.id, found.model.engine.max_model_len) == ("toy", 1024)
    assert found.deployments[1]["name"] == "Engine:toy"


def test_the_number_may_be_left_to_ray_serve(models: FakeHub) -> None:
    found = generated(QWEN, machine(L4), models, "deployment.num_replicas=auto")
    assert found.deployments[1]["num_replicas"] == "auto"


def test_scaling_takes_the_place_of_a_number(models: FakeHub) -> None:
    scaling = "deployment.autoscaling_config={min_replicas: 0, max_replicas: 1}"
    engine = generated(QWEN, machine(L4), models, scaling).deployments[1]
    assert "num_replicas" not in engine
    assert engine["autoscaling_config"]["min_replicas"] == 0


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("engine.max_model_len=long", "engine.max_model_len: Input should be a valid integer, not 'long'"),
        ("ingress.max_n=0", "args.ingress.max_n: Input should be greater than or equal to 1"),
        ("batches.folder=relative", "args.batches.folder: must be an absolute path"),
        ("http.port=x", "--set http.port: Input should be a valid integer"),
        (
            "deployment.num_replicas=-1",
            "--set deployment.num_replicas: Input should be greater than 0, not -1",
        ),
        ("deployment.num_replicas=many", "Ray Serve refuses a value that was set: "),
        (
            "deployment.num_replicas=[1]",
            r"--set deployment.num_replicas: Input should be a valid integer, not \[1\]",
        ),
        ("id=a b", "id: String should match pattern"),
    ],
)
def test_a_wrong_value_is_refused(setting: str, message: str, models: FakeHub) -> None:
    with pytest.raises(OptionError, match=message):
        generated(QWEN, machine(L4), models, setting)


def test_a_wrong_value_is_refused_before_the_hub_is_asked(models: FakeHub) -> None:
    with pytest.raises(OptionError):
        generated(QWEN, machine(L4), models, "engine.max_model_len=x")
    assert models.asked == []


def test_the_last_value_counts(models: FakeHub) -> None:
    found = generated("demo", machine(), models, "id=a", "id=b", "batches.max_lines=10", "batches=null")
    assert (found.model.id, found.deployments[1]["name"]) == ("b", "Engine:b")
    assert found.settings.batches is None


def test_a_value_that_is_set_in_a_config_is_set_in_no_other(models: FakeHub) -> None:
    before = generated("demo", machine(), models)
    mine = generated("demo", machine(), models, "engine.distributed_executor_backend=mp")
    assert mine.text != before.text
    assert generated("demo", machine(), models) == before


def test_the_limits_that_a_config_shows_are_the_defaults(models: FakeHub) -> None:
    found = generated("demo", machine(), models)
    assert found.settings.ingress == IngressSettings()
    assert found.settings.batches == BatchesSettings(folder="~/.local/share/saturate/local")
    assert found.model.batcher == BatcherSettings()


@pytest.mark.parametrize("id", ["1", "1e3", "no", "0x10", "2026-01-01", "a.b_c-d", "org/model"])
def test_a_name_stays_text_whatever_yaml_would_take_it_for(id: str, models: FakeHub) -> None:
    found = generated("demo", machine(), models, f"id={id}")
    assert (found.model.id, found.deployments[1]["name"]) == (id, f"Engine:{id}")


@pytest.mark.parametrize(
    ("count", "text"),
    [(80 * 10**9, "80.0 GB"), (1_234_500_000_000, "1,234.5 GB"), (10**8, "0.1 GB"), (64 << 20, "67.1 MB")],
)
def test_bytes_are_shown_in_a_unit_that_fits(count: int, text: str) -> None:
    found = served(Model("org/model", QWEN_7B, count), machine(memory=4 * 10**12))
    assert f"{text} of weights" in found.line("model")


@pytest.mark.parametrize(
    ("name", "id"),
    [
        ("qwen", "qwen"),
        ("my model (1)", "my-model--1-"),
        (".hidden", "hidden"),
        ("é_模型_b", "b"),
        ("模型", "model"),
        ("x" * 250, "x" * 100),
    ],
)
def test_a_directory_is_named_by_its_path(name: str, id: str, tmp_path: Path, models: FakeHub) -> None:
    folder = write_model(tmp_path / name, QWEN_7B, QWEN_7B_BYTES)
    found = generated(str(folder), machine(L4), models).model
    assert (found.id, found.source) == (id, str(folder))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Served:
    folder = write_model(tmp_path_factory.mktemp("plain") / "m", QWEN_7B, QWEN_7B_BYTES)
    return generated(str(folder), machine(L4), FakeHub({}))


@given(
    st.text("aé模😀 \n\t\"'#:%&*{}[],~._\\-", min_size=1, max_size=60).filter(lambda name: name.strip("."))
)
def test_a_directory_of_any_name_changes_nothing_but_source_and_id(plain: Served, name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = write_model(Path(folder).resolve() / name, QWEN_7B, QWEN_7B_BYTES)
        found = generated(str(path), machine(L4), FakeHub({}))
    id, (app, *_) = found.model.id, (expected := plain.content)["applications"]
    app["args"]["models"][0] |= {"id": id, "source": str(path)}
    app["args"]["batches"]["folder"] = f"~/.local/share/saturate/{id}"
    app["deployments"][1]["name"] = f"Engine:{id}"
    assert found.content == expected


def write(names: Sequence[str]) -> Iterator[Path]:
    """Write the files of some cases anew, and yield their paths."""
    with tempfile.TemporaryDirectory() as folder:
        models = hub(Path(folder))
        for name in names:
            path = GOLDEN / f"{name}.yaml"
            path.write_text(generated(*CASES[name], models).text)
            yield path


if __name__ == "__main__":
    print(*write(sys.argv[1:] or list(CASES)), sep="\n")
