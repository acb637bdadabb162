import gc
import json
import signal
import sys
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from tests.budget import USED, Budget
from tests.progress import run

if TYPE_CHECKING:
    from xdist.scheduler import LoadScopeScheduling

# The time that an example takes, or its generation, says something about the machine only.
UNTIMED: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("short", max_examples=25, stateful_step_count=25, **UNTIMED)
settings.register_profile("long", max_examples=200, stateful_step_count=50, **UNTIMED)
settings.load_profile("short")

# Under nohup and in the background of a script they are ignored, and all processes that the tests start would
# ignore them too.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

SHARED = ("tests/e2e/", "tests/serve_app/test_vllm_routes.py", "tests/serve_app/models/test_vllm_options.py")
"""The tests that share the service or `vllm_app`."""

ALONE = "tests/e2e/test_hostile_fields.py"
"""A test among `SHARED` with an engine of its own."""

LAST = [
    # On the shared service: what measures all of it, adds an application to it, kills its processes.
    "test_prometheus",
    "test_access",
    "test_quotas",
    "test_own_pages",
    # With two Engines: what leaves it whole, what leaves it with one Engine, what stops it.
    "test_prefix_routing",
    "test_ledger",
    "test_faults",
    "test_sdk_errors",
    "test_poison",
    "test_deploys",
    "test_driver_kills",
    "test_stop",
    # On engines and services of their own.
    "test_overload",
    "test_batch_kills",
    "test_admitted_work",
    "test_simulated",
    "test_turns",
    "test_adapters",
    "test_adapter_isolation",
    "test_pooling",
    "test_scaling",
    "test_worker_death",
    "test_node_loss",
    "test_several_nodes",
    "test_rehearsal",
    "test_lost_machine",
]
"""The modules that run after all others, in this order."""


def pytest_configure(config: pytest.Config) -> None:
    """Hold the tests to their CPU time."""
    config.pluginmanager.register(Budget())


def pytest_collection_finish() -> None:
    """Keep the objects of imported modules out of collections: those of vLLM and Ray take 0.5 s."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Let the end of the process collect those objects: libraries report what is left."""
    gc.unfreeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> "LoadScopeScheduling":
    """Have one of pytest-xdist's workers run all `SHARED` tests; the other files go to whoever is free."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            shared = nodeid.startswith(SHARED) and not nodeid.startswith(ALONE)
            return "service" if shared else nodeid.partition("::")[0]

    return ByFile(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the tests: `ALONE` and `SHARED`, with which two workers begin, then the others."""
    items.sort(key=_place)


def _place(item: pytest.Item) -> tuple[int, int]:
    own = item.path.parent.name in {"e2e", "k8s"} and item.path.stem in LAST
    within = 2 + LAST.index(item.path.stem) if own else int(_needs_service(item))
    if item.nodeid.startswith(ALONE):
        return 0, within
    return (1 if item.nodeid.startswith(SHARED) else 2), within


def _needs_service(item: pytest.Item) -> bool:
    return item.path.parent.name == "e2e" and "service" in getattr(item, "fixturenames", ())


@pytest.fixture(scope="session")
def vllm_app() -> dict[str, Any]:
    """The routes and the OpenAPI schema of vLLM's own application."""
    command = [sys.executable, "-m", "tests.e2e.vllm_app"]
    done = run(command, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Report the time that services took to start, and the tests with the most CPU time."""
    reports = [one for found in terminalreporter.stats.values() for one in found if hasattr(one, "when")]
    starts = [one.duration for one in reports if one.when == "setup" and "tests/e2e/" in one.nodeid]
    if starts:
        terminalreporter.write_line(f"start of services: {sum(starts):.0f} s")
    used = [(dict(one.user_properties).get(USED, 0.0), one.nodeid) for one in reports if one.when == "call"]
    terminalreporter.section("most CPU time")
    for seconds, name in sorted(used, reverse=True)[:10]:
        terminalreporter.write_line(f"{seconds:.2f}s {name}")
