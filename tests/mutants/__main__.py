"""Put faults into the product, one at a time, and count how many the tests catch: `make mutants`.

The tests run in a copy of a commit's tree. First each test runs once, to see which functions it reaches. Then
each fault of `faults.txt` gets the tests that reach its function: those of its room, and quick ones of other
rooms, until one fails. The whole suite isn't run for each fault, and no service is started.
"""

import argparse
import ast
import ctypes
import gc
import importlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import psutil

from tests.mutants import faults
from tests.mutants.faults import ROOMS, Fault

LIST = Path(__file__).with_name("faults.txt")
HOME = Path.cwd() / ".mutants"

TESTS = {room: tuple(f"tests/{folder}" for folder in folders) for room, folders in ROOMS.items()}
"""The folders of each room's tests."""

SKIPPED = {
    # They fail in a changed tree for another reason.
    "tests/serve_app/test_import_order.py",
    # A minute or more each: measurements, whole starts, and the grammars of vLLM.
    *("tests/batcher/test_overcommitment.py", "tests/serve_app/engine/vllm/test_overcommitment.py"),
    *("tests/serve_app/cli/test_foreground.py", "tests/serve_app/dataset/test_memory.py"),
    *("tests/serve_app/engine/test_grammars.py", "tests/serve_app/engine/vllm/test_grammar_compiler.py"),
}
"""Files of tests that aren't run."""

MODULES = "modules"

CHUNK = 12
"""Files of tests that are run together to see what they reach."""

LIBRARIES = {
    *("vllm", "ray", "torch", "transformers", "openai", "httpx", "sqlalchemy", "pydantic", "starlette"),
    *("hypothesis", "pytest", "_pytest", "pytest_asyncio", "xgrammar", "fastapi", "uvicorn", "numpy"),
    *("fsspec", "aiohttp", "msgspec", "click", "rich", "ruamel", "yaml", "jsonschema", "opentelemetry"),
}
"""Packages that are imported once; each fault gets a fork of the process that has them."""

OURS = {"batcher", "serve_app", "tests"}

OWN_S, OTHERS_S = 15.0, 5.0
"""Most CPU seconds of tests for a fault: of its own room, and of other rooms."""

STILL_S, IDLE, BUSY_S = 30.0, 0.01, 20.0
"""A test hangs that has used less than a hundredth of a core for 30 seconds, or 20 seconds of CPU more than
five times its usual: one that waits for a busy core does neither."""

LOOK_EACH = 20
"""Turns of a tenth of a second between two looks at the CPU that was used."""

CAUGHT = {"caught", "hung"}

PR_SET_CHILD_SUBREAPER = 36

REACH = """
import os
_seen, _file = set(), None
def reached(place):
    global _file
    test = os.environ._data.get(b"PYTEST_CURRENT_TEST", b"")
    if (place, test) not in _seen and "MUTANTS_REACH" in os.environ:
        _seen.add((place, test))
        _file = _file or os.open(os.environ["MUTANTS_REACH"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        own = str(os.getpid()) == os.environ.get("MUTANTS_PID")
        os.write(_file, f"{place}\\t{int(own)}\\t{test.decode()}\\n".encode())
"""
"""A module that each function calls while it is found out which tests reach it."""


class Plugin:
    """A pytest plugin: it chooses and orders the tests, and reports them to the process that counts.

    Args:
        report: Where it reports, a JSON line each.
        tests: The tests in their order; empty: all.
    """

    def __init__(self, report: Any, tests: list[str]) -> None:
        self._report = report
        self._places = {test: place for place, test in enumerate(tests)}
        self._began_s = 0.0

    def _tell(self, **what: Any) -> None:
        self._report.write(json.dumps(what) + "\n")
        self._report.flush()

    def pytest_sessionstart(self) -> None:
        """Have Hypothesis stop at the first failure, and use the same examples in each run."""
        from hypothesis import Phase, settings

        phases = (Phase.explicit, Phase.generate)
        settings.register_profile("mutants", settings(), phases=phases, database=None)
        settings.load_profile("mutants")

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Keep the chosen tests, in their order."""
        if self._places:
            chosen = [item for item in items if item.nodeid in self._places]
            items[:] = sorted(chosen, key=lambda item: self._places[item.nodeid])

    def pytest_collectreport(self, report: Any) -> None:
        """Report a file that can't be imported."""
        if report.failed:
            self._tell(failed=f"the import of {report.nodeid}")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Report the start of a test."""
        self._began_s = sum(os.times()[:4])
        self._tell(test=nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Report a failure, and the end of a test."""
        if report.failed:
            self._tell(failed=report.nodeid)
        if report.when == "teardown":
            self._tell(ended=report.nodeid, cpu_s=sum(os.times()[:4]) - self._began_s)

    def pytest_sessionfinish(self) -> None:
        """Report the modules of libraries that the tests have imported."""
        self._tell(modules=[name for name in sys.modules if name.split(".")[0] in LIBRARIES])


