"""Check of the environment in which an application is built, for configs that lack the variables."""

import logging
import os
from collections.abc import Mapping

from serve_app.settings.environment import CLIENT_HEADERS, MESSAGES, TRANSPORT
from serve_app.settings.schema import Settings, SettingsError

logger = logging.getLogger("ray.serve")

NEEDED = tuple(variable.name for variable in (*TRANSPORT, CLIENT_HEADERS, MESSAGES))
"""Variables that every complete config has, with any value."""

FIX = (
    "Complete the config with `saturate serve CONFIG --print-config > complete.yaml` and use that file, or "
    "run CONFIG with `saturate serve`."
)


def check_environment(settings: Settings, environment: Mapping[str, str] = os.environ) -> None:
    """Log a warning if variables are missing that `saturate serve` adds to a config.

    Args:
        settings: The args of the config.
        environment: The environment of the replicas.

    Raises:
        SettingsError: The service requires API keys, and couldn't trust the address of a client.
    """
    missing = [name for name in NEEDED if name not in environment]
    if not missing:
        return
    lacks = f"the environment of the replicas lacks {', '.join(missing)}"
    if settings.access and CLIENT_HEADERS.name in missing:
        raise SettingsError(
            f"access: {lacks}. Without {CLIENT_HEADERS.name} a client could claim any address, and "
            f"`allow_from` of an API key would not hold. {FIX}"
        )
    logger.warning(
        "This service runs, but %s. HTTP goes through Ray Serve's own proxy, which trusts headers of clients "
        "and does not send a request to another Ingress replica when one dies. %s",
        lacks,
        FIX,
    )
