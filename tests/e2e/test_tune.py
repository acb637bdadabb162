"""`saturate tune` against replicas on simulated devices, whose limits are known."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.e2e.service import ROOT, Service
from tests.progress import ANSWER_S, run

pytestmark = pytest.mark.long

GOAL = "ttft_p99<1,tpot_p99<0.15"

PROFILE = {
    # Steps are long, so that two cores keep up with client and service.
    "name": "slow",
    "base_ms": 40.0,
    "per_prefill_token_ms": 0.5,
    "per_sequence_ms": 2.0,
    "per_kv_token_ms": 0.0,
    "load_s": 0.1,
    "sleep_s": 0.1,
    "wake_s": 0.1,
    "kv_tokens": 20_000,
    "max_model_len": 2_048,
    "max_num_seqs": 64,
}

RUN_S = 900.0
"""Seconds without much work of a run."""


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """The service of configs/simulated.yaml with one replica of a slow device, and goals."""
    folder = tmp_path_factory.mktemp("tuned")
    profile = folder / "slow.yaml"
    profile.write_text(yaml.safe_dump(PROFILE))
    config = yaml.safe_load((ROOT / "configs/simulated.yaml").read_text())
    (app,) = config["applications"]
    (model,) = app["args"]["models"]
    model["simulate"] = str(profile)
    model["batcher"] |= {"goals": {"ttft_p99_s": 2.0}}
    for deployment in app["deployments"]:
        deployment |= {"num_replicas": 1, "ray_actor_options": {"num_cpus": 0}}
    service = Service(config, folder)
    yield service
    service.stop()
    assert service.processes() == [], "processes are left behind"


def tune(service: Service, folder: Path, *arguments: object, expected: int = 0) -> Any:
    """Run the command; return its JSON."""
    path = folder / "tuned.json"
    command = [sys.executable, "-m", "serve_app.cli", "tune", service.url, "--json", str(path)]
    command += ["--goal", GOAL, "--input", "64:32", "--output", "32:8", *map(str, arguments)]
    # The command waits for the service most of the time: it hardly works, and has some ten loads of 30 s.
    done = run(command, env=service.env, still_s=RUN_S)
    assert done.returncode == expected, done.stdout + done.stderr
    print(done.stdout, done.stderr)
    return json.loads(path.read_text()) if path.exists() else None


def replica(service: Service) -> Any:
    """Return the statistics of the only replica."""
    stats = httpx.get(f"{service.url}/stats", headers={"accept": "application/json"}, timeout=ANSWER_S).json()
    (found,) = stats["models"]["simulated"]["replicas"]
    return found


def test_the_highest_load_is_found_and_its_settings_hold(simulated: Service, tmp_path: Path) -> None:
    before = simulated.pids("VLLM::EngineCore")
    found = tune(simulated, tmp_path, "--seconds", 8, "--apply")
    # Of n answers of 32 tokens n / 32 end in a step, and as many prompts of 32 ms begin: it takes
    # 40 ms + 3 ms * n. At the bound of 0.15 s per token n is 37; some answers have more beside them.
    assert 8 < found["highest"]["load"] < 50
    assert found["applied"]["holds"]
    goals = found["settings"]["batcher"]["goals"]
    stats = replica(simulated)
    assert stats["goals"] == {"ttft_p99_s": 1.0, "tpot_p99_s": 0.15} == goals
    # Nothing was restarted, and nothing of the load is left.
    assert simulated.pids("VLLM::EngineCore") == before
    assert (stats["batcher"]["running"], stats["batcher"]["queue_depth"]) == (0, 0)
    assert not [each for each in found["warnings"] if "other requests" in each]


def test_the_highest_rate_is_below_the_capacity(simulated: Service, tmp_path: Path) -> None:
    found = tune(simulated, tmp_path, "--seconds", 6, "--over", "rate")
    # 37 answers at once of 32 steps of 0.15 s are 7.7 requests per second.
    assert 1 < found["highest"]["load"] < 9


def test_a_goal_below_a_lone_request_is_told(simulated: Service, tmp_path: Path) -> None:
    found = tune(simulated, tmp_path, "--goal", "ttft_p99<0.01", "--seconds", 5, expected=3)
    assert found["highest"] is None
    assert [load["load"] for load in found["loads"]] == [1]
