"""Where the doctor is: the configuration, the host, the vendor's cards, and who asks."""

from __future__ import annotations

import os
import platform
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from npu_agent.config import Config, ConfigError, default_config, from_args
from npu_agent.config.resources import resources_of
from npu_agent.core.hardware import Snapshot
from npu_agent.core.offer import Resource
from npu_agent.core.vocabulary import LabelSet, Vocabulary
from npu_agent.doctor.check import Check, State

if TYPE_CHECKING:
    import argparse


@dataclass(frozen=True, slots=True, kw_only=True)
class Driver:
    """A family's driver."""

    family: str
    title: str
    """Of the family's cards: ``Acme Anvil``."""
    directory: str
    """Below the host root: has one entry a card, and is there as soon as the driver is loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vendor:
    """What the checks have to know of a vendor; the functions may block, and raise OSError."""

    name: str
    pci: str
    """Its PCI vendor ID: ``1a2b``."""
    sockets: str
    """What the names of its own device plugins' sockets have in them."""
    drivers: tuple[Driver, ...]
    words: Vocabulary
    """The families, and the words of the config."""
    label_sets: Callable[[Collection[str]], tuple[LabelSet, ...]]
    """The label sets of these names."""
    snapshot: Callable[[Path], Awaitable[Snapshot]]
    """The cards of the host whose root this is, each read once."""
    addresses: Callable[[Path], frozenset[str]]
    """The PCI addresses of all entries in the drivers' directories, odd ones too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What all probes and checks depend on."""

    config: Config
    host_root: Path
    vendor: Vendor
    node_name: str | None
    in_pod: bool
    """Else on the host itself."""
    uid: int
    hostname: str
    """In a Pod this is the Pod's name."""
    proc: Path = Path("/proc")
    agent_config: Path = Path("/etc/npu-agent/config.yaml")
    """Where the DaemonSet mounts the agent's configuration."""

    @classmethod
    def here(cls, config: Config, host_root: Path, vendor: Vendor) -> Situation:
        """The one of this process."""
        return cls(
            config=config,
            host_root=host_root,
            vendor=vendor,
            node_name=os.environ.get("NODE_NAME") or None,
            in_pod="KUBERNETES_SERVICE_HOST" in os.environ,
            uid=os.geteuid(),
            hostname=platform.node(),
        )

    @property
    def directory(self) -> Path:
        """The kubelet's device-plugins directory; used as configured, as the agent does."""
        return Path(self.config.plugin_dir)

    @property
    def resources(self) -> tuple[Resource, ...]:
        """What the configuration offers."""
        return resources_of(self.config, self.vendor.words.core_counts)


def configuration(args: argparse.Namespace, words: Vocabulary) -> tuple[Config, Check]:
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
        return good, Check(
            "config",
            State.WRONG,
            "; ".join(map(str, error.problems)),
            f"fix it (`npu-agent config check` verifies it); all else below was checked with "
            f"{rest}",
        )
    if file is not None:
        return effective.config, Check("config", State.OK, f"{file} is good")
    given = sorted({origin for origin in effective.origins.values() if origin != "default"})
    sources = ", ".join(given) + " and the defaults" if given else "the defaults"
    return effective.config, Check("config", State.OK, f"no file; {sources}")


def forgotten(args: argparse.Namespace, situation: Situation, check: Check) -> Check:
    """The line on the configuration, if the agent of this Pod has a file that was not named."""
    if "config_file" in args or not (situation.in_pod and situation.agent_config.exists()):
        return check
    return Check(
        check.name,
        State.NOTE,
        f"{check.detail}, while this Pod has {situation.agent_config}",
        f"npu-agent doctor --config-file={situation.agent_config}",
    )
