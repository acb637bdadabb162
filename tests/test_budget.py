"""The limits on the time of tests: few tests are slow, and the quick ones import neither vLLM nor Ray."""

import sys
from pathlib import Path

from tests.budget import slow
from tests.progress import run

MOST = 40
"""Tests of the short run that may be slow."""

COLLECT = """
import sys, pytest
code = pytest.main(["--collect-only", "-qq", "--no-summary", "@tests/quick.txt"])
assert code == 0, code
print(*sorted({"ray", "vllm"} & sys.modules.keys()))
"""


def test_few_tests_are_slow_and_each_has_its_reason() -> None:
    assert len(slow()) <= MOST
    assert all(slow().values())


def test_the_quick_tests_import_neither_vllm_nor_ray() -> None:
    done = run([sys.executable, "-c", COLLECT], cwd=Path(__file__).parents[1], check=True)
    assert done.stdout.splitlines()[-1] == ""
