"""The file of a learned profile, and its readers."""

from datetime import UTC, datetime
from pathlib import Path

from serve_app.settings.models import LLMSettings
from serve_app.settings.schema import parse
from serve_app.simulation.profiles import read_profile
from serve_app.stats import SchedulerFigures, StepSeconds
from serve_app.tuning.profiling import file_of, profile_of, source_of
from serve_app.tuning.service import ModelFacts

FACTS = ModelFacts("org/model-1", 32_768, 1, 94_000, 256, 0, 9, max_num_batched_tokens=2048, load_s=12.5)
STEP = StepSeconds(base=0.05123456, prompt_token=0.0002512345, sequence=0.0, context_token=0.00000019123)
LEARNED = SchedulerFigures(steps=1_234, step_error=0.031, step_s=STEP)


def test_a_plan_and_a_config_read_the_file(tmp_path: Path) -> None:
    source = source_of("http://there", datetime(2026, 11, 23, 9, 30, tzinfo=UTC))
    made = profile_of(FACTS, LEARNED, "my-gpu", source)
    path = tmp_path / "my-gpu.yaml"
    path.write_text(file_of(made, LEARNED))
    assert "Learned from 1,234 steps, mean error 3.1%" in path.read_text()
    assert read_profile(str(path)) == made
    (model,) = parse({"models": [{"id": "m", "simulate": str(path)}]}).models
    assert isinstance(model, LLMSettings)
    assert model.simulate == made
    assert (made.base_ms, made.per_prefill_token_ms, made.per_kv_token_ms) == (51.23, 0.2512, 0.0001912)
    assert (made.kv_tokens, made.max_model_len, made.max_num_seqs) == (94_000, 32_768, 256)
    assert (made.max_num_batched_tokens, made.load_s) == (2048, 12.5)
    assert made.source == "learned by the engine at http://there, 2026-11-23 09:30 UTC"


def test_a_window_below_the_context_bounds_it() -> None:
    facts = ModelFacts("m", 32_768, 1, 10_000, 256, 0, 9)
    assert profile_of(facts, LEARNED, "m", "here").max_model_len == 10_000
