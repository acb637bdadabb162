"""Ray Serve's log goes on after a library has configured logging, and warnings are written at once."""

import logging
import logging.config
from logging.handlers import MemoryHandler
from pathlib import Path

from serve_app.system.serve_logging import flush_warnings, preserved_handlers


def test_a_log_goes_on_after_logging_was_configured_again(tmp_path: Path) -> None:
    path = tmp_path / "serve.log"
    target = logging.FileHandler(path)
    handler = MemoryHandler(1, target=target)
    logger = logging.getLogger("test_handlers")
    # Other tests of this process may leave the root's level higher.
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        logger.warning("before")
        with preserved_handlers("test_handlers"):
            logging.config.dictConfig({"version": 1, "disable_existing_loggers": False})
            lost = handler.target is None
        assert lost, "without preserved_handlers the log would end"
        logger.warning("after")
        assert handler.target is target
        assert path.read_text() == "before\nafter\n"
    finally:
        logger.removeHandler(handler)
        handler.close()
        target.close()


def test_a_warning_is_written_at_once_with_the_records_before_it(tmp_path: Path) -> None:
    path = tmp_path / "serve.log"
    target = logging.FileHandler(path)
    handler = MemoryHandler(1000, target=target)
    logger = logging.getLogger("test_warnings")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        flush_warnings("test_warnings")
        logger.info("first")
        assert path.read_text() == ""
        logger.warning("second")
        assert path.read_text() == "first\nsecond\n"
    finally:
        logger.removeHandler(handler)
        handler.close()
        target.close()