def run_pytest(copy: Path, report: Path, files: list[str], tests: list[str], *options: str) -> NoReturn:
    """Run pytest in this process, a fork, and end it."""
    os.chdir(copy)
    os.environ["PYTHONPATH"] = sys.path[0] = str(copy)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    for name in [name for name in sys.modules if name.split(".")[0] in OURS]:
        del sys.modules[name]
    out = os.open(report.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.setsid()
    os.environ["MUTANTS_PID"] = str(os.getpid())
    import pytest

    sys.argv = [pytest.__file__]
    always = ["-q", "-p", "no:cacheprovider", "-o", "addopts=", "-m", "not long", "--hypothesis-seed=0"]
    with report.open("a") as lines:
        code = pytest.main([*always, *options, *files], plugins=[Plugin(lines, tests)])
        sys.stdout.flush()
    os._exit(int(code))


def run(
    copy: Path, files: list[str], tests: list[str], usual_s: dict[str, float], *options: str
) -> dict[str, Any]:
    """Run tests of a copy in a fork of this process.

    Returns:
        `ended`: the CPU seconds of each test that ended; `failed`: tests; `hung`: a test or ""; `modules`: of
        libraries; `cpu_s`: seconds.
    """
    found: dict[str, Any] = {"ended": {}, "failed": [], "hung": "", "modules": []}
    report = HOME / "report"
    report.write_text("")
    if not (child := os.fork()):
        run_pytest(copy, report, files, tests, *options)
    test, told, since, since_s, cpu_s = "", True, 0.0, 0.0, 0.0
    with report.open() as lines:
        for turn in itertools.count():
            ended, _, used = os.wait4(child, os.WNOHANG)
            for line in lines:
                what, told = json.loads(line), True
                test, found["modules"] = what.get("test", test), what.get("modules", [])
                if "failed" in what:
                    found["failed"].append(what["failed"])
                if "ended" in what:
                    found["ended"][what["ended"]] = what["cpu_s"]
            if ended:
                cpu_s = used.ru_utime + used.ru_stime
                break
            time.sleep(0.1)
            if turn % LOOK_EACH:
                continue
            cpu_s = tree_cpu_s()
            if told:
                told, since, since_s = False, time.monotonic(), cpu_s
            busy_s, still_s = cpu_s - since_s, time.monotonic() - since
            most_s = BUSY_S + 5 * usual_s.get(test, 60.0)
            if test and (busy_s > most_s or (still_s > STILL_S and busy_s < IDLE * still_s)):
                found["hung"] = test
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                break
    end_descendants()
    return found | {"cpu_s": round(cpu_s, 2)}


def tree_cpu_s() -> float:
    """Return the CPU seconds of all descendants."""
    total = 0.0
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            total += sum(process.cpu_times()[:4])
    return total


def end_descendants() -> None:
    """End what tests have left: orphans are children of this process."""
    while left := psutil.Process().children(recursive=True):
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.05)


@contextmanager
def changed(path: Path, text: str) -> Iterator[None]:
    """Have another text in a file."""
    before = path.read_text()
    try:
        write(path, text)
        yield
    finally:
        write(path, before)


def write(path: Path, text: str) -> None:
    """Write a file, and remove its byte code: its age may be the same."""
    path.write_text(text)
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
        compiled.unlink()


def reporting(file: str, text: str) -> str:
    """Return the text of a file whose functions say that they are reached."""
    lines = text.splitlines(keepends=True)
    calls = []
    for name, node in faults.functions(ast.parse(text)):
        first = node.body[1 if ast.get_docstring(node) and len(node.body) > 1 else 0]
        line = min(each.lineno for each in (first, *getattr(first, "decorator_list", ())))
        if line > node.lineno and lines[line - 1][: first.col_offset].isspace():
            call = f"__import__('mutants_reach').reached({f'{file}::{name}'!r})\n"
            calls.append((line, " " * first.col_offset + call))
    for line, call in sorted(calls, reverse=True):
        lines.insert(line - 1, call)
    return "".join(lines)


