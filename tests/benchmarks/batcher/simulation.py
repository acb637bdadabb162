"""CPU time of the tests' large simulation."""

import time

from tests.batcher.test_simulation import REQUESTS_PER_REPLICA, State, simulate
from tests.benchmarks.measuring import Options, Row, Table, progress

REQUESTS = 1_000_000
QUICK_REQUESTS = 100_000


def measure(options: Options) -> Table:
    """Return the table of one run, in which every rule is checked."""
    requests = QUICK_REQUESTS if options.quick else REQUESTS
    progress(f"simulation: {requests:,} requests")
    started = time.process_time()
    outcome = simulate(requests)
    took = time.process_time() - started
    progress("")
    rows = [
        Row("CPU time", "s", [took], at_most=120.0),
        Row("CPU time per request", "µs", [took / requests * 1e6]),
        Row("simulated time per CPU time", "x", [outcome.ended_s / took]),
        Row("requests that ran", "%", [outcome.ends[State.DONE] / requests * 100]),
    ]
    replicas = f"{requests // REQUESTS_PER_REPLICA:,} replicas"
    return Table(f"{requests:,} requests over {replicas} on a virtual clock, every rule checked.", rows)
