"""CEL selectors of DeviceClasses and claims: whether a device meets them.

The language is Google's own cel-cpp, by cel-expr-python. What Kubernetes adds is here: comparing
quantities and versions, and an empty map for a domain that a device lacks. What this cannot
evaluate is never guessed.

Source: k8s.io/dynamic-resource-allocation/cel/compile.go and k8s.io/apiserver/pkg/cel/library of
Kubernetes 1.37.
"""

from __future__ import annotations

import contextlib
import re
import resource
from collections.abc import Iterator
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any

from npu_agent.kube.objects import SliceDevice
from npu_agent.people.cluster.objects import quantity
from npu_agent.text import one_line

_SEMVER = re.compile(
    r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(?:-([0-9A-Za-z.-]+))?(?:\+[0-9A-Za-z.-]+)?", re.ASCII
)
_LOOKUP = re.compile(r"""device\.(?:attributes|capacity)\s*\[\s*("[^"\\]*"|'[^'\\]*')\s*\]""")
_MAP = re.compile(r"\b(attributes|capacity)\b")
_STATUS = re.compile(r"^([A-Z_]+: )+")
"""What cel-cpp puts before its words."""
_MEMORY = 256 * 2**20
"""Bytes for the selectors of an answer."""
_QUANTITY = "kubernetes.Quantity"
"""The key of a map that stands for a quantity."""
_VERSION = "kubernetes.Semver"
"""The key of a map that stands for a version."""


class CannotJudgeError(Exception):
    """This cannot be evaluated here; the message says why."""


class CelError(Exception):
    """The expression fails on this device. The scheduler then gives the Pod up, on all Nodes."""


def matches(expression: str, device: SliceDevice, driver: str) -> bool:
    """Whether a device of the driver meets the expression.

    Raises:
        CelError: it fails on this device, as with an attribute that the device lacks.
        CannotJudgeError: it has what is not known here, or CEL is not installed.
    """
    compiled, domains = _compiled(expression)
    quantities = (
        (name, _quantity(capacity["value"])) for name, capacity in device.capacity.items()
    )
    try:
        variable = {
            "driver": driver,
            "allowMultipleAllocations": bool(device.allow_multiple_allocations),
            "attributes": _by_domain(_values(device, expression), driver, domains),
            "capacity": _by_domain(quantities, driver, domains),
        }
        answer = compiled.eval(data={"device": variable})
    except RuntimeError as error:  # 10,000 steps, which may be too few
        raise CannotJudgeError(_words(error)) from None
    except MemoryError:
        raise CannotJudgeError(f"it takes more than {_MEMORY >> 20} MiB") from None
    except (KeyError, OverflowError, TypeError, ValueError) as error:
        raise CelError(f"the device has an odd attribute or capacity ({_words(error)})") from None
    if isinstance(value := answer.value(), bool):
        return value
    raise CelError(_words(value) if answer.type().name() == "ERROR" else "its value is not a bool")


@contextlib.contextmanager
def limited_memory() -> Iterator[None]:
    """Within it, what `matches` evaluates may take 256 MiB: a few words grow to gigabytes.

    By the limit of this process, so that nothing else should run meanwhile.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with contextlib.suppress(OSError, ValueError):  # not on Linux, or a lower limit is set
        pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
        most = pages * resource.getpagesize() + _MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _words(error: object) -> str:
    return _STATUS.sub("", one_line(error))


def _by_domain(
    values: Iterator[tuple[str, Any]], driver: str, domains: set[str]
) -> dict[str, dict[str, Any]]:
    attributes: dict[str, dict[str, Any]] = {domain: {} for domain in domains}
    for name, value in values:
        domain, _, key = name.rpartition("/")
        attributes.setdefault(domain or driver, {})[key] = value
    return attributes


def _values(device: SliceDevice, expression: str) -> Iterator[tuple[str, Any]]:
    for name, typed in device.attributes.items():
        kind, value = next(iter(typed.items()), ("", ""))
        if kind in ("int", "bool", "string", "version"):
            yield name, _version(value) if kind == "version" else value
        elif name.rpartition("/")[2] in expression:
            raise CannotJudgeError(f"it reads attribute {name}, which has type {kind or 'none'}")


@lru_cache(maxsize=512)
def _compiled(expression: str) -> tuple[Any, set[str]]:
    """The expression, and the domains that it looks up."""
    environment = _environment()
    if _MAP.search(_LOOKUP.sub("", expression)):
        raise CannotJudgeError("it uses a map of domains as a whole")
    try:
        compiled = environment.compile(expression)
    except RuntimeError as error:
        raise CannotJudgeError(_words(error)) from None
    return compiled, {text[1:-1] for text in _LOOKUP.findall(expression)}


@lru_cache(maxsize=1)
def _environment() -> Any:
    try:
        from cel_expr_python import cel
        from cel_expr_python.ext import ext_bindings, ext_optional, ext_strings
    except ImportError:
        install = "`pipx install '.[kubectl]'` in a clone of npu-agent"
        raise CannotJudgeError(f"CEL is not installed: {install}") from None

    any_ = cel.Type.DYN
    of = cel.Type
    functions = (
        ("quantity", any_, [of.STRING], False, _quantity),
        ("semver", any_, [of.STRING], False, _version),
        ("compareTo", of.INT, [any_, any_], True, _compare),
        ("isGreaterThan", of.BOOL, [any_, any_], True, lambda a, b: _compare(a, b) > 0),
        ("isLessThan", of.BOOL, [any_, any_], True, lambda a, b: _compare(a, b) < 0),
    )
    declared = [
        cel.FunctionDecl(
            name, [cel.Overload(f"kubernetes_{name}", returned, taken, member, function)]
        )
        for name, returned, taken, member, function in functions
    ]
    return cel.NewEnv(
        variables={"device": of.Map(of.STRING, any_)},
        extensions=[
            cel.CelExtension("kubernetes", declared),
            ext_bindings.ExtBindings(),
            ext_optional.ExtOptional(),
            ext_strings.ExtStrings(),
        ],
    )


def _quantity(text: str) -> dict[str, str]:
    return {_QUANTITY: str(quantity(text))}


def _version(text: str) -> dict[str, str]:
    """Two that differ in their build metadata alone are equal."""
    if not _SEMVER.fullmatch(text):
        raise ValueError(f"{text!r} is not a version")
    return {_VERSION: text.partition("+")[0]}


def _compare(a: Any, b: Any) -> int:
    """-1, 0 or 1 for two quantities or two versions; raises KeyError or TypeError for others."""
    left: Any
    right: Any
    if _VERSION in a:
        left = _order(a[_VERSION])
        right = _order(b[_VERSION])
    else:
        left = Fraction(a[_QUANTITY])
        right = Fraction(b[_QUANTITY])
    return int(left > right) - int(left < right)


def _order(version: str) -> tuple[list[int], bool, list[tuple[bool, int, str]]]:
    """Sorts as semver 2.0.0 orders: a pre-release is before its release."""
    numbers, _, before = version.partition("-")
    parts = before.split(".") if before else []
    return (
        [int(number) for number in numbers.split(".")],
        not before,
        [(not part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts],
    )
