"""The size of what an object holds on to, whatever it is made of."""

import gc
from types import FunctionType, ModuleType


def footprint(thing: object) -> int:
    """Return how many objects can be reached from one, without code and types."""
    seen: dict[int, object] = {}
    left = [thing]
    while left:
        each = left.pop()
        if id(each) in seen or isinstance(each, type | ModuleType | FunctionType):
            continue
        seen[id(each)] = each
        left += gc.get_referents(each)
    return len(seen)
