"""The README's examples, run as they stand against the live service."""

import json
import os
import re
import sys
from pathlib import Path

import pytest

from tests.e2e.service import ROOT, Service


def blocks(language: str) -> list[str]:
    """Return the README's code blocks in a language."""
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def test_curl(service: Service) -> None:
    script, _ = blocks("bash")
    (answer,) = blocks("json")
    printed = service.run(["bash", "-c", script.replace("http://127.0.0.1:8000", service.url)])
    assert json.loads(printed) == json.loads(answer)


def test_a_dataset_is_run_and_scored(service: Service, tmp_path: Path) -> None:
    _, script = blocks("bash")
    (score,) = blocks("text")
    script = script.replace("http://127.0.0.1:8000", service.url).replace(
        "serve_app/demo/", f"{ROOT}/serve_app/demo/"
    )
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    printed = service.run(["bash", "-ec", f"cd {tmp_path}; PATH={path}; {script}"])
    # What is right is arithmetic; how many are depends, by one or two, on how they fell into batches.
    pattern = r"accuracy (\d+\.\d)%: \d+ of 500 right"
    (said,) = re.findall(pattern, score)
    (reached,) = re.findall(pattern, printed.splitlines()[-1])
    assert float(reached) == pytest.approx(float(said), abs=1.0)


def test_python_examples_print_what_their_comments_say(service: Service) -> None:
    examples = blocks("python")
    assert len(examples) == 5
    for code in examples:
        printed = service.run([sys.executable, "-c", code.replace("http://127.0.0.1:8000", service.url)])
        assert printed.splitlines()[-1] == code.rsplit("# ", 1)[1].strip()
