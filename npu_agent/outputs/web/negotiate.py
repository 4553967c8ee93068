"""What a client may be sent, by its Accept headers (RFC 9110, 12.5). Pure."""

from __future__ import annotations

_OPENMETRICS_VERSIONS = ("", "1.0.0", "0.0.1")


def wants_openmetrics(accept: str) -> bool:
    """Whether a scraper that sends this Accept header prefers OpenMetrics to the text format.

    Only if it names OpenMetrics: who accepts anything gets the format that everyone reads.
    """
    openmetrics = plain = 0.0
    for name, parameters, quality in _items(accept):
        if name == "application/openmetrics-text":
            if parameters.get("version", "") in _OPENMETRICS_VERSIONS:
                openmetrics = max(openmetrics, quality)
        elif name in ("text/plain", "text/*", "*/*"):
            plain = max(plain, quality)
    return openmetrics > 0 and openmetrics >= plain


def takes_gzip(accept_encoding: str) -> bool:
    """Whether a client that sends this Accept-Encoding header accepts gzip."""
    qualities = {name: quality for name, _, quality in _items(accept_encoding)}
    return qualities.get("gzip", qualities.get("*", 0.0)) > 0


def _items(header: str) -> list[tuple[str, dict[str, str], float]]:
    """Each item's name in lower case, its parameters and its weight, 0 to 1."""
    items = []
    for item in header.split(","):
        name, *rest = (part.strip() for part in item.split(";"))
        pairs = (part.partition("=") for part in rest)
        parameters = {key.strip().lower(): value.strip().strip('"') for key, _, value in pairs}
        try:
            quality = float(parameters.get("q", "1"))
        except ValueError:
            quality = 0.0
        items.append((name.lower(), parameters, quality if 0 <= quality <= 1 else 0.0))
    return items
