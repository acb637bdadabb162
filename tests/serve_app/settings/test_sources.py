from pathlib import Path

from serve_app.settings.sources import DEMO_MODEL
from tests.serve_app.settings.helpers import one, only


def test_the_demo_model_is_a_directory_of_this_package() -> None:
    path = Path(only(one(source=DEMO_MODEL)).path)
    assert (path / "config.json").is_file()
    assert path.parents[1].name == "serve_app"


def test_any_other_source_is_passed_to_vllm() -> None:
    assert only(one(source="Qwen/Qwen2.5-7B-Instruct")).path == "Qwen/Qwen2.5-7B-Instruct"
