"""Names of a library that aren't public: tables of them, their import, and the guard that looks for them."""

import dis
import functools
import importlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple


class Seam(NamedTuple):
    """A name of a library that isn't public, or a public class whose parts aren't.

    Attributes:
        module: Its module.
        use: What it is for.
        parts: Methods and attributes of it that are used or replaced, also of instances.
        issue: The issue of the fault that it mends; empty: there is no fault, or none is reported.
        ends: The first version of the library that needs it no more.
        before: Its module before it moved to `module`, for the older of the versions that are served.
    """

    module: str
    use: str
    parts: str = ""
    issue: str = ""
    ends: tuple[int, ...] = ()
    before: str = ""

    def ended(self, version: tuple[int, ...]) -> bool:
        """Return whether a version needs the name no more."""
        return bool(self.ends) and version >= self.ends


def load(seams: Mapping[str, Seam], name: str) -> Any:
    """Import a name of a table.

    Raises:
        AttributeError: The table hasn't the name, or the library hasn't.
    """
    if name not in seams:
        raise AttributeError(f"{name!r} is not in this table")
    for module in filter(None, (seams[name].module, seams[name].before)):
        try:
            holder = importlib.import_module(module)
        except ModuleNotFoundError:
            continue
        if hasattr(holder, name):
            return getattr(holder, name)
        try:
            return importlib.import_module(f"{module}.{name}")
        except ModuleNotFoundError:
            continue
    raise AttributeError(f"{seams[name].module} has no {name}: {seams[name].use}")


def look_for(seams: Mapping[str, Seam], library: str, version: tuple[int, ...]) -> None:
    """Look for all names of a table in the installed library.

    Args:
        seams: The table.
        library: The name of the library, for the error.
        version: Its version.

    Raises:
        RuntimeError: It has some of them no more; the error has them all, with the use of each.
    """
    if lost := list(_lost(seams, version)):
        number = ".".join(map(str, version))
        raise RuntimeError(
            f"{library} {number} has no {'; no '.join(lost)}. Install the version that pyproject.toml names"
        )


def _lost(seams: Mapping[str, Seam], version: tuple[int, ...]) -> Iterator[str]:
    for name, seam in seams.items():
        if seam.ended(version):
            continue
        try:
            found = load(seams, name)
        except AttributeError:
            yield f"{seam.module}.{name} ({seam.use})"
            continue
        for part in seam.parts.split():
            if not _has(found, part):
                yield f"{seam.module}.{name}.{part} ({seam.use})"


def _has(holder: Any, name: str) -> bool:
    """Return whether an object has an attribute, or the instances of a class have one."""
    return hasattr(holder, name) or any(name in _assigned(base) for base in getattr(holder, "__mro__", ()))


@functools.cache
def _assigned(owner: type) -> set[str]:
    """Return the attributes that the body of a class declares, and the attributes that its methods assign."""
    codes = [
        getattr(inspect.unwrap(each), "__code__", None) for each in vars(owner).values() if callable(each)
    ]
    steps = (step for code in codes if code is not None for step in dis.get_instructions(code))
    return {
        *vars(owner).get("__annotations__", ()),
        *(each.argval for each in steps if each.opname == "STORE_ATTR"),
    }
