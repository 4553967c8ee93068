"""CEL selectors of DeviceClasses and claims: which devices meet them.

The language is Google's own cel-cpp, by cel-expr-python. What Kubernetes adds is here: quantities,
versions, and an empty map for a domain that a device lacks. What this cannot evaluate is never
guessed. Selectors are other people's: a process with limits of its own evaluates them.

Source: k8s.io/dynamic-resource-allocation/cel/compile.go and k8s.io/apiserver/pkg/cel/library of
Kubernetes 1.37.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import select
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from npu_agent.kube.objects import SliceDevice
from npu_agent.people.cluster.quantity import quantity
from npu_agent.text import one_line

_SEMVER = re.compile(
    r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(?:-([0-9A-Za-z.-]+))?(?:\+[0-9A-Za-z.-]+)?", re.ASCII
)
_TEXT = r"""("[^"\\]*"|'[^'\\]*')"""
_DOMAIN = rf"device\.(?:attributes|capacity)\s*\[\s*{_TEXT}\s*\]"
_LOOKUP = re.compile(_DOMAIN)
_FIELD = re.compile(rf"{_DOMAIN}(?:\.\??(\w+)\b(?!\s*\()|\[\??{_TEXT}\])")
_IN = re.compile(rf"{_TEXT}\s+in\s+{_DOMAIN}(?![.\[])")
_MAP = re.compile(r"\b(attributes|capacity)\b")
_STATUS = re.compile(r"^[A-Z_]+: ")
"""What cel-cpp puts before its words."""
_QUANTITY, _VERSION = "kubernetes.Quantity", "kubernetes.Semver"
"""Keys of the maps that stand for values of these types."""


_SECONDS = 1.0
"""For one expression and all devices."""
_MEMORY = 512 * 2**20
"""Bytes, in addition to what the process has."""


class CannotJudgeError(Exception):
    """This cannot be evaluated here; the message says why."""


class CelError(Exception):
    """The expression fails on this device. The scheduler then gives the Pod up, on all Nodes."""


class Judged(msgspec.Struct, frozen=True):
    """The answers of an expression."""

    met: tuple[bool | None, ...]
    """Of each device; None: the expression fails on it."""
    error: str = ""
    """Of the first device on which it fails."""
    unknown: str = ""
    """Why none could be judged."""


def judge(expression: str, devices: Sequence[tuple[str, SliceDevice]]) -> Judged:
    """Evaluates an expression for devices and their drivers, within a second.

    Raises:
        CannotJudgeError: it has what is not known here, or takes too long, or CEL is not installed.
    """
    _environment()
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # there may be threads
        child = os.fork()
    if not child:
        try:
            os.close(read)
            _limit()
            with os.fdopen(write, "wb") as answer:
                answer.write(msgspec.json.encode(_judge(expression, devices)))
        finally:
            os._exit(0)
    os.close(write)
    try:
        return _answer(read)
    finally:
        os.close(read)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _answer(read: int) -> Judged:
    until, text = time.monotonic() + _SECONDS, b""
    while select.select([read], [], [], max(0.0, until - time.monotonic()))[0]:
        if part := os.read(read, 2**16):
            text += part
            continue
        if not text:
            raise CannotJudgeError("its evaluation ended early: it may take 512 MiB")
        judged = msgspec.json.decode(text, type=Judged)
        if judged.unknown:
            raise CannotJudgeError(judged.unknown)
        return judged
    raise CannotJudgeError(f"it takes more than {_SECONDS:g} s")


