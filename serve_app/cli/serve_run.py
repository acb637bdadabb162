"""The process of `serve run`, under a supervisor that leaves none of its descendants behind."""

import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO

from serve_app.cli.supervisor import GRACE_S
from serve_app.settings.environment import PATIENCE, PROXY_START_S, RAY_START_LIMITS
from serve_app.system.processes import KILL_S, end_descendants

OWN_RAY_S, SHARED_RAY_S = 0.3, 10.0
"""Seconds that `serve run` has to stop after SIGINT, with a Ray of its own or one that others use too.

In a shared Ray it takes the applications down. Its own Ray it would stop one process after the other, in
three seconds; they are ended together instead.
"""


class ServeRun:
    """`serve run` on a config.

    Args:
        config: Path of the config.
        log: File for its output.
        own_ray: Whether it starts a Ray of its own.
        environment: Environment variables, beside those of this process.
        patient: Whether it gets more time to start: an earlier try was too slow.

    Attributes:
        process: The process of the supervisor.
        limits: The limits of Ray's processes for their start, by their environment variables.
    """

    def __init__(
        self,
        config: Path,
        log: IO[bytes],
        *,
        own_ray: bool,
        environment: Mapping[str, str],
        patient: bool = False,
    ) -> None:
        factor = PATIENCE if patient else 1
        limits = {name: str(factor * int(value)) for name, value in RAY_START_LIMITS.items()}
        self.limits = {name: os.environ.get(name, value) for name, value in limits.items()}
        self._interrupt_s = OWN_RAY_S if own_ray else SHARED_RAY_S
        supervisor = [sys.executable, "-m", "serve_app.cli.supervisor", str(self._interrupt_s)]
        command = [str(Path(sys.executable).with_name("serve")), "run", str(config)]
        if patient:
            command = [sys.executable, "-m", "serve_app.system.patient_serve", str(PROXY_START_S), *command]
        self.process = subprocess.Popen(
            [*supervisor, *command],
            # It closes when this process ends, of whatever cause.
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            # Ray gives its workers, and so the engine, a lower priority than other processes unless told.
            env={
                "RAY_USAGE_STATS_ENABLED": "0",
                "RAY_worker_niceness": "0",
                **os.environ,
                **self.limits,
                **environment,
            },
            # A session of its own: Ctrl-C reaches only this process, which stops the service in order.
            start_new_session=True,
        )

    def end(self) -> None:
        """End it and all processes that it has started."""
        assert self.process.stdin
        self.process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(self._interrupt_s + GRACE_S + KILL_S + 1.0)
        # None are left unless the supervisor was killed; then this process has adopted them.
        end_descendants(GRACE_S)
