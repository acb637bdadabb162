"""Values by `--set` and by vLLM's own options."""

import sys
from typing import Any

import pytest

from serve_app.models import installed_vllm
from serve_app.models.errors import OptionError
from serve_app.models.overrides import Override, check, engine_options, read_options, read_setting, value_at
from tests.progress import run

OWN = ["--set", "--print-config", "--verbose"]


@pytest.mark.parametrize(
    ("text", "part", "place", "value"),
    [
        ("engine.max_model_len=8192", "model", "engine.max_model_len", 8192),
        ("engine.revision=1234", "model", "engine.revision", "1234"),
        ("engine.enforce_eager=true", "model", "engine.enforce_eager", True),
        ("engine.quantization=null", "model", "engine.quantization", None),
        ("engine.max_logprobs=50", "model", "engine.extra.max_logprobs", 50),
        ("engine.extra.max_logprobs=50", "model", "engine.extra.max_logprobs", 50),
        ("engine.hf_overrides={a: 1}", "model", "engine.extra.hf_overrides", {"a": 1}),
        ("batcher.goals.ttft_p99_s=0.5", "model", "batcher.goals.ttft_p99_s", 0.5),
        ("batcher.goals={ttft_p99_s: 0.5}", "model", "batcher.goals", {"ttft_p99_s": 0.5}),
        ("batcher.tenant_weights.my-team=3.0", "model", "batcher.tenant_weights.my-team", 3.0),
        ("sampling.temperature=0", "model", "sampling.temperature", 0),
        ("id=qwen", "model", "id", "qwen"),
        ("id=7", "model", "id", "7"),
        ("ingress.allow_origins=[https://a.example]", "args", "ingress.allow_origins", ["https://a.example"]),
        ("batches=null", "args", "batches", None),
        ("access.keys_file=/a/b=c.yaml", "args", "access.keys_file", "/a/b=c.yaml"),
        ("http.port=9000", "http", "port", 9000),
        ("deployment.num_replicas=2", "deployment", "num_replicas", 2),
        ("deployment.ray_actor_options.num_cpus=0.5", "deployment", "ray_actor_options.num_cpus", 0.5),
    ],
)
def test_a_path_names_a_place_of_the_config(text: str, part: str, place: str, value: object) -> None:
    override = read_setting(text)
    assert (override.part, ".".join(override.place), override.value) == (part, place, value)
    assert type(override.value) is type(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("engine.max_modl_len=1", "there is no 'max_modl_len'; did you mean 'max_model_len'?"),
        ("engne.max_model_len=1", "--set engne.max_model_len: there is no 'engne'; did you mean 'engine'?"),
        ("batcher.goals.ttft=1", "there is no 'ttft'; there are tpot_p99_s, ttft_p99_s"),
        ("sampling.xyz=1", "there is no 'xyz'; there are frequency_penalty, ignore_eos, "),
        ("http.prot=1", "did you mean 'port'?"),
        ("deployment.replicas=1", "did you mean 'num_replicas'?"),
        ("http=1", "a section; name a value in it"),
        ("id.x=1", "there is nothing below 'x'"),
        ("engine.max_model_len", "write PATH=VALUE, such as"),
        ("=1", "write PATH=VALUE"),
        ("engine.max_model_len={", "is not YAML"),
        ("source=x", "there is no 'source'"),
        ("models=x", "there is no 'models'"),
        ("engine.api_key=x", "`saturate keys new` makes keys"),
    ],
)
def test_a_wrong_path_is_refused_with_a_close_one(text: str, message: str) -> None:
    with pytest.raises(OptionError) as caught:
        read_setting(text)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("words", "names", "engine"),
    [
        ("model", ["model"], {}),
        ("model --max-model-len 8192", ["model"], {"max_model_len": 8192}),
        ("--max-model-len=8192 model", ["model"], {"max_model_len": 8192}),
        ("--enforce-eager model", ["model"], {"enforce_eager": True}),
        ("--enforce-eager=false model", ["model"], {"enforce_eager": False}),
        ("--no-enable-prefix-caching model", ["model"], {"enable_prefix_caching": False}),
        ("model --max-logprobs 50", ["model"], {"max_logprobs": 50}),
        ("model --seed -1", ["model"], {"seed": -1}),
        ("model --revision 12", ["model"], {"revision": "12"}),
        ("model --seed 1 --seed 2", ["model"], {"seed": 2}),
        ("a b", ["a", "b"], {}),
    ],
)
def test_options_of_vllm_go_to_the_engine(words: str, names: list[str], engine: dict[str, Any]) -> None:
    found, overrides = read_options(words.split(), OWN)
    assert found == names
    assert engine_options(overrides) == engine


