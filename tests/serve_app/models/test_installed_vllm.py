"""What is read from the files of the installed vLLM."""

import sys

import pytest

from serve_app.models import installed_vllm
from tests.progress import run


def test_options_are_known_with_their_flags() -> None:
    options = installed_vllm.options()
    assert len(options) > 100
    assert not options["max_model_len"].flag
    assert not options["hf_overrides"].flag
    assert options["enforce_eager"].flag
    # One that can be left to vLLM is a flag too.
    assert options["enable_prefix_caching"].flag
    # One of the OpenAI server.
    assert options["enable_auto_tool_choice"].flag


def test_architectures_are_known() -> None:
    assert {"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen2_5_VLForConditionalGeneration"} <= (
        installed_vllm.architectures()
    )
    assert "NewForCausalLM" not in installed_vllm.architectures()


def test_the_build_is_known() -> None:
    assert installed_vllm.build() in ("cpu", "gpu")


def test_vllm_is_not_imported() -> None:
    script = (
        "import sys; from serve_app.models import installed_vllm as vllm;"
        "vllm.options(), vllm.architectures(), vllm.parsers('reasoning'), vllm.build();"
        "print('vllm' in sys.modules, 'torch' in sys.modules)"
    )
    done = run([sys.executable, "-c", script])
    assert done.stdout == "False False\n", done.stderr


def test_without_vllm_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed_vllm, "folder", lambda: None)
    assert installed_vllm.options.__wrapped__() == {}
    assert installed_vllm.architectures.__wrapped__() == frozenset()
    assert installed_vllm.parsers("reasoning") == frozenset()
