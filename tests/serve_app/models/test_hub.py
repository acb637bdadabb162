"""Models of the hub: the real client against a small server, and the choice between hub and cache."""

import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from huggingface_hub import constants

from serve_app.models.errors import ModelError
from serve_app.models.hub import Hub, HubAwayError, HuggingFaceHub
from tests.serve_app.models.doubles import GB, H100, QWEN_7B, FakeHub, generated, machine, write_model
from tests.serve_app.models.hub_server import running_hub, without_account


def read(id: str, hub: Hub, *settings: str) -> str:
    """Return the line about a model, as `saturate serve` tells it."""
    return generated(id, machine(H100), hub, *settings).line("model")


@pytest.fixture(autouse=True)
def no_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    without_account(monkeypatch, tmp_path)


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with running_hub() as url:
        yield url


def test_a_model_is_read_without_its_weights(endpoint: str, tmp_path: Path) -> None:
    assert read("org/open", HuggingFaceHub(endpoint)) == (
        "org/open: qwen2, 15.0 GB of weights, downloaded at the first start"
    )
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


@pytest.mark.parametrize(
    ("id", "revision", "message"),
    [
        ("org/none", None, r"no model org/none, .*huggingface\.co/org/none.*HF_TOKEN.*hf auth login"),
        (
            "org/gated",
            None,
            r"org/gated is gated: accept its terms on https://.*HF_TOKEN or run `hf auth login`",
        ),
        ("org/open", "no-such-revision", r"org/open has no revision 'no-such-revision'"),
        ("org/bare", None, r"org/bare has no config\.json"),
        ("org/forbidden", None, r"org/forbidden: the Hugging Face hub answers 403"),
        ("org/broken", None, r"org/broken: the Hugging Face hub can't be reached .*not downloaded before"),
        ("org/cut", None, r"org/cut: the Hugging Face hub can't be reached"),
        ("org/--bad", None, r"'org/--bad' is not a Hugging Face id"),
    ],
)
def test_an_error_of_the_hub_is_one_line(endpoint: str, id: str, revision: str | None, message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        read(id, HuggingFaceHub(endpoint), *([f"engine.revision={revision}"] if revision else []))
    assert "\n" not in str(caught.value)


def test_a_token_without_access_is_told_apart(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    with pytest.raises(ModelError, match=r"your Hugging Face token has no access"):
        read("org/gated", HuggingFaceHub(endpoint))


def test_a_hub_that_is_down_is_away() -> None:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        # Bound, and nothing listens.
        hub = HuggingFaceHub(f"http://127.0.0.1:{probe.getsockname()[1]}")
        with pytest.raises(HubAwayError, match="can't be reached"):
            hub.sizes("org/open", None)


def test_offline_mode_is_told(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE is set, and the model was not downloaded before"):
        read("org/open", HuggingFaceHub(endpoint))


def test_what_was_downloaded_before_is_found(endpoint: str) -> None:
    hub = HuggingFaceHub(endpoint)
    assert hub.cached("org/open", None) is None
    path = hub.config("org/open", None)
    assert hub.cached("org/open", None) == path.parent


def test_a_model_in_the_cache_needs_no_hub(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "snapshot", QWEN_7B, 15 * GB)
    hub = FakeHub({}, away=True, cache={"org/model": folder})
    assert read("org/model", hub) == "org/model: qwen2, 15.0 GB of weights"


def test_half_a_model_in_the_cache_is_told(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "snapshot", QWEN_7B, 12 * GB, files=3)
    (folder / "model-00001-of-00003.safetensors").unlink()
    with pytest.raises(
        ModelError, match=r"can't be reached, and the earlier download is incomplete: .*1 of 3"
    ):
        read("org/model", FakeHub({}, away=True, cache={"org/model": folder}))
