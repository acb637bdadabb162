"""Configs of services, for tests of the command line."""

from pathlib import Path
from typing import Any

import yaml

from tests.ports import free_port as free_port


def config(port: int = 8000, **args: Any) -> dict[str, Any]:
    models = [{"id": "demo", "source": "saturate://demo"}]
    app = {"name": "llm", "import_path": "serve_app.app:build", "args": {"models": models} | args}
    return {"http_options": {"host": "127.0.0.1", "port": port}, "applications": [app]}


def write(folder: Path, content: object) -> Path:
    path = folder / "config.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content, sort_keys=False))
    return path