def _limit() -> None:
    """Limits the memory of this process, where the system can."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what C++ says when it has no memory
    with contextlib.suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + _MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _judge(expression: str, devices: Sequence[tuple[str, SliceDevice]]) -> Judged:
    met: list[bool | None] = []
    first = ""
    try:
        for driver, device in devices:
            try:
                met.append(matches(expression, device, driver))
            except CelError as error:
                met.append(None)
                first = first or str(error)
    except CannotJudgeError as error:
        return Judged((), unknown=str(error))
    return Judged(tuple(met), first)


def matches(expression: str, device: SliceDevice, driver: str) -> bool:
    """Whether a device of the driver meets the expression.

    Raises:
        CelError: it fails on this device, as with an attribute that the device lacks.
        CannotJudgeError: it has what is not known here.
    """
    names = _read(expression, driver)
    attributes, capacity = device.attributes, device.capacity
    if names is not None:
        attributes = {name: attributes[name] for name in names if name in attributes}
        capacity = {name: capacity[name] for name in names if name in capacity}
    what = (driver, bool(device.allow_multiple_allocations), attributes, capacity)
    return _matches(expression, msgspec.json.encode(what))


@lru_cache(maxsize=2**12)
def _read(expression: str, driver: str) -> Sequence[str] | None:
    """The attributes and capacities of which alone the answer depends; None: of all.

    Thousands of devices that differ in their serial numbers are one then.
    """
    lookups = _FIELD.findall(expression)
    lookups += ((of, "", name) for name, of in _IN.findall(expression))
    if len(lookups) != len(_LOOKUP.findall(expression)):
        return None
    names = []
    for domain, field, key in lookups:
        name = field or key[1:-1]
        names += [f"{domain[1:-1]}/{name}", *([name] if domain[1:-1] == driver else [])]
    return names


@lru_cache(maxsize=2**16)
def _matches(expression: str, device: bytes) -> bool:
    """Evaluates like `matches`, for a device with what the expression reads of it."""
    driver, shared, attributes, capacities = msgspec.json.decode(device)
    domains = _domains(expression)
    quantities = ((name, _quantity(capacity["value"])) for name, capacity in capacities.items())
    variable = {
        "driver": driver,
        "allowMultipleAllocations": shared,
        "attributes": _by_domain(_values(attributes, expression), driver, domains),
        "capacity": _by_domain(quantities, driver, domains),
    }
    try:
        answer = _compiled(expression).eval(data={"device": variable})
    except RuntimeError as error:  # 10,000 steps, which may be too few
        raise CannotJudgeError(_STATUS.sub("", one_line(error))) from None
    if isinstance(value := answer.value(), bool):
        return value
    if answer.type().name() != "ERROR":
        raise CelError("its value is not a bool")
    raise CelError(_STATUS.sub("", one_line(value)))


def _domains(expression: str) -> set[str]:
    """The domains that the expression looks up."""
    lookups = _LOOKUP.findall(expression)
    if _MAP.search(_LOOKUP.sub("", expression)):
        raise CannotJudgeError("it uses a map of domains as a whole")
    return {text[1:-1] for text in lookups}


def _by_domain(
    values: Iterator[tuple[str, Any]], driver: str, domains: set[str]
) -> dict[str, dict[str, Any]]:
    attributes: dict[str, dict[str, Any]] = {domain: {} for domain in domains}
    for name, value in values:
        domain, _, key = name.rpartition("/")
        attributes.setdefault(domain or driver, {})[key] = value
    return attributes


def _values(attributes: dict[str, Any], expression: str) -> Iterator[tuple[str, Any]]:
    for name, typed in attributes.items():
        ((kind, value),) = typed.items()
        if kind in ("int", "bool", "string", "version"):
            yield name, _version(value) if kind == "version" else value
        elif name.rpartition("/")[2] in expression:
            raise CannotJudgeError(f"it reads attribute {name}, which has type {kind}")


@lru_cache(maxsize=512)
def _compiled(expression: str) -> Any:
    environment = _environment()
    try:
        return environment.compile(expression)
    except RuntimeError as error:
        why = one_line(error).removeprefix("INVALID_ARGUMENT: ERROR: ")
        raise CannotJudgeError(why) from None


@lru_cache(maxsize=1)
def _environment() -> Any:
    try:
        from cel_expr_python import cel
        from cel_expr_python.ext import ext_bindings, ext_optional, ext_strings
    except ImportError:
        install = "`pipx install '.[kubectl]'` in a clone of npu-agent"
        raise CannotJudgeError(f"CEL is not installed: {install}") from None
    any_, of = cel.Type.DYN, cel.Type
    functions: tuple[tuple[str, Any, tuple[Any, ...], bool, Callable[..., Any]], ...] = (
        ("quantity", any_, (of.STRING,), False, _quantity),
        ("isQuantity", of.BOOL, (of.STRING,), False, lambda text: _is(_quantity, text)),
        ("semver", any_, (of.STRING,), False, _version),
        ("isSemver", of.BOOL, (of.STRING,), False, lambda text: _is(_version, text)),
        ("compareTo", of.INT, (any_, any_), True, _compare),
        ("isGreaterThan", of.BOOL, (any_, any_), True, lambda a, b: _compare(a, b) > 0),
        ("isLessThan", of.BOOL, (any_, any_), True, lambda a, b: _compare(a, b) < 0),
        ("asInteger", of.INT, (any_,), True, _integer),
        ("isInteger", of.BOOL, (any_,), True, lambda operand: _amount(operand).denominator == 1),
        ("add", any_, (any_, any_), True, lambda a, b: _stands(_amount(a) + _amount(b))),
        ("sub", any_, (any_, any_), True, lambda a, b: _stands(_amount(a) - _amount(b))),
        ("major", of.INT, (any_,), True, lambda version: int(version[_VERSION].split(".")[0])),
        ("minor", of.INT, (any_,), True, lambda version: int(version[_VERSION].split(".")[1])),
        ("patch", of.INT, (any_,), True, lambda version: _key(version[_VERSION])[0][2]),
    )
    declared = [
        cel.FunctionDecl(
            name, [cel.Overload(f"kubernetes_{name}", returned, [*taken], member, function)]
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


def _is(read: Callable[[str], Any], text: str) -> bool:
    try:
        read(text)
    except ValueError:
        return False
    return True


def _quantity(text: str) -> dict[str, str]:
    return _stands(quantity(text))


def _stands(amount: Fraction) -> dict[str, str]:
    return {_QUANTITY: str(amount)}


def _amount(value: Any) -> Fraction:
    """Returns the amount of a quantity, or of the int that may be added to one."""
    return Fraction(value if isinstance(value, int) else value[_QUANTITY])


def _integer(value: Any) -> int:
    amount = Fraction(value[_QUANTITY])
    if amount.denominator != 1:
        raise ValueError(f"{amount} is not an integer")
    return int(amount)


def _version(text: str) -> dict[str, str]:
    """Two that differ in their build metadata alone are equal."""
    if not _SEMVER.fullmatch(text):
        raise ValueError(f"{text!r} is not a version")
    return {_VERSION: text.partition("+")[0]}


def _compare(a: Any, b: Any) -> int:
    """-1, 0 or 1 for two quantities or two versions; raises KeyError or TypeError for others."""
    if _VERSION in a:
        left, right = _key(a[_VERSION]), _key(b[_VERSION])
        return (left > right) - (left < right)
    first, second = Fraction(a[_QUANTITY]), Fraction(b[_QUANTITY])
    return (first > second) - (first < second)


def _key(version: str) -> tuple[list[int], bool, list[tuple[bool, int, str]]]:
    """Sorts as semver 2.0.0 orders: a pre-release is before its release."""
    numbers, _, before = version.partition("-")
    parts = before.split(".") if before else []
    return (
        [int(number) for number in numbers.split(".")],
        not before,
        [(not part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts],
    )
