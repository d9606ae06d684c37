"""Guard servers without a password: refuse requests of other sites' pages, and confine pages of our own."""

import ipaddress
import socket
from collections.abc import Collection
from urllib.parse import urlsplit

HEADERS = {  # of every answer that a browser shows
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


def is_own_host(host: str, others: Collection[str] = ()) -> bool:
    """Tell whether a Host header names an address, this host, or one of `others` (`*` is any name).

    Any other name may be an attacker's, who lets it point here after the browser has loaded a page of that name.
    """
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    if "*" in others or name in {"localhost", socket.gethostname().lower(), *map(str.lower, others)}:
        return True
    try:
        return ipaddress.ip_address(name) is not None
    except ValueError:
        return False


def is_foreign(host: str, origin: str | None, site: str | None, others: Collection[str] = ()) -> bool:
    """Tell whether a page of another site has sent a request, by its headers Host, Origin and Sec-Fetch-Site.

    `others` are names of this host that a proxy may have replaced.
    """
    try:
        page = urlsplit(origin or "")
    except ValueError:
        return True
    is_ours = page.netloc == host or page.hostname in others
    return site in ("cross-site", "same-site") or (origin is not None and not is_ours)
