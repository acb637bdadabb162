"""Values by `--set` and by vLLM's own options."""

import sys
from pathlib import Path
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
        ("engine.max_modl_len=1", "there is no 'max_modl_len'; did you mean max_model_len?"),
        ("engne.max_model_len=1", "--set engne.max_model_len: there is no 'engne'; did you mean engine?"),
        ("batcher.goals.ttft=1", "there is no 'ttft'; there are tpot_p99_s, ttft_p99_s"),
        ("sampling.xyz=1", "there is no 'xyz'; `saturate schema` has them all"),
        ("http.prot=1", "did you mean port?"),
        ("deployment.replicas=1", "did you mean num_replicas?"),
        ("http=1", "a section; name one of its values"),
        ("id.x=1", "there is nothing below 'x'"),
        ("engine.max_model_len", "write PATH=VALUE, such as"),
        ("=1", "write PATH=VALUE"),
        ("engine.max_model_len={", "is not YAML"),
        ("source=x", "there is no 'source'"),
        ("models=x", "there is no 'models'"),
        ("engine.api_key=x", "`saturate keys new` makes keys"),
        (
            "engine.foo=1",
            "--set engine.foo: there is no 'foo'; `vllm serve --help=all` has the options of the engine",
        ),
        ("engine.extra.max_logprbs=1", "there is no 'max_logprbs'; did you mean max_logprobs?"),
        ("engine.ssl_keyfile=k.pem", "the service speaks plain HTTP"),
        ("engine.extra.lora_modules=x", "set adapters of the model instead"),
        ("engine.max_logprobs=many", "--set engine.max_logprobs: must be a whole number, not 'many'"),
        ("engine.kv_cache_dtype=fp7", "--set engine.kv_cache_dtype: must be one of auto, float16, "),
        ("http.port=abc", "--set http.port: Input should be a valid integer"),
        ("http.port=true", "--set http.port: must be a port from 1 to 65535, not True"),
        ("http.port=81110", "--set http.port: must be a port from 1 to 65535, not 81110"),
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
        ("model -tp 2 -pp 3", ["model"], {"tensor_parallel_size": 2, "pipeline_parallel_size": 3}),
        ("model -q fp8", ["model"], {"quantization": "fp8"}),
        ("model --max_model_len=-1", ["model"], {"max_model_len": -1}),
        ("model --max-model-len auto", ["model"], {"max_model_len": -1}),
        (
            "model --max-model-len 8k --max-num-batched-tokens 1K",
            ["model"],
            {"max_model_len": 8000, "max_num_batched_tokens": 1024},
        ),
        ("model -O3", ["model"], {"optimization_level": 3}),
        ("model -O 3", ["model"], {"optimization_level": 3}),
        ("model -O=3", ["model"], {"optimization_level": 3}),
        ("model --no-enforce-eager", ["model"], {"enforce_eager": False}),
        ("model --no-async-scheduling", ["model"], {"async_scheduling": False}),
        ("model --disable-log-stats", ["model"], {"disable_log_stats": True}),
        ("model --kv-cache-dtype fp8", ["model"], {"kv_cache_dtype": "fp8"}),
        ("model --max-log-len 5", ["model"], {"max_log_len": 5}),
        ("--cudagraph-capture-sizes 1 2 4 --seed 1", [], {"cudagraph_capture_sizes": [1, 2, 4], "seed": 1}),
        ("--allowed-media-domains a.com b.com", [], {"allowed_media_domains": ["a.com", "b.com"]}),
        ('--speculative-config {"model":"x"}', [], {"speculative_config": {"model": "x"}}),
        (
            "--speculative-config.model x --speculative_config.a.b 3 -sc.l+ p,q --speculative-config.l+=r",
            [],
            {"speculative_config": {"model": "x", "a": {"b": 3}, "l": ["p", "q", "r"]}},
        ),
        ("-cc.mode 3", [], {"compilation_config": {"mode": 3}}),
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


def test_adapters_and_origins_of_vllms_server_go_to_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "capitals").mkdir()
    words = ["--lora-modules", "capitals=capitals", '{"name": "two", "path": "org/two"}']
    _, overrides = read_options([*words, "--allowed-origins", '["https://a.example"]'], OWN)
    assert overrides == [
        Override(
            "model",
            ("adapters",),
            [{"id": "capitals", "source": f"{tmp_path}/capitals"}, {"id": "two", "source": "org/two"}],
        ),
        Override("args", ("ingress", "allow_origins"), ["https://a.example"]),
    ]
    check(overrides)
    # A chat template is read by the engine, in another directory.
    (tmp_path / "chat.jinja").touch()
    _, (template,) = read_options(["--chat-template", "chat.jinja"], OWN)
    assert template.value == f"{tmp_path}/chat.jinja"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--max-modl-len 8", "no such option: --max-modl-len; did you mean --max-model-len?"),
        ("--print-confg", "did you mean --print-config?"),
        ("--max_model_len 8 --nothing", "no such option: --nothing"),
        ("--tp 4", "no such option: --tp; did you mean -tp?"),
        ("-tpx 4", "no such option: -tpx; did you mean -tp"),
        ("--no-headless", "no such option: --no-headless"),
        ("--port abc", "--port: Input should be a valid integer"),
        ("--served-model-name a b", "--served-model-name: one name, not 2: "),
        ("--lora-modules capitals", "--lora-modules: write NAME=PATH, not 'capitals'"),
        ('--lora-modules {"name":1}', "--lora-modules: write NAME=PATH, not "),
        ("--max-logprobs many", "--max-logprobs: must be a whole number, not 'many'"),
        ("--logprobs-mode x", "--logprobs-mode: must be one of raw_logits, raw_logprobs, "),
        ("--override-generation-config x", "--override-generation-config: must be a mapping, not 'x'"),
        ("--cpu-offload-gb x", "--cpu-offload-gb: must be a number, not 'x'"),
        ("--speculative-config 1", "--speculative-config: must be a mapping, not 1"),
        ("--speculative-config.a 1 --speculative-config.a.b 1", "a already has a value"),
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
        ("ingress.max_n=0", "args.ingress.max_n: Input should be greater than or equal to 1"),
        ("batches.folder=relative", "args.batches.folder: must be an absolute path"),
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
                "http.port=9000",
                "batcher.goals.ttft_p99_s=1",
            )
        ]
    )


def test_the_last_value_counts() -> None:
    overrides = [read_setting("id=a"), read_setting("id=b")]
    assert value_at(overrides, "model", "id") == "b"
    assert value_at(overrides, "model", "engine", "seed") is None
