"""vLLM's options that follow from the adapters."""

from pathlib import Path

from serve_app.engine.adapter_copies import AdapterFiles
from serve_app.engine.lora_options import WORKER, lora_options
from serve_app.settings.models import LLMSettings
from tests.serve_app.engine.adapters import write_adapter


def test_options_follow_from_the_adapters_unless_the_config_has_them(tmp_path: Path) -> None:
    paths = [str(write_adapter(tmp_path / f"{rank}", rank=rank)) for rank in (4, 20)]
    model = {"id": "demo", "source": "x", "adapters": [{"source": path} for path in paths]}
    options, fetched = lora_options(LLMSettings.model_validate(model), AdapterFiles())
    worker = {"worker_extension_cls": WORKER}
    assert options == {
        "enable_lora": True,
        "max_loras": 2,
        "max_cpu_loras": 8,
        "max_lora_rank": 32,
        **worker,
    }
    assert {id: adapter.rank for id, adapter in fetched.items()} == {"demo:4": 4, "demo:20": 20}
    engine = {"max_loras": 1, "max_lora_rank": 64, "max_cpu_loras": 3}
    options, _ = lora_options(LLMSettings.model_validate(model | {"engine": engine}), AdapterFiles())
    assert options == {"enable_lora": True, **engine, **worker}
    options, _ = lora_options(LLMSettings.model_validate(model | {"simulate": "h100-8b"}), AdapterFiles())
    assert "worker_extension_cls" not in options
    assert lora_options(LLMSettings(id="demo", source="x"), AdapterFiles()) == ({}, {})
