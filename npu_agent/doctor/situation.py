"""Where the doctor is: the configuration, the host, and who asks."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from npu_agent.config import Config, ConfigError, default_config, from_args, read
from npu_agent.config.load import build
from npu_agent.config.tree import List, Map, Node
from npu_agent.config.yaml_tree import read_tree
from npu_agent.doctor.check import Check, State
from npu_agent.vendors import WORDS

if TYPE_CHECKING:
    import argparse

    from npu_agent.config import Place

_ROUNDS = 5
"""Times that what is refused is taken out of a file: taking out a key may break another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What all looks go by."""

    config: Config
    host_root: Path
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
    def here(cls, config: Config, host_root: Path) -> Situation:
        """The one of this process."""
        return cls(
            config=config,
            host_root=host_root,
            node_name=os.environ.get("NODE_NAME") or None,
            in_pod="KUBERNETES_SERVICE_HOST" in os.environ,
            uid=os.geteuid(),
            hostname=platform.node(),
        )

    @property
    def directory(self) -> Path:
        """The kubelet's device-plugins directory; used as configured, as the agent does."""
        return Path(self.config.plugin_dir)


def configuration(args: argparse.Namespace) -> tuple[Config, Check]:
    """The configuration to check by, and the line on it.

    Of a file that is refused, what is good in it.

    Args:
        args: parsed by a parser with `npu_agent.config.add_options`.

    Raises:
        ConfigError: the command line itself is wrong.
    """
    try:
        effective = from_args(args, WORDS)
    except ConfigError as error:
        if any(problem.place.source.startswith("--") for problem in error.problems):
            raise
        config, rest = _what_is_good(args.config_file)
        return config, Check(
            "config",
            State.WRONG,
            "; ".join(map(str, error.problems)),
            f"mend it (`npu-agent config check` tells when it is good); all else below was "
            f"looked at with {rest}",
        )
    file: Path | None = getattr(args, "config_file", None)
    if file is not None:
        return effective.config, Check("config", State.OK, f"{file} is good")
    given = sorted({origin for origin in effective.origins.values() if origin != "default"})
    said = f"no file; {', '.join(given)} and the defaults" if given else "no file; the defaults"
    return effective.config, Check("config", State.OK, said)


def forgotten(situation: Situation, check: Check) -> Check:
    """The line on the configuration, if the agent of this Pod has a file that was not named."""
    if check.state is not State.OK or not check.detail.startswith("no file"):
        return check
    if not (situation.in_pod and situation.agent_config.exists()):
        return check
    return Check(
        check.name,
        State.NOTE,
        f"{check.detail}, while this Pod has {situation.agent_config}",
        f"npu-agent doctor --config-file={situation.agent_config}",
    )


def _what_is_good(file: Path) -> tuple[Config, str]:
    """A configuration without the keys that are refused, and what to call it."""
    try:
        tree = read_tree(read(file), str(file)) or Map(_nowhere(), ())
        for _ in range(_ROUNDS):
            try:
                return build(tree, WORDS).config, "what is good in it"
            except ConfigError as error:
                tree = _without(tree, frozenset(problem.place for problem in error.problems))
    except ConfigError:
        pass  # not readable, or not YAML
    return default_config(WORDS), "the defaults"


def _without(node: Node, bad: frozenset[Place]) -> Node:
    if isinstance(node, Map):
        return Map(
            node.place,
            tuple(
                (name, _without(value, bad))
                for name, value in node.entries
                if name.place not in bad and (value.place not in bad or isinstance(value, Map))
            ),
        )
    if isinstance(node, List):
        return List(
            node.place, tuple(_without(item, bad) for item in node.items if item.place not in bad)
        )
    return node


def _nowhere() -> Place:
    from npu_agent.config import Place

    return Place("")
