"""What a check is: the line that it returns, and the context that it gets."""

from __future__ import annotations

import asyncio
import enum
import os
import platform
import shlex
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from npu_agent.config import Config
from npu_agent.core.state import Invocation
from npu_agent.core.vendor import Vendor
from npu_agent.kube import Api, ApiError
from npu_agent.kube.credentials import own_namespace
from npu_agent.text import reason
from npu_agent.threads import DaemonThread

T = TypeVar("T")
U = TypeVar("U")

SUDO = "run this as root: sudo npu-agent doctor"
_RIGHTS = "npu-agent/rights"


class State(enum.Enum):
    """The result of a line. Only WRONG fails the command."""

    OK = "ok"
    NOTE = "note"
    """The agent works; people should know."""
    UNUSED = "n/a"
    """The configuration, or this place, has no use for it."""
    UNKNOWN = "unknown"
    """It could not be seen from here, or by this user."""
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Check:
    """A line of the report of `doctor` and `verify`. Field names are those of the JSON."""

    name: str
    """The subject: ``plugin directory``, ``card npu0``."""
    state: State
    detail: str
    remedy: str = ""
    command: str = ""
    section: str = ""

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"state": self.state.value}


Lines = AsyncIterator[tuple[str, Check | Coroutine[Any, Any, Check]]]

ok = partial(Check, "", State.OK)
note = partial(Check, "", State.NOTE)
unused = partial(Check, "", State.UNUSED)
unknown = partial(Check, "", State.UNKNOWN)


def wrong(detail: str, remedy: str, command: str) -> Check:
    return Check("", State.WRONG, detail, remedy, command)


def failed(checks: Iterable[Check]) -> bool:
    return any(check.state is State.WRONG for check in checks)


class Unknown(Exception):  # noqa: N818 (no error: the line says that it is unknown)
    """Something that a line needs could not be seen."""

    def __init__(self, why: str, remedy: str = "") -> None:
        super().__init__(why)
        self.check = unknown(why, remedy)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckTiming:
    """Deadlines of probes, in seconds; all probes run at the same time."""

    read: float = 5.0
    """Deadline of a read of this host, which normally takes milliseconds."""
    request: float = 5.0
    connection: float = 3.0
    """Deadline of an answer of an agent or device plugin. The kubelet's probes wait for two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The context of all checks. `probe` caches what several of them need."""

    config: Config
    host_root: Path
    vendor: Vendor
    node_name: str | None
    in_pod: bool
    uid: int
    hostname: str
    """In a Pod this is the Pod's name."""
    namespace: str = "kube-system"
    helm_release: str = ""
    """The Helm release; empty: kustomize, one file, or unknown."""
    timing: CheckTiming = CheckTiming()
    _probed: dict[Callable[[Context], Awaitable[Any]], asyncio.Future[Any]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @classmethod
    def here(cls, config: Config, host_root: Path, vendor: Vendor) -> Context:
        return cls(
            config=config,
            host_root=host_root,
            vendor=vendor,
            node_name=os.environ.get("NODE_NAME") or None,
            in_pod="KUBERNETES_SERVICE_HOST" in os.environ,
            uid=os.geteuid(),
            hostname=platform.node(),
            namespace=own_namespace() or "kube-system",
            helm_release=os.environ.get("HELM_RELEASE", ""),
        )

    @property
    def directory(self) -> Path:
        return Path(self.config.plugin_dir)

    @property
    def agent_log(self) -> str:
        return (
            f"kubectl -n {self.namespace} logs -l app.kubernetes.io/part-of=npu-agent "
            "--prefix --tail=50"
        )

    @property
    def overlay_is(self) -> str:
        """Explains OVERLAY in the two commands below."""
        text = " (OVERLAY: the directory it was installed from; if that was one file: -f FILE)"
        return "" if self.helm_release else text

    def apply_again(self) -> str:
        """The command that applies a corrected installation again.

        --force-conflicts also restores what kubectl has changed.
        """
        if self.helm_release:
            return (
                f"helm upgrade {self.helm_release} k8s/chart --namespace {self.namespace} "
                "--reset-then-reuse-values --force-conflicts"
            )
        return "kubectl apply -k OVERLAY"

    def restore_rights(self) -> str:
        """The command that restores the agent's account and rights, and changes nothing else.

        Applied as Helm does it, or its next upgrade ends with a conflict.
        """
        if self.helm_release:
            return (
                f"helm get manifest {self.helm_release} --namespace {self.namespace} | "
                "kubectl apply --server-side --force-conflicts --field-manager=helm "
                f"-l {_RIGHTS} -f -"
            )
        return f"kubectl apply -l {_RIGHTS} -k OVERLAY"

    def at_desk(self, check: Check) -> Check:
        """The check with its command as a person types it who reads the report of a Pod."""
        program, _, words = check.command.partition(" ")
        if not self.in_pod or program in ("", "kubectl", "helm"):
            return check
        invocation = Invocation(pod=f"{self.namespace}/{self.hostname}")
        if program == "npu-agent":
            return replace(check, command=invocation.command(*shlex.split(words)))
        return replace(check, command=invocation.on_node(check.command, self.node_name or "NODE"))

    async def probe(self, function: Callable[[Context], Awaitable[T]]) -> T:
        """Runs `function` once, however many checks need it; returns or raises what it does."""
        if function not in self._probed:
            self._probed[function] = asyncio.ensure_future(function(self))
        return await asyncio.shield(self._probed[function])

    async def probe_or(self, function: Callable[[Context], Awaitable[T]], default: U) -> T | U:
        """Probes like `probe`; `default` if it is unknown or the API server does not answer."""
        try:
            return await self.probe(function)
        except (Unknown, ApiError):
            return default

    async def in_thread(self, function: Callable[[], T]) -> T:
        """Runs `function` on a daemon thread of its own.

        Raises:
            Unknown: it raises OSError, or does not return in time.
        """
        with os_errors_are_unknown():
            return await DaemonThread().call(function, deadline=self.timing.read)

    def api_server(self) -> Api:
        return Api(deadline=self.timing.request)


@contextmanager
def os_errors_are_unknown() -> Iterator[None]:
    """Raises Unknown in place of OSError."""
    try:
        yield
    except OSError as error:
        raise Unknown(reason(error), SUDO if isinstance(error, PermissionError) else "") from error
