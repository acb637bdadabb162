"""Models and limits that an API key allows to its batches."""

from collections.abc import Collection
from dataclasses import replace

from serve_app.auth.keys import Key
from serve_app.auth.middleware import KeyStore
from serve_app.batches.limits import Limits


class KeyRules:
    """Rules for the batches of API keys; they hold as the keys are now.

    Args:
        models: Ids of the served models.
        limits: Limits that hold where a key has none of its own.
        keys: The API keys; None: the service has none.

    Attributes:
        common: Those limits.
    """

    def __init__(
        self, models: Collection[str], limits: Limits | None = None, keys: KeyStore | None = None
    ) -> None:
        self.common = limits or Limits()
        self._served = models
        self._keys = keys

    def models(self, key: str) -> Collection[str]:
        """Return the served models that the rows of a batch may name.

        Args:
            key: Name of the key that created it; empty, or of a key that is gone: all.
        """
        found = self._find(key)
        if found is None or found.models is None:
            return self._served
        return set(self._served) & set(found.models)

    def limits(self, key: str) -> Limits:
        """Return the limits on the files and batches that a key creates.

        Args:
            key: Name of the key; empty, or of a key that is gone: those of the config.
        """
        found = self._find(key)
        if found is None or found.batches is None:
            return self.common
        return replace(self.common, **found.batches.model_dump(exclude_none=True))

    def _find(self, key: str) -> Key | None:
        return self._keys.named(key) if self._keys and key else None
