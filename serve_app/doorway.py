"""Old path of `serve_app.ingress.header_filter`, for configs that name it."""

from serve_app.ingress.header_filter import middlewares as middlewares
