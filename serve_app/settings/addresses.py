"""IP addresses and ranges: the ranges in settings, and the address of a client.

A proxy in front of the service is the peer of every connection. It appends the address that it saw to
`X-Forwarded-For`; the entries to the left of it came from the client, which may write anything.
"""

import re
from collections.abc import Iterable
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Annotated

from pydantic import BeforeValidator, PlainSerializer

from serve_app.api.headers import Headers

Address = IPv4Address | IPv6Address

MAX_HOPS = 32
"""Maximum proxies between a client and this service; no real path is longer."""

_MAX_TEXT = 64
"""Maximum characters of an address with brackets and a port."""

_WITH_PORT = re.compile(r"\[(?P<v6>[^\]]*:[^\]]*)\](:[0-9]+)?|(?P<v4>[^:\[]+):[0-9]+")

_IPV4_IN_IPV6 = IPv6Network("::ffff:0:0/96")


def _network(value: object) -> IPv4Network | IPv6Network:
    if isinstance(value, IPv4Network | IPv6Network):
        return value
    if not isinstance(value, str):
        raise ValueError("must be a range of addresses in quotes, such as '10.0.0.0/8' or '2001:db8::/32'")
    # The message leaves out the value, which may be a key in the wrong place.
    wrong = "must be an address or a range of addresses, such as 10.0.0.0/8 or 2001:db8::/32"
    if "%" in value:
        raise ValueError(wrong)
    try:
        network = ip_network(value, strict=False)
    except ValueError:
        raise ValueError(wrong) from None
    if ip_address(value.partition("/")[0]) != network.network_address:
        raise ValueError(f"{value!r} has bits after its prefix; the range is written {network}")
    if isinstance(network, IPv6Network) and network.subnet_of(_IPV4_IN_IPV6):
        # A client with such an address counts as an IPv4 client.
        raise ValueError(f"{value!r} is a range of IPv4; write it as such")
    return network


Network = Annotated[IPv4Network | IPv6Network, BeforeValidator(_network), PlainSerializer(str)]
"""A range of addresses in CIDR notation, or one address."""


class Networks:
    """A set of addresses, given as ranges.

    Args:
        networks: The ranges, of IPv4 and IPv6.
    """

    __slots__ = ("_v4", "_v6")

    def __init__(self, networks: Iterable[IPv4Network | IPv6Network]) -> None:
        ranges: dict[int, list[tuple[int, int]]] = {4: [], 6: []}
        for network in networks:
            mask = int(network.netmask)
            ranges[network.version].append((mask, int(network.network_address)))
        self._v4, self._v6 = tuple(ranges[4]), tuple(ranges[6])

    def __contains__(self, address: Address) -> bool:
        number = int(address)
        ranges = self._v4 if address.version == 4 else self._v6
        return any(number & mask == network for mask, network in ranges)

    def __bool__(self) -> bool:
        return bool(self._v4 or self._v6)


def is_loopback(host: str) -> bool:
    """Return whether only this machine can connect to a service that listens on a host."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def read_address(text: str) -> Address | None:
    """Return the address in a text, with or without a port; None if there is no address.

    An IPv4 address in IPv6 notation is returned as IPv4: a dual-stack socket reports such peers.
    """
    # Clients send these texts, so the cache keeps short texts only.
    return _read(text) if len(text) <= _MAX_TEXT else None


def client_address(peer: str | None, headers: Headers, trusted: Networks) -> Address | None:
    """Return the address of a request's client; None if it is unknown.

    From the connection's peer on, each trusted proxy names the hop before it, in `X-Forwarded-For` from the
    right. The first hop that isn't trusted is the client: the entries to its left are the client's own.

    Args:
        peer: Address of the connection's other end; None: unknown.
        headers: The request's headers.
        trusted: The proxies whose `X-Forwarded-For` counts.
    """
    address = read_address(peer) if peer else None
    if address is None or address not in trusted:
        return address
    # Several headers of that name are one list.
    forwarded = b",".join(value for name, value in headers if name == b"x-forwarded-for")
    if not forwarded:
        return address
    hops = forwarded.rsplit(b",", MAX_HOPS)
    for hop in reversed(hops[-MAX_HOPS:]):
        address = read_address(hop.decode("latin-1").strip())
        if address is None or address not in trusted:
            return address
    # If all hops are trusted proxies, the first of the list is the client.
    return address if len(hops) <= MAX_HOPS else None


@lru_cache(maxsize=4096)
def _read(text: str) -> Address | None:
    if match := _WITH_PORT.fullmatch(text):
        text = match["v4"] or match["v6"]
    try:
        address = ip_address(text)
    except ValueError:
        return None
    return (address.ipv4_mapped if isinstance(address, IPv6Address) else None) or address
