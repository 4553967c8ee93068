"""kubernetes_asyncio without its models.

Importing anything of it imports all of it: each package's `__init__` imports every API and every
model, some 900 modules, of which four are used here. Beside aiohttp that is 37 MB and half a
second; the four alone are 3 MB and less than a tenth (docs/kubernetes-api.md).

So its packages are put into `sys.modules` unexecuted, as mere places where modules are found. That
relies on how the library is laid out: where it does not work, all of it is imported as usual.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from npu_agent import lean
from npu_agent.logs import logger

log = logger(__name__)

_ROOT = "kubernetes_asyncio"
_UNEXECUTED = (_ROOT, f"{_ROOT}.client", f"{_ROOT}.config", f"{_ROOT}.client.models")
_REEXPORTED = {"configuration": "Configuration", "api_client": "ApiClient"}
"""Modules of kubernetes_asyncio.client, and what others take from them through the package."""

_importing = threading.Lock()


def module(name: str) -> ModuleType:
    """Imports a module of kubernetes_asyncio and as little else of it as possible.

    Takes a tenth of a second the first time: call it on a thread.

    Args:
        name: with its package, such as ``kubernetes_asyncio.client.api_client``.

    Raises:
        ImportError: the library is not installed, or has no such module.
    """
    with _importing:
        try:
            lean.aiohttp()
            # It asks urllib3 for a header of basic authentication, and for nothing else: 1 MB.
            lean.package("urllib3")
            with _no_pool():
                if _ROOT not in sys.modules:
                    _seed()
                return importlib.import_module(name)
        except (ImportError, AttributeError) as error:
            if not _seeded():
                raise
            log.warning(
                "kubernetes_asyncio is not laid out as this agent knows it: loading all of it, "
                "which takes some 35 MB more memory",
                module=name,
                error=error,
            )
            _forget()
            importlib.import_module(_ROOT)
            return importlib.import_module(name)


@contextlib.contextmanager
def _no_pool() -> Iterator[None]:
    """Puts multiprocessing, 0.5 MB, off until there are calls on threads, which nobody makes."""
    name = "multiprocessing.pool"
    if name in sys.modules:
        yield
        return
    stand_in = ModuleType(name)
    stand_in.__dict__["ThreadPool"] = _thread_pool
    sys.modules[name] = stand_in
    try:
        yield
    finally:
        del sys.modules[name]


def _thread_pool(*arguments: Any) -> Any:
    return importlib.import_module("multiprocessing.pool").ThreadPool(*arguments)


def _seed() -> None:
    for name in _UNEXECUTED:
        spec = importlib.util.find_spec(name)
        if spec is None:
            raise ImportError(f"{name} is not there")
        package = sys.modules[name] = importlib.util.module_from_spec(spec)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, package)
        package.__dict__["_unexecuted"] = True
    client = sys.modules[f"{_ROOT}.client"]
    for name, what in _REEXPORTED.items():
        found = importlib.import_module(f"{_ROOT}.client.{name}")
        setattr(client, what, getattr(found, what))


def _seeded() -> bool:
    return hasattr(sys.modules.get(_ROOT), "_unexecuted")


def _forget() -> None:
    for name in [name for name in sys.modules if name == _ROOT or name.startswith(f"{_ROOT}.")]:
        del sys.modules[name]
