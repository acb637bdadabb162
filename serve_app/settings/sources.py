"""Sources of models."""

from pathlib import Path

DEMO_MODEL = "saturate://demo"
"""The `source` of the model that is shipped with this package."""

DEMO_FOLDER = Path(__file__).parents[1] / "demo"
"""The folder `serve_app/demo`: `model` and `adapters` are in it."""
