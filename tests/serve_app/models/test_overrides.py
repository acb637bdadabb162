"""Values by `--set`; tests/serve_app/engine/vllm/test_parser.py has those by vLLM's own options."""

import pytest

from serve_app.api.protocol import JSON
from serve_app.models.errors import OptionError
from serve_app.models.overrides import read_options, read_setting

OWN = ["--set", "--print-config", "--verbose"]


@pytest.mark.parametrize(
    ("text", "part", "place", "value"),
    [
        ("engine.max_model_len=8192", "model", "engine.max_model_len", 8192),
        ("engine.revision=1234", "model", "engine.revision", "1234"),
        ("engine.enforce_eager=true", "model", "engine.enforce_eager", True),
        ("engine.quantization=null", "model", "engine.quantization", None),
        ("engine.max_logprobs=50", "model", "engine.max_logprobs", 50),
        ("engine.hf_overrides.a=1", "model", "engine.hf_overrides.a", 1),
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
        ("http.port=abc", "--set http.port: Input should be a valid integer"),
        ("http.port=true", "--set http.port: must be a port from 1 to 65535, not True"),
        ("http.port=81110", "--set http.port: must be a port from 1 to 65535, not 81110"),
    ],
)
def test_a_wrong_path_is_refused_with_a_close_one(text: str, message: str) -> None:
    with pytest.raises(OptionError) as caught:
        read_setting(text)
    assert message in str(caught.value)


def test_words_without_options_ask_nobody() -> None:
    def ask(question: JSON) -> JSON:
        raise AssertionError(question)

    typed = [read_setting("engine.max_model_len=8")]
    assert read_options(["a", "b"], OWN, typed, ask) == (["a", "b"], [])
    with pytest.raises(OptionError, match="--api-key: `saturate keys new` makes keys"):
        read_options(["a", "--api-key", "x"], OWN, ask=ask)