def look(copy: Path, files: list[str], looks: dict[str, Any]) -> None:
    """Run files of tests in a copy whose functions say that they are reached.

    Args:
        copy: The copy.
        files: The files.
        looks: Gets of each file `times`, the CPU seconds of each test that passes, and `reach`, the tests by
            function; under `MODULES` what the tests import of libraries.
    """
    reach = HOME / "reach"
    reach.write_text("")
    os.environ["MUTANTS_REACH"] = str(reach)
    found = run(copy, files, [], {})
    del os.environ["MUTANTS_REACH"]
    looks[MODULES] = list(dict.fromkeys([*looks.get(MODULES, ()), *found["modules"]]))
    for file in files:
        looks[file] = {"times": {}, "reach": defaultdict(list)}
    for test, cpu_s in found["ended"].items():
        if test not in found["failed"]:
            looks[test.partition("::")[0]]["times"][test] = cpu_s
    for line in reach.read_text().splitlines():
        place, own, current = line.split("\t")
        test, _, phase = current.rpartition(" ")
        if seen := looks.get(test.partition("::")[0]):
            # The work of a fixture or of another process may serve all tests of the file.
            one = own == "1" and phase == "(call)"
            seen["reach"][place] += [test] if one else seen["times"]
    print(
        f"{found['cpu_s']:5.0f} s  {len(files)} files from {files[0]}; fail so: {found['failed']}", flush=True
    )


def files_of(copy: Path, rooms: set[str]) -> Iterator[str]:
    """Yield the files of the tests of some rooms."""
    tops = [copy / folder for room in rooms for folder in TESTS[room]]
    for folder in sorted({path.parent for top in tops for path in top.rglob("test_*.py")}):
        files = [str(path.relative_to(copy)) for path in sorted(folder.glob("test_*.py"))]
        yield from (file for file in files if file not in SKIPPED)


def chosen(fault: Fault, looks: dict[str, Any]) -> tuple[list[str], dict[str, float]]:
    """Return the tests for a fault, in their order, and the usual CPU seconds of each.

    The cheapest tests are chosen, as many as fit. Files with the name of the fault's module come first.
    """
    times: dict[str, float] = {}
    for seen in (looks[file] for file in looks if file != MODULES):
        reaching = set(seen["reach"].get(fault.place, ()))
        times |= {test: cpu_s for test, cpu_s in seen["times"].items() if test in reaching}
    found: list[str] = []
    own = {test for test in times if test.startswith(TESTS[fault.room])}
    for some, most_s in ((own, OWN_S), (times.keys() - own, OTHERS_S)):
        tests = sorted(some, key=lambda test: (times[test], test))
        sums = itertools.accumulate(times[test] for test in tests)
        found += [test for test, sum_s in zip(tests, sums, strict=True) if sum_s <= most_s]
    files: dict[str, float] = defaultdict(float)
    for test in found:
        files[test.partition("::")[0]] += times[test]
    name = Path(fault.file).stem

    def order(test: str) -> tuple[bool, bool, float, str, float]:
        file = test.partition("::")[0]
        return name not in Path(file).stem, test not in own, files[file], file, times[test]

    return sorted(found, key=order), times


def judge(copy: Path, fault: Fault, looks: dict[str, Any]) -> dict[str, Any]:
    """Return what the tests say of a fault: `outcome`, the test `by` which it is caught, `cpu_s`."""
    text = faults.put(fault, copy)
    tests, times = chosen(fault, looks)
    if text is None or not tests:
        return {"outcome": "not reached", "by": "", "cpu_s": 0.0}
    files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
    with changed(copy / fault.file, text):
        found = run(copy, files, tests, times, "-x")
    by = found["hung"] or next(iter(found["failed"]), "")
    if not by and len(found["ended"]) < len(tests):
        by = f"the end of the process after {len(found['ended'])} of {len(tests)} tests"
    outcome = "hung" if found["hung"] else "caught" if by else "survived"
    return {"outcome": outcome, "by": by, "cpu_s": found["cpu_s"]}


