"""Rules between keys, and those that depend on the families of cards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, TypeAlias

from npu_agent.config.text import any_of

if TYPE_CHECKING:
    from npu_agent.config.schema import Config

Broken: TypeAlias = tuple[str, tuple[str, ...]]
"""A rule that does not hold: a message, and the keys, of which a user has set at least one; the
likeliest culprit is first."""


def broken_rules(config: Config, families: Mapping[str, tuple[int, ...]]) -> Iterator[Broken]:
    """Yields conflicts between values that are valid by themselves.

    `families` has the core counts that each family has device nodes for.
    """
    yield from _twice("labels.sets[{}]", config.labels.sets)
    if not config.labels.sets and config.labels.output != "none":
        message = "no set of labels: name one, or set labels.output to none"
        yield message, ("labels.sets", "labels.output")
    yield from _resources(config, families)
    names = tuple(node.node_name for node in config.allocation.nodes)
    yield from _twice("allocation.nodes[{}].nodeName", names)
    yield from _tls(config)
    yield from _ports(config)
    yield from _eviction(config)


def _twice(key: str, names: tuple[str, ...]) -> Iterator[Broken]:
    first: dict[str, int] = {}
    for index, name in enumerate(names):
        if first.setdefault(name, index) != index:
            yield f"{name} is there twice: change one of them", (key.format(index),)


def _ports(config: Config) -> Iterator[Broken]:
    host, port = config.metrics.address
    probes_host, probes_port = config.metrics.probes_address
    hosts = {"" if address in ("0.0.0.0", "::") else address for address in (host, probes_host)}  # noqa: S104
    if port == probes_port and port and ("" in hosts or len(hosts) == 1):
        yield (
            f"metrics.listen has port {port} too, and a port can be taken once: give another one",
            ("metrics.probes", "metrics.listen"),
        )


def _eviction(config: Config) -> Iterator[Broken]:
    health = config.health
    noticed = health.failures * health.interval
    if health.evict and health.evict_after < noticed:
        message = (
            f"a card is found unhealthy in {noticed:g} s (health.failures x health.interval), and "
            f"health.evictAfter is {health.evict_after:g}: give that {noticed:g} or more"
        )
        keys = "health.evictAfter", "health.interval", "health.failures", "health.evict"
        yield message, keys


def _tls(config: Config) -> Iterator[Broken]:
    tls = config.metrics.tls
    asked_for = {
        "metrics.tls.certFile": tls.cert_file,
        "metrics.tls.keyFile": tls.key_file,
        "metrics.tls.clientCAFile": tls.client_ca_file,
        # Without TLS clients' tokens could be read on the way.
        "metrics.authorization": config.metrics.authorization != "none",
    }
    keys = tuple(key for key, asked in asked_for.items() if asked)
    if keys and not (tls.cert_file and tls.key_file):
        yield "needs TLS: give both metrics.tls.certFile and keyFile", keys


def _resources(config: Config, families: Mapping[str, tuple[int, ...]]) -> Iterator[Broken]:
    yield from _twice("resources[{}].name", tuple(spec.name for spec in config.resources))
    # Nothing would keep two resources of one family from handing out the same core.
    yield from _twice("resources[{}].family", tuple(spec.family for spec in config.resources))
    for index, spec in enumerate(config.resources):
        width = spec.cores_per_device
        widths = families[spec.family]
        if width is not None and width not in widths:
            message = f"{spec.family} has no device nodes for {width} cores together: must be "
            yield (
                message + any_of(map(str, sorted(widths))),
                (f"resources[{index}].coresPerDevice",),
            )
