"""What a client may be sent, by its Accept headers (RFC 9110, 12.5). Pure."""

from __future__ import annotations

_OPENMETRICS_VERSIONS = ("", "1.0.0", "0.0.1")


def wants_openmetrics(accept: str) -> bool:
    """Whether a scraper that sends this Accept header prefers OpenMetrics to the text format.

    Only if it names OpenMetrics: who accepts anything gets the format that everyone reads.
    """
    openmetrics = plain = 0.0
    for name, parameters in _items(accept):
        quality = _quality(parameters)
        if name == "application/openmetrics-text":
            if parameters.get("version", "") in _OPENMETRICS_VERSIONS:
                openmetrics = max(openmetrics, quality)
        elif name in ("text/plain", "text/*", "*/*"):
            plain = max(plain, quality)
    return openmetrics > 0 and openmetrics >= plain


def takes_gzip(accept_encoding: str) -> bool:
    """Whether a client that sends this Accept-Encoding header accepts gzip."""
    qualities = {name: _quality(parameters) for name, parameters in _items(accept_encoding)}
    return qualities.get("gzip", qualities.get("*", 0.0)) > 0


def _items(header: str) -> list[tuple[str, dict[str, str]]]:
    """The header's items, each with its parameters; names in lower case."""
    items = []
    for item in header.split(","):
        name, *rest = (part.strip() for part in item.split(";"))
        pairs = (part.partition("=") for part in rest)
        parameters = {key.strip().lower(): value.strip().strip('"') for key, _, value in pairs}
        items.append((name.lower(), parameters))
    return items


def _quality(parameters: dict[str, str]) -> float:
    """The item's weight, 0 to 1; one that is no number counts as 0."""
    try:
        quality = float(parameters.get("q", "1"))
    except ValueError:
        return 0.0
    return quality if 0 <= quality <= 1 else 0.0
