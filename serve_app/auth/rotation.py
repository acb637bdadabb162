"""Rotation of a key's secret: a change of its hashes in the text of a keys file.

While a key has two hashes, clients may use either secret. The text keeps its comments.
"""

from collections.abc import Sequence

from serve_app.auth.keys import Key, read_keys
from serve_app.settings.schema import SettingsError
from serve_app.system.yaml_text import YAMLFormError, dump, load, updated


class RotationError(ValueError):
    """A key can't be rotated; the message says why, and what to do."""


def add_secret(text: str, name: str, hash: str) -> str:
    """Return the text of a keys file with a second secret of a key, after its present secret.

    Args:
        text: A valid list of keys.
        name: The key.
        hash: The hash of the new secret.

    Raises:
        RotationError: There is no such key, or it has two secrets already, and a third would lock out
            clients.
        SettingsError: The text is no valid list of keys.
    """
    key = _key(text, name)
    if len(key.hashes) > 1:
        raise RotationError(
            f"the key {name} has two secrets already; once its clients use the new secret, drop the old one "
            "with --finish"
        )
    return _changed(text, key, (*key.hashes, hash))


def drop_old_secret(text: str, name: str) -> str:
    """Return the text of a keys file with only the newer of a key's two secrets.

    Args:
        text: A valid list of keys.
        name: The key.

    Raises:
        RotationError: There is no such key, or it has one secret.
        SettingsError: The text is no valid list of keys.
    """
    key = _key(text, name)
    if len(key.hashes) < 2:
        raise RotationError(f"the key {name} has one secret; there is no old secret to drop")
    return _changed(text, key, key.hashes[-1:])


def entry_of(text: str, name: str) -> str:
    """Return the entry of a key, as YAML.

    Args:
        text: A valid list of keys.
        name: The key.
    """
    return dump([next(entry for entry in load(text) if entry["name"] == name)])


def _key(text: str, name: str) -> Key:
    found = [key for key in read_keys(text, "the keys file") if key.name == name]
    if not found:
        raise RotationError(f"the keys file has no key named {name}")
    return found[0]


def _changed(text: str, key: Key, hashes: Sequence[str]) -> str:
    """Return the text with other hashes of a key, checked by reading it again."""
    value = hashes[0] if len(hashes) == 1 else list(hashes)
    content = load(text)
    next(entry for entry in content if entry["name"] == key.name)["sha256"] = value
    expected = [
        other.model_copy(update={"sha256": value if len(hashes) == 1 else tuple(hashes)})
        if other.name == key.name
        else other
        for other in read_keys(text, "the keys file")
    ]
    try:
        changed = updated(text, content)
        if read_keys(changed, "the changed keys file") == expected:
            return changed
    except (YAMLFormError, SettingsError):
        pass
    raise RotationError(
        f"the entry of {key.name} has a form that can't be changed in place; change its sha256 by hand, "
        "or write it as a hash or a list of two"
    )