def test_options_of_vllms_server_go_to_ours() -> None:
    _, overrides = read_options(["--host", "0.0.0.0", "--port", "9000", "--served-model-name", "qwen"], OWN)
    assert overrides == [
        Override("http", ("host",), "0.0.0.0"),
        Override("http", ("port",), 9000),
        Override("model", ("id",), "qwen"),
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--max-modl-len 8", "no such option: --max-modl-len; did you mean --max-model-len?"),
        ("--print-confg", "did you mean --print-config?"),
        ("--max_model_len 8 --nothing", "no such option: --nothing"),
        ("-tp 4", "no such option: -tp; options of `vllm serve` are taken by their long names"),
        ("--max-model-len", "--max-model-len needs a value: --max-model-len VALUE"),
        ("--max-model-len --enforce-eager", "--max-model-len needs a value"),
        ("--model x", "name the model as the argument"),
        ("--api-key x", "`saturate keys new` makes keys"),
        ("--data-parallel-size 2", "--set deployment.num_replicas=N"),
        ("--no-max-model-len", "no such option: --no-max-model-len"),
    ],
)
def test_a_wrong_option_is_refused_with_a_close_one(words: str, message: str) -> None:
    with pytest.raises(OptionError) as caught:
        read_options(words.split(), OWN)
    assert message in str(caught.value)


def test_without_vllm_the_checked_options_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed_vllm, "options", dict)
    _, overrides = read_options(["--max-model-len", "8", "--enforce-eager"], OWN)
    assert engine_options(overrides) == {"max_model_len": 8, "enforce_eager": True}
    with pytest.raises(OptionError, match="no such option: --max-logprobs"):
        read_options(["--max-logprobs", "8"], OWN)


def test_no_option_imports_vllm() -> None:
    script = (
        "import sys; from serve_app.models.overrides import read_options;"
        "read_options(['--max-logprobs', '5'], []);"
        "print('vllm' in sys.modules, 'torch' in sys.modules, 'ray' in sys.modules)"
    )
    done = run([sys.executable, "-c", script])
    assert done.stdout == "False False False\n", done.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("engine.max_model_len=long", "engine.max_model_len: Input should be a valid integer, not 'long'"),
        ("engine.dtype=int4", "engine.dtype: Input should be 'auto'"),
        ("batcher.policy=x", "batcher.policy: Input should be 'guaranteed_no_evict'"),
        ("ingress.max_n=0", "args.ingress.max_n: Input should be greater than or equal to 1"),
        ("batches.folder=relative", "args.batches.folder: must be an absolute path"),
        ("engine=5", "engine: Input should be a valid dictionary"),
    ],
)
def test_a_wrong_value_is_refused_by_its_path(text: str, message: str) -> None:
    with pytest.raises(OptionError) as caught:
        check([read_setting(text)])
    assert message in str(caught.value)


def test_values_that_hold_together_pass() -> None:
    check(
        [
            read_setting(text)
            for text in (
                "batches.max_lines=10",
                "batches=null",
                "batches.folder=/b",
                "http.port=x",
                "batcher.goals.ttft_p99_s=1",
            )
        ]
    )


def test_the_last_value_counts() -> None:
    overrides = [read_setting("id=a"), read_setting("id=b")]
    assert value_at(overrides, "model", "id") == "b"
    assert value_at(overrides, "model", "engine", "seed") is None
