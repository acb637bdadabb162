"""Renders manifests as a user does: with `kubectl kustomize`."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from k8s.dashboard.__main__ import write_dashboard

Document = dict[str, Any]

REPOSITORY = Path(__file__).parents[2]
K8S = REPOSITORY / "k8s"
OVERLAYS = sorted(path.parent for path in K8S.glob("overlays/*/kustomization.yaml"))
JOBS = [K8S / "jobs" / "http", K8S / "jobs" / "handle"]
COMPONENTS = sorted(path.parent for path in K8S.glob("components/*/kustomization.yaml"))


def renderers() -> list[list[str]]:
    """Return the commands on this machine that render: that of the environment first, then others."""
    environment = str(Path(sys.executable).parent)
    commands = {}
    for path in (environment, os.environ.get("PATH", "")):
        for name, arguments in (("kubectl", ["kustomize"]), ("kustomize", ["build"])):
            if program := shutil.which(name, path=path):
                commands[program] = [program, *arguments]
    return list(commands.values())


def render(folder: Path, command: Sequence[str] = ()) -> list[Document]:
    """Return the documents of a folder with a kustomization.

    Args:
        folder: The folder.
        command: What renders; the environment's kubectl, if left out.
    """
    command = command or renderers()[0]
    done = subprocess.run([*command, str(folder)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"{folder}: {done.stderr.strip()}")
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def with_components(overlay: Path, names: Sequence[str], folder: Path) -> Path:
    """Write an overlay with more components, and return its folder.

    Args:
        overlay: What it starts from.
        names: Folders of k8s/components.
        folder: Where it is written.
    """
    if "observability" in names:
        write_dashboard()
    components = [os.path.relpath(K8S / "components" / name, folder) for name in names]
    content = {"resources": [os.path.relpath(overlay, folder)], "components": components}
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(content))
    return folder
