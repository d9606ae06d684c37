"""Guard a server without a password in a browser: confine its page, and refuse uploads of other sites' pages."""

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


def is_foreign(host: str, origin: str | None, site: str | None, others: Collection[str] = ()) -> bool:
    """Tell whether a page of another site has sent a request, by its headers Host, Origin and Sec-Fetch-Site.

    `others` are further names of this host, which a proxy may have replaced.
    """
    try:
        page = urlsplit(origin or "")
    except ValueError:
        return True
    is_ours = page.netloc == host or page.hostname in others
    return site in ("cross-site", "same-site") or (origin is not None and not is_ours)
