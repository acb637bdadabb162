"""Old path of `serve_app.engine.autoscaling`, for configs that name it."""

from serve_app.engine.autoscaling import ByTokens as ByTokens
