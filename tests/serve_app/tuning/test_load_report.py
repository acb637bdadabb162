"""The words of a tuning, and its JSON."""

import json

from serve_app.tuning.tune_report import BesideBatch, body, text
from serve_app.tuning.tuner import Edge
from tests.serve_app.tuning.load_results import step, tuning


def test_the_text_says_what_holds_and_what_to_change() -> None:
    found = tuning()
    said = text(found)
    assert "m: 512 tokens in, 128 out; ttft_p99<0.5, latency_p95<3" in said
    assert "highest rate: 20 requests/s (21 requests/s breaks): 20 requests/s within all bounds" in said
    (row,) = [line for line in said.splitlines() if line.startswith("▶")]
    assert row.endswith("holds")
    assert [line for line in said.splitlines() if line.endswith("ttft_p99")]
    assert "settings for 19 requests/s, in deployments:" in said
    assert "      max_running: 40\n      max_queue_size: 15\n" in said
    assert "target_ongoing_requests: 38 per replica" in said
    assert "      goals:\n        ttft_p99_s: 0.5\n" in said


def test_the_text_of_what_was_applied_and_of_batch_work() -> None:
    found = tuning()
    found.applied = (step(19.0, ttft=0.7), step(18.0))
    found.batch = BesideBatch(step(10.0, ttft=0.7), 1234.0)
    said = text(found)
    assert "with these settings, at 18 requests/s: the goals hold" in said
    assert (
        "beside live traffic of 10 requests/s batch work has 1,234 tokens/s, and its goals don't hold: "
        "ttft_p99" in said
    )


def test_the_text_of_an_edge_that_was_not_found() -> None:
    found = tuning()
    broken = step(1.0, ttft=0.7)
    found.open = Edge(None, broken, (broken,), (broken,))
    assert "highest rate: none holds; 1 requests/s breaks" in text(found)


def test_the_json_is_json_where_requests_failed() -> None:
    found = tuning()
    found.single = (step(30.0, failed=True),)
    read = json.loads(json.dumps(body(found), allow_nan=False))
    assert read["highest_rate"]["held"]["value"] == 20.0
    assert read["highest_rate"]["broken"] == 21.0
    assert read["choice"]["batcher"] == {
        "max_running": 40,
        "max_queue_size": 15,
        "goals": {"ttft_p99_s": 0.5},
    }
    last = read["steps"][-1]
    assert last["failed"] == last["requests"] == 300
    assert last["seconds"]["ttft_p99"] is None
    assert last["seconds"]["latency_p95"] is None
