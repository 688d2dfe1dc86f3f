"""Which network addresses may be fetched from: public ones."""

from __future__ import annotations

import ipaddress

_NAT64 = ipaddress.ip_network("64:ff9b::/96")


def is_public(address: str) -> bool:
    """Whether an IP address is of the public internet: not loopback, private, link-local (metadata services), shared,
    reserved or multicast, nor an IPv6 form of such an IPv4 address."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        if ip in _NAT64 or ip.packed[:12] == bytes(12):  # the latter are IPv4-compatible addresses, long out of use
            inner = ipaddress.IPv4Address(ip.packed[12:])
        if inner is not None:
            ip = inner
    return ip.is_global and not ip.is_multicast and not ip.is_reserved and not ip.is_unspecified
