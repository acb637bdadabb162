"""The guard of vLLM's names, before a model loads."""

import pytest

# An engine has imported vLLM by then, and the imports are no part of a test's CPU time.
import serve_app.engine.vllm.engine  # noqa: F401
from serve_app.engine.vllm import seams


def test_the_installed_vllm_has_all_names() -> None:
    seams.check()


def test_what_has_moved_is_named_with_its_use() -> None:
    lost = {
        "nobody": seams.Seam("vllm.config", "nothing"),
        "AsyncLLM": seams.Seam(
            "vllm.v1.engine.async_llm", "requests", "add_request output_processor moved_away"
        ),
        "elsewhere": seams.Seam("vllm.no.such.module", "another thing"),
    }
    with pytest.raises(RuntimeError) as caught:
        seams.check(lost)
    message = str(caught.value)
    for expected in (
        "no vllm.config.nobody (nothing)",
        "no vllm.v1.engine.async_llm.AsyncLLM.moved_away (requests)",
        "no vllm.no.such.module.elsewhere (another thing)",
    ):
        assert expected in message
    assert "abort" not in message
    assert "output_processor" not in message


def test_a_name_is_found_where_it_was_before() -> None:
    seams.check({"VllmConfig": seams.Seam("vllm.new_home", "a config", "model_config", before="vllm.config")})


def test_what_a_version_has_ended_is_not_looked_for() -> None:
    seams.check({"nobody": seams.Seam("vllm.config", "nothing", ends=seams.installed())})
    with pytest.raises(RuntimeError, match="nobody"):
        seams.check({"nobody": seams.Seam("vllm.config", "nothing", ends=(99, 0))})


def test_a_name_that_is_no_seam_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="nobody"):
        seams.nobody  # noqa: B018
