"""The process of `serve run`, under a supervisor that ends all its descendants."""

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
"""Seconds for `serve run` to stop after SIGINT, with its own Ray or with a shared Ray.

In a shared Ray it takes the applications down. It would stop its own Ray process by process, which takes
three seconds; instead the supervisor ends all processes together.
"""


class ServeRun:
    """`serve run` on a config.

    Args:
        config: Path of the config.
        log: File for the output.
        own_ray: Whether `serve run` starts its own Ray.
        environment: Environment variables in addition to this process's variables.
        patient: Whether to allow more time for the start, after a try that was too slow.

    Attributes:
        process: The process of the supervisor.
        limits: Start limits of Ray's processes in seconds, by environment variable.
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
            # The pipe closes when this process ends for any reason.
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            # By default Ray gives its workers, and so the engine, a lower priority than other processes.
            env={
                "RAY_USAGE_STATS_ENABLED": "0",
                "RAY_worker_niceness": "0",
                **os.environ,
                **self.limits,
                **environment,
            },
            # In a new session Ctrl-C reaches only this process, which stops the service gracefully.
            start_new_session=True,
        )

    def end(self) -> None:
        """End `serve run` and all its descendants."""
        assert self.process.stdin
        self.process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(self._interrupt_s + GRACE_S + KILL_S + 1.0)
        # If the supervisor was killed, this process has adopted the remaining processes.
        end_descendants(GRACE_S)
