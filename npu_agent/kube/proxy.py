"""The proxy on the way to the API server, chosen as kubectl chooses it."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit
from urllib.request import getproxies_environment, proxy_bypass


def proxy_for(server: str) -> str | None:
    """The proxy's URL by HTTPS_PROXY, HTTP_PROXY and NO_PROXY, in either case; None for none.

    aiohttp would choose by itself, and knows no address ranges in NO_PROXY, where clusters with a
    proxy mostly have their service network; it would also send what ~/.netrc has for the server.

    Args:
        server: the API server's URL.
    """
    try:
        url = urlsplit(server)
        host = url.hostname or ""
    except ValueError:  # no URL: the connection will fail, and say so
        return None
    proxies = getproxies_environment()
    proxy = proxies.get(url.scheme)
    # Go's rule, and so kubectl's: nobody means a proxy for what is on this very host.
    if not proxy or host == "localhost" or _within(host, ["127.0.0.0/8", "::1/128"]):
        return None
    if proxy_bypass(url.netloc.rpartition("@")[2], proxies) or _within(
        host, proxies.get("no", "").split(",")
    ):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


def _within(host: str, ranges: list[str]) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    for one in ranges:
        try:
            if address in ipaddress.ip_network(one.strip(), strict=False):
                return True
        except ValueError:  # a name, or a name with a port
            continue
    return False
