"""The README's examples, run as they stand against the live service."""

import json
import re
import subprocess
import sys

from tests.e2e.service import ROOT, Service


def blocks(language: str) -> list[str]:
    """Return the README's code blocks in a language."""
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def run(command: list[str], service: Service) -> str:
    done = subprocess.run(
        command,
        env=service.env | {"RAY_ADDRESS": "auto"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_curl(service: Service) -> None:
    (script,) = blocks("bash")
    (answer,) = blocks("json")
    printed = run(["bash", "-c", script.replace("http://127.0.0.1:8000", service.url)], service)
    assert json.loads(printed) == json.loads(answer)


def test_python_examples_print_what_their_comments_say(service: Service) -> None:
    examples = blocks("python")
    assert len(examples) == 3
    for code in examples:
        printed = run([sys.executable, "-c", code.replace("http://127.0.0.1:8000", service.url)], service)
        assert printed.splitlines()[-1] == code.rsplit("# ", 1)[1].strip()
