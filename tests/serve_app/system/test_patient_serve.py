"""`serve` with more time for Ray Serve's proxy; the launcher's tests have its place in a second try."""

import subprocess
import sys
from pathlib import Path


def test_both_waits_of_ray_serve_are_longer(tmp_path: Path) -> None:
    serve = tmp_path / "serve"
    serve.write_text(
        "import sys; from ray.serve._private import api, client\n"
        "print(__name__, api.HTTP_PROXY_TIMEOUT, client.HTTP_PROXY_TIMEOUT, sys.argv[1:])\n"
    )
    command = [sys.executable, "-m", "serve_app.system.patient_serve", "300", str(serve), "run", "x.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.stdout == "__main__ 300 300 ['run', 'x.yaml']\n", done.stderr
