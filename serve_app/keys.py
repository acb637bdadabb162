"""Old path of `serve_app.auth.command`, for scripts that run `python -m serve_app.keys`."""

from serve_app.auth.command import main

if __name__ == "__main__":
    main()