def table(outcomes: dict[str, dict[str, Any]]) -> str:
    """Return the outcomes by room, and the faults that no test has caught."""
    rooms: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for each in outcomes.values():
        rooms[each["room"]].append(each)
        rooms["all"].append(each)
    rows = ["room       faults  gone  caught  CPU s"]
    for room, found in sorted(rooms.items(), key=lambda item: (item[0] == "all", item[0])):
        gone, caught = (
            sum(map(test, found)) for test in (lambda e: "instead" in e, lambda e: e["outcome"] in CAUGHT)
        )
        cpu_s = sum(each["cpu_s"] for each in found)
        rows.append(f"{room:10} {len(found):6} {gone:5} {caught:7} {cpu_s:6.0f}")
    missed = {name: each for name, each in outcomes.items() if each["outcome"] not in CAUGHT}
    return "\n".join(
        rows + [f"{each['outcome']}: {each.get('instead', name)}" for name, each in missed.items()]
    )


def commit_of(name: str) -> str:
    """Return the short name of a commit."""
    return subprocess.check_output(["git", "rev-parse", "--short=9", name], text=True).strip()


def load(name: str) -> dict[str, Any]:
    """Return what an earlier run has kept under a name."""
    path = HOME / f"{name}.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def keep(name: str, what: dict[str, Any]) -> None:
    """Keep something for a later run."""
    (HOME / f"{name}.json").write_text(json.dumps(what, indent=1))


def copy_of(commit: str, told: bool = False) -> Path:
    """Return a copy of a commit's tree; its functions say that they are reached if that is to be told."""
    copy = HOME / (f"{commit}-reach" if told else commit)
    if not copy.exists():
        subprocess.run(["git", "worktree", "prune"], check=True)
        added = ["git", "worktree", "add", "--detach", str(copy), commit]
        subprocess.run(added, check=True, capture_output=True)
        (copy / ".venv").symlink_to(sys.prefix)
        for path in faults.product(copy) if told else ():
            path.write_text(reporting(str(path.relative_to(copy)), path.read_text()))
        if told:
            (copy / "mutants_reach.py").write_text(REACH)
    if not told:
        # A run that was killed may have left its fault.
        subprocess.run(["git", "-C", str(copy), "checkout", "--quiet", "--force", commit], check=True)
    return copy


def main() -> None:
    """Read the arguments and measure."""
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("--commit", default="HEAD", help="the commit whose tests are measured; default: HEAD")
    parser.add_argument("--rooms", default=",".join(ROOMS), help=f"some of {', '.join(ROOMS)}; default: all")
    parser.add_argument(
        "--minutes", type=float, default=1e6, help="stop then; the next run goes on from there"
    )
    parser.add_argument("--against", help="an earlier commit: list what was caught there and isn't here")
    arguments = parser.parse_args()
    rooms, ends = set(arguments.rooms.split(",")), time.monotonic() + 60 * arguments.minutes
    if unknown := rooms - set(ROOMS):
        parser.error(f"--rooms: {', '.join(sorted(unknown))}: the rooms are {', '.join(ROOMS)}")
    HOME.mkdir(exist_ok=True)
    commit = commit_of(arguments.commit)
    before = load(commit_of(arguments.against)) if arguments.against else {}
    looks, outcomes = load(f"{commit}-reach"), load(commit)
    copy = copy_of(commit)
    # Orphans of tests become children of this process, which ends them.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    for name in looks.get(MODULES, ()):
        with suppress(Exception):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    while new := [file for file in files_of(copy, rooms) if file not in looks]:
        if time.monotonic() > ends:
            break
        look(copy_of(commit, told=True), new[:CHUNK], looks)
        keep(f"{commit}-reach", looks)
    listed = faults.read(LIST)
    avoid = {fault.place for fault in listed}
    for fault in listed:
        known = outcomes.get(str(fault), {"outcome": "unknown"})
        # A fault that has survived gets another chance once more tests are known.
        if fault.room not in rooms or known["outcome"] in CAUGHT or known.get("looks") == len(looks):
            continue
        if time.monotonic() > ends:
            print("The time is over; the next run goes on from here.")
            return
        there = faults.find(fault, copy)
        if put := there or faults.at_random(fault.room, copy, str(fault), avoid):
            outcome = judge(copy, put, looks) | {"room": fault.room, "looks": len(looks)}
            outcomes[str(fault)] = outcome if there else outcome | {"instead": str(put)}
            keep(commit, outcomes)
            print(f"{outcome['cpu_s']:5.0f} s  {outcome['outcome']}: {put}  [{outcome['by']}]", flush=True)
    here = {name: each for name, each in outcomes.items() if each["room"] in rooms}
    print(table(here))
    for name, each in here.items():
        was = before.get(name, each)
        if was["outcome"] in CAUGHT and each["outcome"] not in CAUGHT and "instead" not in each:
            print(f"was caught by {was['by']}: {name}")


if __name__ == "__main__":
    main()
