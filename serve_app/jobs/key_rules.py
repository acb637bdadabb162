"""The rights of an API key's batches, and the end of batches whose key has ended."""

from collections.abc import Collection

from serve_app.api.errors import RequestError
from serve_app.api.protocol import JSON
from serve_app.auth.key_store import KeyStore
from serve_app.auth.keys import Key
from serve_app.settings.batches import BatchesSettings

UNKNOWN_S = 2.0
"""Seconds after which a client tries again with a key that this process hasn't read yet."""


class KeyRules:
    """Rules for the batches of API keys.

    A batch keeps the rights that its key had at the batch's creation, and ends when the key ends.

    Args:
        models: Ids of the served models.
        limits: Limits of keys without their own limits.
        keys: The API keys; None: the service has no keys.

    Attributes:
        common: The limits of keys without their own limits.
    """

    def __init__(
        self, models: Collection[str], limits: BatchesSettings, keys: KeyStore | None = None
    ) -> None:
        self.common = limits
        self._served = models
        self._keys = keys

    def rights(self, key: str) -> JSON:
        """Return the rights of a batch that a key creates now, to be stored with the batch.

        Args:
            key: Name of the key; empty: the batch has no key.

        Raises:
            RequestError: This process hasn't read the key yet.
        """
        found = self._find(key)
        return {"models": found and found.models, "max_lines": self.limits(key).max_lines}

    def models(self, rights: JSON) -> Collection[str]:
        """Return the served models that the rows of a batch with these rights may name."""
        allowed = rights["models"]
        return self._served if allowed is None else set(self._served) & set(allowed)

    def limits(self, key: str) -> BatchesSettings:
        """Return the limits on the files and batches that a key creates.

        Args:
            key: Name of the key; empty: the limits of the config.

        Raises:
            RequestError: This process hasn't read the key yet.
        """
        found = self._find(key)
        if found is None or found.batches is None:
            return self.common
        return self.common.model_copy(update=found.batches.model_dump(exclude_none=True))

    def ended(self, key: str) -> str | None:
        """Return why batches of a key end: "removed", "disabled" or "expired"; None: the batches continue.

        Args:
            key: Name of the key; empty: the batches have no key.
        """
        if self._keys is None or not key:
            return None
        state = self._keys.state(key)
        return None if state == "valid" else state or "removed"

    def _find(self, key: str) -> Key | None:
        if self._keys is None or not key:
            return None
        found = self._keys.named(key)
        if found is None:
            # The Ingress has read a newer version of the keys. Without its rules, the key would have too many
            # rights.
            message = f"The API key {key!r} is not known to the batches yet; try again in a few seconds."
            raise RequestError(503, "service_unavailable", message, retry_after_s=UNKNOWN_S)
        return found
