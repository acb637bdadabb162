"""The README of the library: each block of Python is a script that runs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import batcher

README = Path(batcher.__file__).with_name("README.md")
BLOCKS = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)


def test_there_are_examples() -> None:
    text = "\n".join(BLOCKS)
    for name in ("DynamicBatcher", "TokenBatcher", "ContinuousBatcher", "ThreadClient"):
        assert name in text


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_a_block_runs(block: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", block],
        cwd=README.parents[1],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout
