"""Quotas of tenants, from the config and from a file that is read again when it changes."""

import hashlib
import logging

from pydantic import TypeAdapter, ValidationError

from serve_app.api.scheduling import Tenant
from serve_app.api.validation import lines
from serve_app.settings.schema import SettingsError
from serve_app.settings.usage import Quota, QuotasSettings
from serve_app.settings.watched_file import WatchedFile
from serve_app.system.yaml_text import NotYAMLError, load

logger = logging.getLogger("ray.serve")

_QUOTAS = TypeAdapter(dict[Tenant, Quota])


def read_quotas(text: str, source: str) -> dict[str, Quota]:
    """Read the quotas of tenants, by name.

    Args:
        text: YAML or JSON.
        source: Origin of the text, for errors.

    Raises:
        SettingsError: A quota is wrong; the message has its path.
    """
    try:
        content = load(text)
    except NotYAMLError as error:
        raise SettingsError(f"{source}: {error}") from None
    if not isinstance(content, dict):
        raise SettingsError(f"{source}: must be an object with a quota for each tenant")
    try:
        return _QUOTAS.validate_python(content)
    except ValidationError as error:
        found = "; ".join(lines(error, dict[Tenant, Quota]))
        raise SettingsError(f"{source}: {found}") from None


class TenantQuotas:
    """The quotas of all tenants.

    Args:
        settings: Their sources.
        held: The value of `held` in the last process; None: no earlier process.

    Attributes:
        quotas: The quotas, by tenant.
        held: The last valid text of the file; None: there is no file.

    Raises:
        SettingsError: The file can't be read, and no earlier process has read it.
    """

    def __init__(self, settings: QuotasSettings, held: str | None = None) -> None:
        self._fixed = settings.tenants
        self._file = WatchedFile(settings.file, "usage.quotas.file") if settings.file else None
        self.held = held if self._file else None
        self.quotas: dict[str, Quota] = dict(self._fixed)
        if self._file is None:
            return
        try:
            self._load()
        except SettingsError as error:
            if held is None:
                raise
            logger.error("the quotas of tenants stay as they were: %s", error)
            self.quotas = {**self._fixed, **read_quotas(held, "the last valid quotas")}

    @property
    def version(self) -> str:
        """A hash of the quotas, the same in every process."""
        text = "".join(f"{name}\0{quota!r}\0" for name, quota in sorted(self.quotas.items()))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def refresh(self) -> bool:
        """Read the file again if it has changed; return whether the quotas were replaced.

        If the file can't be read, the last valid quotas stay in force.
        """
        if self._file is None or not self._file.look():
            return False
        try:
            self._load()
        except SettingsError as error:
            logger.warning("the quotas of tenants stay as they were: %s", error)
            return False
        except Exception:
            self._file.unread()
            raise
        logger.info("read the quotas of tenants again: there are %d now", len(self.quotas))
        return True

    def _load(self) -> None:
        assert self._file is not None
        text = self._file.read()
        self.quotas = {**self._fixed, **read_quotas(text, self._file.source)}
        self.held = text
