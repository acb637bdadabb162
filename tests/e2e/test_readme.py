"""The README's examples, run as they stand against the live service."""

import json
import re
import sys

from tests.e2e.service import ROOT, Service


def blocks(language: str) -> list[str]:
    """Return the README's code blocks in a language."""
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def test_curl(service: Service) -> None:
    (script,) = blocks("bash")
    (answer,) = blocks("json")
    printed = service.run(["bash", "-c", script.replace("http://127.0.0.1:8000", service.url)])
    assert json.loads(printed) == json.loads(answer)


def test_python_examples_print_what_their_comments_say(service: Service) -> None:
    examples = blocks("python")
    assert len(examples) == 3
    for code in examples:
        printed = service.run([sys.executable, "-c", code.replace("http://127.0.0.1:8000", service.url)])
        assert printed.splitlines()[-1] == code.rsplit("# ", 1)[1].strip()
