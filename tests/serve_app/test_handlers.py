"""Ray Serve's log goes on after a library has set up logging for itself."""

import logging
import logging.config
from logging.handlers import MemoryHandler
from pathlib import Path

from serve_app.handlers import kept_handlers


def test_a_log_goes_on_after_another_has_been_set_up(tmp_path: Path) -> None:
    path = tmp_path / "serve.log"
    target = logging.FileHandler(path)
    handler = MemoryHandler(1, target=target)
    logger = logging.getLogger("test_handlers")
    logger.addHandler(handler)
    try:
        logger.warning("before")
        with kept_handlers("test_handlers"):
            logging.config.dictConfig({"version": 1, "disable_existing_loggers": False})
            lost = handler.target is None
        assert lost, "this is what has to be mended"
        logger.warning("after")
        assert handler.target is target
        assert path.read_text() == "before\nafter\n"
    finally:
        logger.removeHandler(handler)
        handler.close()
        target.close()
