"""What must hold between keys, and what depends on the families of cards."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

from npu_agent.config.text import any_of, did_you_mean
from npu_agent.files import SOCKET_PATH_MAX

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from npu_agent.config.schema import Config

SOCKET_SUFFIX = len("-123456789abc.sock")
"""Bytes the agent may add to socketName, to give each of its sockets a name of its own."""


class Broken(NamedTuple):
    """A rule that does not hold.

    `keys` has the likeliest culprit first; a user has set at least one of them.
    """

    keys: tuple[str, ...]
    message: str


def broken_rules(config: Config, families: Mapping[str, tuple[int, ...]]) -> Iterator[Broken]:
    """What is wrong between values that are each right by themselves.

    `families` has the core counts that each family has device nodes for.
    """
    yield from _socket_path(config)
    yield from _label_sets(config)
    yield from _resources(config, families)
    yield from _nodes(config)
    yield from _tls(config)
    yield from _ports(config)


def _socket_path(config: Config) -> Iterator[Broken]:
    path = f"{config.plugin_dir.rstrip('/')}/{config.socket_name}"
    length = len(os.fsencode(path)) + SOCKET_SUFFIX
    if length > SOCKET_PATH_MAX:
        yield Broken(
            ("socketName", "pluginDir"),
            f"pluginDir and socketName make a socket path of {length} bytes, and Linux takes "
            f"{SOCKET_PATH_MAX}: shorten one by {length - SOCKET_PATH_MAX}",
        )


def _label_sets(config: Config) -> Iterator[Broken]:
    seen = set()
    for index, name in enumerate(config.labels.sets):
        if name in seen:
            yield Broken((f"labels.sets[{index}]",), f"{name} is there twice: take one out")
        seen.add(name)
    if not seen and config.labels.output != "none":
        yield Broken(
            ("labels.sets", "labels.output"),
            "no set of labels: name one, or set labels.output to none",
        )


def _nodes(config: Config) -> Iterator[Broken]:
    seen = set()
    for index, one in enumerate(config.allocation.nodes):
        if one.node_name in seen:
            yield Broken(
                (f"allocation.nodes[{index}].nodeName",),
                f"{one.node_name} is there twice: take one out",
            )
        seen.add(one.node_name)


def _ports(config: Config) -> Iterator[Broken]:
    (host, port), (probes_host, probes_port) = config.metrics.address, config.metrics.probes_address
    hosts = {"" if each in ("0.0.0.0", "::") else each for each in (host, probes_host)}  # noqa: S104
    if port == probes_port and port and ("" in hosts or len(hosts) == 1):
        yield Broken(
            ("metrics.probes", "metrics.listen"),
            f"metrics.listen has port {port} too, and a port can be taken once: give another one",
        )


def _tls(config: Config) -> Iterator[Broken]:
    tls = config.metrics.tls
    cert, key, ca = (f"metrics.tls.{each}" for each in ("certFile", "keyFile", "clientCAFile"))
    if (tls.cert_file is None) != (tls.key_file is None):
        there, missing = (cert, key) if tls.key_file is None else (key, cert)
        yield Broken((there,), f"{missing} is missing: a certificate and its key go together")
    elif tls.client_ca_file is not None and tls.cert_file is None:
        message = "clients' certificates need TLS: give metrics.tls.certFile and keyFile as well"
        yield Broken((ca,), message)
    elif config.metrics.authorization != "none" and tls.cert_file is None:
        yield Broken(
            ("metrics.authorization",),
            "without TLS clients' tokens could be read on the way: give metrics.tls.certFile and "
            "keyFile as well",
        )


def _resources(config: Config, families: Mapping[str, tuple[int, ...]]) -> Iterator[Broken]:
    names: dict[str, int] = {}
    named: dict[str, int] = {}
    for index, spec in enumerate(config.resources):
        here = f"resources[{index}]"
        if spec.name in names:
            yield Broken(
                (f"{here}.name",),
                f"{spec.name} is the name of resources[{names[spec.name]}] too: "
                "give each a name of its own",
            )
        names.setdefault(spec.name, index)

        if spec.family not in families:
            yield Broken(
                (f"{here}.family",),
                f"there is no family {spec.family}, only {' and '.join(sorted(families))}"
                + did_you_mean(spec.family, families),
            )
            continue
        if spec.family in named:
            # Nobody would keep two resources from handing out the same core.
            yield Broken(
                (f"{here}.family",),
                f"resources[{named[spec.family]}] offers {spec.family} already, and a core can "
                "belong to one resource only: take one out",
            )
        named.setdefault(spec.family, index)
        width = spec.cores_per_device
        if width is not None and width not in families[spec.family]:
            widths = any_of(map(str, sorted(families[spec.family])))
            yield Broken(
                (f"{here}.coresPerDevice",),
                f"{spec.family} has no device nodes for {width} cores together: must be {widths}",
            )
