"""Ranges of addresses, and the address of a client behind proxies."""

import ipaddress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from serve_app.settings.addresses import (
    MAX_HOPS,
    Address,
    Network,
    Networks,
    client_address,
    is_loopback,
    read_address,
)

RANGE: TypeAdapter[Any] = TypeAdapter(Network)
PROXIES = Networks([ipaddress.ip_network("127.0.0.0/8"), ipaddress.ip_network("fd00::/8")])


def forwarded(*values: str) -> list[tuple[bytes, bytes]]:
    return [(b"host", b"x"), *((b"x-forwarded-for", value.encode()) for value in values)]


def found(peer: str | None, *values: str) -> str | None:
    address = client_address(peer, forwarded(*values), PROXIES)
    return None if address is None else str(address)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        *((host, True) for host in ("127.0.0.1", "127.8.8.8", "::1", "localhost")),
        *((host, False) for host in ("0.0.0.0", "10.0.0.7", "llm.example.com", "", "None")),
    ],
)
def test_a_host_is_on_loopback_or_not(host: str, expected: bool) -> None:
    assert is_loopback(host) == expected


# Ranges


@pytest.mark.parametrize(
    ("text", "range"),
    [
        ("10.0.0.0/8", "10.0.0.0/8"),
        ("10.1.2.3", "10.1.2.3/32"),
        ("0.0.0.0/0", "0.0.0.0/0"),
        ("2001:db8::/32", "2001:db8::/32"),
        ("::1", "::1/128"),
        ("::/0", "::/0"),
    ],
)
def test_a_range_is_written_in_cidr_notation_or_as_one_address(text: str, range: str) -> None:
    network = RANGE.validate_python(text)
    assert str(network) == range
    assert RANGE.dump_python(network) == range
    assert RANGE.validate_python(network) == network


addresses = st.ip_addresses()
networks = st.builds(
    lambda address, cut: ipaddress.ip_network((address, max(0, address.max_prefixlen - cut)), strict=False),
    addresses,
    st.integers(0, 128),
)


@given(ranges=st.lists(networks, max_size=5), address=addresses)
def test_an_address_is_in_a_set_if_it_is_in_a_range_of_it(ranges: list[Any], address: Address) -> None:
    assert (address in Networks(ranges)) == any(address in network for network in ranges)
    assert bool(Networks(ranges)) == bool(ranges)


@given(network=networks, offset=st.integers(0))
def test_an_address_of_a_range_is_in_its_set(network: Any, offset: int) -> None:
    assert network[offset % network.num_addresses] in Networks([network])


# Addresses


@given(address=addresses, port=st.integers(0, 65535))
def test_an_address_is_read_with_and_without_a_port(address: Address, port: int) -> None:
    plain = (address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None) or address
    bracketed = f"[{address}]" if address.version == 6 else str(address)
    assert read_address(str(address)) == plain
    assert read_address(f"{bracketed}:{port}") == plain
    assert read_address(bracketed) == plain


def test_an_address_of_ipv4_in_the_notation_of_ipv6_is_one_of_ipv4() -> None:
    assert read_address("::ffff:10.0.0.1") == ipaddress.ip_address("10.0.0.1")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "unknown",
        "_hidden",
        "10.0.0",
        "10.0.0.1:x",
        "10.0.0.1:",
        "[10.0.0.1]",
        "[::1",
        "[::1]x",
        "1" * 10_000,
    ],
)
def test_any_other_text_names_no_address(text: str) -> None:
    assert read_address(text) is None


# Clients


def test_without_a_trusted_proxy_the_peer_is_the_client() -> None:
    assert found("203.0.113.9") == "203.0.113.9"
    assert found("203.0.113.9", "10.0.0.1") == "203.0.113.9"
    assert found("::ffff:203.0.113.9", "10.0.0.1") == "203.0.113.9"


def test_a_trusted_proxy_names_the_client_from_the_right() -> None:
    assert found("127.0.0.1", "203.0.113.9") == "203.0.113.9"
    assert found("127.0.0.1", "10.0.0.1, 203.0.113.9") == "203.0.113.9"
    assert found("127.0.0.1", "10.0.0.1", "203.0.113.9") == "203.0.113.9"
    assert found("127.0.0.1", "10.0.0.1, 203.0.113.9, fd00::7", "127.0.0.2") == "203.0.113.9"


def test_a_proxy_itself_may_be_the_client() -> None:
    assert found("127.0.0.1") == "127.0.0.1"
    assert found("127.0.0.1", "fd00::7") == "fd00::7"


@pytest.mark.parametrize("values", [["203.0.113.9, "], ["unknown"], ["203.0.113.9, x"], [""], [","]])
def test_a_list_that_can_not_be_read_names_no_client(values: list[str]) -> None:
    # An empty header is none.
    assert found("127.0.0.1", *values) == ("127.0.0.1" if values == [""] else None)


def test_an_endless_list_of_proxies_names_no_client() -> None:
    assert found("127.0.0.1", ",".join(["203.0.113.9"] + ["127.0.0.1"] * (MAX_HOPS - 1))) == "203.0.113.9"
    assert found("127.0.0.1", ",".join(["203.0.113.9"] + ["127.0.0.1"] * MAX_HOPS)) is None


@pytest.mark.parametrize("peer", [None, "", "unix:/run/x"])
def test_an_unknown_peer_is_no_client(peer: str | None) -> None:
    assert found(peer, "203.0.113.9") is None


hops = st.sampled_from(["127.0.0.1", "127.9.9.9", "fd00::1", "203.0.113.9", "2001:db8::1", "10.0.0.1"])


@given(
    claimed=st.lists(hops | st.text(max_size=20), max_size=6), client=hops, proxies=st.lists(hops, max_size=3)
)
def test_a_client_behind_trusted_proxies_can_not_choose_its_address(
    claimed: list[str], client: str, proxies: list[str]
) -> None:
    trusted = [hop for hop in proxies if ipaddress.ip_address(hop) in PROXIES]
    # Each proxy appends the peer that it saw.
    *seen, peer = [client, *trusted, "127.0.0.1"]
    address = found(peer, ", ".join([*claimed, *seen]))
    if ipaddress.ip_address(client) not in PROXIES:
        assert address == client
