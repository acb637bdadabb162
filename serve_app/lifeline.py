"""Old path of `serve_app.system.parent_death`, for an installed entry point that names it."""

from serve_app.system.parent_death import tie_to_parent as tie_to_parent
