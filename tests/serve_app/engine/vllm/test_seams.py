"""The guard of vLLM's names, before a model loads."""

# An engine has imported vLLM by then, and the imports are no part of a test's CPU time.
import serve_app.engine.vllm.engine  # noqa: F401
from serve_app.engine.vllm import seams


def test_the_installed_vllm_has_all_names() -> None:
    seams.check()
