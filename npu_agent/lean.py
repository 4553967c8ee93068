"""Libraries without what the agent has no use for: on every node, memory is what it costs.

Some libraries import all that they have, whatever one wants of them. What is here is put off, not
taken away: who asks for it after all gets it.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import ssl
import sys
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

_importing = threading.RLock()


def package(name: str) -> ModuleType:
    """Has a package, and modules of it, imported without its `__init__`, which imports everything.

    The `__init__` runs when somebody asks the package for something that it does not have yet.
    (`importlib.util.LazyLoader` would run it for each module of it, and at the second import.)

    Raises:
        ImportError: it is not installed.
    """
    with _importing:
        if name in sys.modules:
            return sys.modules[name]
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            raise ImportError(f"{name} is not installed", name=name)
        made = importlib.util.module_from_spec(spec)
        run = spec.loader.exec_module

        def whole(attribute: str) -> Any:
            with _importing:
                if made.__dict__.pop("__getattr__", None):
                    run(made)
            return getattr(made, attribute)

        made.__dict__["__getattr__"] = whole  # PEP 562
        sys.modules[name] = made
        return made


def aiohttp() -> None:
    """Imports aiohttp; takes a quarter of a second the first time: call it on a thread.

    When it is imported it makes two TLS contexts for whoever brings none. The agent brings its own,
    so those go without the system's certificate authorities: 144 of them, twice, take 1.6 MB, and
    0.15 s of the time in which the agent should register.
    """
    with _importing:
        if "aiohttp" not in sys.modules:  # else a context that is made just now would lack them
            with _no_authorities():
                importlib.import_module("aiohttp")


@contextlib.contextmanager
def _no_authorities() -> Iterator[None]:
    load = ssl.SSLContext.set_default_verify_paths
    ssl.SSLContext.set_default_verify_paths = lambda _: None  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        ssl.SSLContext.set_default_verify_paths = load  # type: ignore[method-assign]
