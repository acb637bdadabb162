"""The file of a measured profile, and its readers."""

from datetime import UTC, datetime
from pathlib import Path

import pytest

from serve_app.settings.models import LLMSettings
from serve_app.settings.schema import parse
from serve_app.simulation.profiles import read_profile
from serve_app.tuning.profiling import Fit, ObservationError, file_of, profile_of, source_of
from serve_app.tuning.service import ModelFacts

FACTS = ModelFacts("org/model-1", 32_768, 1, 94_000, 256, 0, 9, load_s=12.5)
PARAMETERS = {
    "base_ms": 51.23456,
    "per_prefill_token_ms": 0.2512345,
    "per_sequence_ms": 0.0,
    "per_kv_token_ms": 0.00019123,
    "request_ms": 6.5,
}
FIT = Fit(PARAMETERS, 64, [], 0.9991, 0.031)


def test_a_plan_and_a_config_read_the_file(tmp_path: Path) -> None:
    source = source_of("http://there", datetime(2026, 11, 23, 9, 30, tzinfo=UTC))
    made = profile_of(FIT, [], FACTS, "my-gpu", 2048, source)
    path = tmp_path / "my-gpu.yaml"
    path.write_text(file_of(made, FIT))
    assert "R² 0.9991, largest error 3.1%" in path.read_text()
    assert read_profile(str(path)) == made
    (model,) = parse({"models": [{"id": "m", "simulate": str(path)}]}).models
    assert isinstance(model, LLMSettings)
    assert model.simulate == made
    assert (made.base_ms, made.per_kv_token_ms, made.request_ms) == (51.23, 0.0001912, 6.5)
    assert (made.kv_tokens, made.max_model_len, made.max_num_seqs) == (94_000, 32_768, 256)
    assert (made.max_num_batched_tokens, made.hidden_prefill_tokens, made.load_s) == (2048, 64, 12.5)
    assert made.source == "measured at http://there, 2026-11-23 09:30 UTC"


def test_a_window_below_the_context_bounds_it() -> None:
    facts = ModelFacts("m", 32_768, 1, 10_000, 256, 0, 9)
    assert profile_of(FIT, [], facts, "m", 2048, "here").max_model_len == 10_000


def test_a_step_without_time_is_no_profile() -> None:
    with pytest.raises(ObservationError, match="no base_ms"):
        profile_of(Fit(PARAMETERS | {"base_ms": 0.0}, 0, [], 1.0, 0.0), [], FACTS, "m", 2048, "here")
