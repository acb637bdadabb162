"""No field of any route ends an engine, gets a fault of the service, or changes the answers of neighbours."""

import json
import sys
from typing import Any

import pytest

from serve_app.api.routes import GENERATE, GENERATION
from tests.progress import run

MEMORY = 1 << 30
"""Bytes that a process of an engine may take for six hostile requests at once, and their neighbours."""

ASKED = {"2": 700, "all": 1500}
"""Requests at least, by the number of values for each field."""


@pytest.mark.parametrize("values", ["2", pytest.param("all", marks=pytest.mark.long)])
def test_an_engine_and_its_neighbours_outlive_every_value_of_every_field(values: str) -> None:
    done = run([sys.executable, "-m", "tests.e2e.hostile_fields", values])
    assert done.returncode == 0, done.stderr[-3000:]
    found: Any = json.loads(done.stdout.splitlines()[-1])
    assert not found["died"], found
    assert found["faults"] == []
    assert found["wrong"] == []
    assert found["left"] == 0
    assert max(found["memory"]) < MEMORY, found["memory"]
    # The config names no caller that may move KV caches.
    for path in set(found["transfers"]) & set(GENERATION) - {"/v1/messages/count_tokens"}:
        answers = found["transfers"].pop(path)
        assert all(each.startswith("400") and "transfer_keys" in each for each in answers), answers
    # vLLM keeps the fields of no other route.
    assert {*found["transfers"]} == {GENERATE, "/tokenize", "/detokenize", "/v1/messages/count_tokens"}
    # Most values are wrong, and all others have an answer.
    assert found["asked"] > ASKED[values]
    assert found["statuses"]["400"] > found["statuses"]["200"] > 100, found["statuses"]
    assert found["neighbours"] > 20
