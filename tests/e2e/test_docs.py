"""The examples of the pages, run as they stand against the live service."""

import json
import os
import re
import sys
from pathlib import Path

import pytest

from tests.e2e.service import ROOT, Service
from tests.pages import LOCAL_URL, Block, select

EXAMPLES = select("run", "service")
SCRIPTS = [block for block in select("run", "script") if block.language == "bash"]
NUMBER = re.compile(r"\d+(?:\.\d+)?")


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the command `saturate` of this working tree, which may not be installed."""
    folder = tmp_path_factory.mktemp("programs")
    command = folder / "saturate"
    command.write_text(
        f"#!{sys.executable}\nimport sys\nfrom serve_app.cli.main import main\n\nsys.exit(main())\n"
    )
    command.chmod(0o755)
    return folder


def agrees(printed: str, shown: str, language: str) -> bool:
    """Return whether a program has printed what a page shows: JSON, or text with numbers 1% off at most.

    How many answers of the demo model are right depends, by one or two, on how they fell into batches.
    """
    if language == "json":
        return bool(json.loads(printed) == json.loads(shown))
    last = "\n".join(printed.splitlines()[-len(shown.splitlines()) :])
    numbers = [[float(number) for number in NUMBER.findall(text)] for text in (last, shown)]
    same = NUMBER.sub("N", last).split() == NUMBER.sub("N", shown).split()
    return same and numbers[0] == pytest.approx(numbers[1], rel=0.01)


def run_bash(block: Block, service: Service, programs: Path, folder: Path) -> str:
    """Run a block in a folder in which the repository's files are found, and return what it printed."""
    script = block.text.replace(LOCAL_URL, service.url)
    (folder / "serve_app").symlink_to(ROOT / "serve_app")
    path = os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]])
    return service.run(["env", f"PATH={path}", "bash", "-ec", f"cd {folder}\n{script}"])


@pytest.mark.parametrize("block", [b for b in EXAMPLES if b.language == "bash"] + SCRIPTS, ids=str)
def test_bash_examples_print_what_the_page_says(
    block: Block, service: Service, programs: Path, tmp_path: Path
) -> None:
    printed = run_bash(block, service, programs, tmp_path)
    if block.output:
        language = "json" if block.output.lstrip().startswith("{") else "text"
        assert agrees(printed, block.output, language), f"{block}\n{printed}"


@pytest.mark.parametrize("block", [b for b in EXAMPLES if b.language == "python"], ids=str)
def test_python_examples_print_what_their_comments_say(block: Block, service: Service) -> None:
    printed = service.run([sys.executable, "-c", block.text.replace(LOCAL_URL, service.url)])
    assert printed.splitlines()[-1] == block.text.rsplit("# ", 1)[1].strip(), str(block)


def test_every_kind_of_example_is_run() -> None:
    assert {block.language for block in EXAMPLES} == {"bash", "python"}
    assert sum(block.language == "python" for block in EXAMPLES) >= 5
