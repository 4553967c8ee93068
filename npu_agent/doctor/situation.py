"""Where the doctor is: the configuration, the host, the vendors of cards, and who asks."""

from __future__ import annotations

import asyncio
import os
import platform
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from npu_agent.config import Config, ConfigError, default_config, from_args
from npu_agent.config.resources import resources_of
from npu_agent.core.offer import Resource
from npu_agent.core.vendor import Vendor
from npu_agent.core.vendor_spec import VendorSpec, merged
from npu_agent.doctor.check import CONFIGURATION, Check, Unseen, Verdict
from npu_agent.kube.serviceaccount import DIRECTORY

if TYPE_CHECKING:
    import argparse


T = TypeVar("T")
U = TypeVar("U")

_RIGHTS = "npu-agent/rights"
"""The label of the objects in k8s/ that give the agent its rights."""
_LONGEST = 45.0
"""Seconds for a probe, which has a deadline of its own, far shorter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What all lines depend on. What several of them need to see is seen once, by `see`."""

    config: Config
    host_root: Path
    vendors: tuple[Vendor, ...]
    """Those of this host."""
    node_name: str | None
    in_pod: bool
    """Else on the host itself."""
    uid: int
    hostname: str
    """In a Pod this is the Pod's name."""
    namespace: str = "kube-system"
    """The agent's."""
    helm_release: str = ""
    """What it was installed as; empty: by kustomize or by one file, or not known."""
    proc: Path = Path("/proc")
    agent_config: Path = Path("/etc/npu-agent/config.yaml")
    """Where the DaemonSet mounts the agent's configuration."""
    _seen: dict[Callable[[Situation], Awaitable[Any]], asyncio.Task[Any]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @classmethod
    def here(cls, config: Config, host_root: Path, vendors: Iterable[Vendor]) -> Situation:
        """The one of this process."""
        return cls(
            config=config,
            host_root=host_root,
            vendors=tuple(vendors),
            node_name=os.environ.get("NODE_NAME") or None,
            in_pod="KUBERNETES_SERVICE_HOST" in os.environ,
            uid=os.geteuid(),
            hostname=platform.node(),
            namespace=_own_namespace(),
            helm_release=os.environ.get("HELM_RELEASE", ""),
        )

    @property
    def directory(self) -> Path:
        """The kubelet's device-plugins directory; used as configured, as the agent does."""
        return Path(self.config.plugin_dir)

    @property
    def resources(self) -> tuple[Resource, ...]:
        """What the configuration offers."""
        return resources_of(
            self.config, merged([vendor.spec for vendor in self.vendors]).core_counts
        )

    @property
    def drivers(self) -> tuple[str, ...]:
        """The names of the vendors' DRA drivers."""
        words = (vendor.spec for vendor in self.vendors)
        return tuple(each.dra.driver for each in words if each.dra)

    # --- commands for people: those of kubectl and Helm are typed where they work on the cluster

    @property
    def options(self) -> tuple[str, ...]:
        """What `command` takes in addition, so that the agent's files are read."""
        if not self.in_pod:
            return ()
        return f"--config-file={self.agent_config}", f"--host-root={self.host_root}"

    def command(self, *words: str) -> str:
        """One of npu-agent itself."""
        where = f"kubectl -n {self.namespace} exec {self.hostname} -- " if self.in_pod else ""
        return f"{where}npu-agent {' '.join(words)}"

    def on_the_host(self, path: Path) -> Path:
        """The same file, for a command that is typed on the host."""
        inside = self.in_pod and path.is_relative_to(self.host_root)
        return Path("/", path.relative_to(self.host_root)) if inside else path

    @property
    def agent_log(self) -> str:
        """The command that shows what the agents logged."""
        return (
            f"kubectl -n {self.namespace} logs -l app.kubernetes.io/name=npu-agent "
            "--prefix --tail=50"
        )

    @property
    def overlay_is(self) -> str:
        """What the two commands below have a word for."""
        text = " (OVERLAY: the directory it was installed from; if that was one file: -f FILE)"
        return "" if self.helm_release else text

    def apply_again(self) -> str:
        """The command that applies what the agent was installed from, after a correction there.

        With --force-conflicts also what was changed by kubectl is restored.
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

    async def see(self, probe: Callable[[Situation], Awaitable[T]]) -> T:
        """What `probe` returns; it runs once, however many lines need it.

        Raises:
            Unseen: it could not be seen.
        """
        if probe not in self._seen:
            self._seen[probe] = asyncio.create_task(_within(probe(self)))
        return await asyncio.shield(self._seen[probe])

    async def see_or(self, probe: Callable[[Situation], Awaitable[T]], otherwise: U) -> T | U:
        """As `see`; `otherwise` if it could not be seen."""
        try:
            return await self.see(probe)
        except Unseen:
            return otherwise


def _own_namespace() -> str:
    """The Pod's, or the usual one."""
    try:
        return (DIRECTORY / "namespace").read_text()
    except OSError:
        return "kube-system"


async def _within(probing: Awaitable[T]) -> T:
    try:
        async with asyncio.timeout(_LONGEST):
            return await probing
    except TimeoutError:
        raise Unseen(f"no answer within {_LONGEST:g} s") from None


def configuration(args: argparse.Namespace, words: VendorSpec) -> tuple[Config, Check]:
    """The configuration to check by, and the line on it.

    Of a file that is refused, what is good in it.

    Args:
        args: parsed by a parser with `npu_agent.config.add_options`.
        words: as for `npu_agent.config.load`.

    Raises:
        ConfigError: the command line itself is wrong.
    """
    file: Path | None = getattr(args, "config_file", None)
    try:
        effective = from_args(args, words)
    except ConfigError as error:
        if file is None or any(p.place.source.startswith("--") for p in error.problems):
            raise
        defaults = default_config(words)
        good = error.good or defaults
        rest = "the defaults" if good == defaults else "what is good in it"
        return good, _line(
            Verdict.WRONG,
            "; ".join(map(str, error.problems)),
            f"fix it (`npu-agent config check` verifies it); all else was checked with {rest}",
            f"npu-agent config check {file}",
        )
    if file is not None:
        return effective.config, _line(Verdict.OK, f"{file} is good")
    given = sorted({origin for origin in effective.origins.values() if origin != "default"})
    sources = ", ".join(given) + " and the defaults" if given else "the defaults"
    return effective.config, _line(Verdict.OK, f"no file; {sources}")


def _line(state: Verdict, detail: str, remedy: str = "", command: str = "") -> Check:
    return Check("config", state, detail, remedy, command, section=CONFIGURATION)


def forgotten(args: argparse.Namespace, situation: Situation, check: Check) -> Check:
    """The line on the configuration, if the agent of this Pod has a file that was not named."""
    if "config_file" in args or not (situation.in_pod and situation.agent_config.exists()):
        return check
    detail = f"{check.detail}, while this Pod has {situation.agent_config}"
    command = situation.command("doctor", *situation.options)
    return _line(Verdict.NOTE, detail, "check by that file", command)
