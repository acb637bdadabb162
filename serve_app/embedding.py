"""Old path of `serve_app.demo.minilm`, for configs that name it."""

from serve_app.demo.minilm import MiniLM as MiniLM
