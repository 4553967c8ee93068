"""JSON of other programs as msgspec types: what is missing or of another type is one clear error.

For answers of the API server, the kubelet's files and the agent's own record. A type has only what
is read of a document; msgspec ignores other fields. Go writes an empty list or map as ``null``
where its type does not omit it: such a field is ``list[T] | None = None``.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")


class InvalidJsonError(ValueError):
    """A document is not JSON, or not of the type asked for.

    The message names the field: ``metadata.uid is missing``.
    """


def decode(document: bytes | str | msgspec.Raw, type_: type[T]) -> T:
    try:
        return msgspec.json.decode(document, type=type_)
    except (ValueError, RecursionError) as error:
        raise InvalidJsonError(_words(error)) from error


def convert(value: Any, type_: type[T]) -> T:
    try:
        return msgspec.convert(value, type=type_)
    except (ValueError, RecursionError) as error:
        raise InvalidJsonError(_words(error)) from error


def _words(error: Exception) -> str:
    if not isinstance(error, msgspec.ValidationError):
        return f"not JSON ({error})"
    what, _, path = str(error).replace("`", "").partition(" - at $")
    path = path.removeprefix(".")
    if missing := re.fullmatch(r"Object missing required field (.+)", what):
        return f"{path}.{missing[1]} is missing".removeprefix(".")
    return f"{path}: {what[0].lower()}{what[1:]}" if path else what[0].lower() + what[1:]
