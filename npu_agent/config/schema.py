"""The configuration's keys: types, defaults, limits, meaning, and which apply while running.

This is the only place that lists them: a key is one entry here. Its option, its error messages, the
JSON schema, `config show`, docs/configuration.md and the comparison of two configurations are all
derived from it. What only the vendor of the cards can say (some defaults and descriptions, the
label sets, the metric schemas) is a function of its words.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import lru_cache, partial, reduce
from types import NoneType
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from npu_agent.config.kinds import ValueKind, choice, flag, number, text
from npu_agent.config.text import camel
from npu_agent.core.health import Policy
from npu_agent.core.vendor import LabelSet, MetricSchema, VendorSpec

# Patterns are written so that Python and JSON schema (ECMA 262) read them alike.
_SUBDOMAIN = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
_PORT = r"([0-9]{1,4}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"
_LAST_PORT = 65535
_IPV4 = r"[0-9]{1,3}(\.[0-9]{1,3}){3}"
_IPV6 = r"\[[0-9A-Fa-f:]{1,39}(\.[0-9]{1,3}){0,3}\]"
# What Kubernetes takes as an extended resource: IsExtendedResourceName in
# k8s.io/kubernetes/pkg/apis/core/v1/helper. 244 because quota prepends "requests." to a domain
# that may have 253.
_RESOURCE = (
    r"^(?=[^/]{1,244}/[^/]{1,63}$)(?!requests\.)(?!.*kubernetes\.io/)"
    rf"{_SUBDOMAIN}/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"
)


def _key(
    default: object,
    about: str | Callable[[VendorSpec], str],
    kind: ValueKind | Callable[[VendorSpec], ValueKind] | None = None,
    *,
    live: bool,
    vendor: Callable[[VendorSpec], object] | None = None,
) -> Any:
    """Declares a key: its default (MISSING: none), a sentence about it, and its kind.

    A list's kind is that of its items; None: its type says it. `vendor` gives its own default.
    """
    said = {"description": about, "kind": kind, "live": live, "default": vendor or default}
    return field(default=default, metadata=said)


_live = partial(_key, live=True)
_restart = partial(_key, live=False)


def _seconds(low: float, high: float) -> ValueKind:
    return number(float, low, high, "seconds")


def _address(must: str) -> ValueKind:
    return text(must, rf"^({_IPV6}|{_IPV4})?:{_PORT}$")


def _resource_name(words: VendorSpec) -> ValueKind:
    must = f"<domain>/<name> like {words.resource_name}, outside kubernetes.io"
    return text(must, _RESOURCE)


def _listed(several: Mapping[str, LabelSet] | Mapping[str, MetricSchema], between: str) -> str:
    return between.join(f"{name} ({choice.about})" for name, choice in several.items())


@dataclass(frozen=True, kw_only=True)
class DisabledDevice:
    ABOUT: ClassVar = "A card that is not offered."
    AS_OPTION: ClassVar = ("DEVICE", re.compile("(?P<devName>.+)"))

    dev_name: str = _live(
        MISSING,
        "The card: npu0, its UUID, or its PCI address.",
        text("a card's name (npu0), UUID or PCI address (0000:01:00.0)", r"^[^\s,/]+$"),
    )
    node_name: str | None = _live(
        None,
        "The Node on which it is disabled; without it, every Node.",
        text("a Node's name as kubectl get nodes shows it", f"^{_SUBDOMAIN}$", longest=253),
    )


_Api = Literal["device-plugin", "dra", "auto"]


@dataclass(frozen=True, kw_only=True)
class ResourceSpec:
    ABOUT: ClassVar = "A resource that offers one family's cards in a width of its own."
    AS_OPTION: ClassVar = (
        "NAME=FAMILY[:CORES]",
        re.compile("(?P<name>[^=]+)=(?P<family>[^=:]+)(?::(?P<coresPerDevice>[^=:]+))?"),
    )

    name: str = _restart(MISSING, "The resource's name: example.com/npu.", _resource_name)
    family: str = _restart(
        MISSING, "The family whose cards it offers.", lambda words: choice(words.families)
    )
    cores_per_device: int | None = _restart(
        None, "Cores in one device; without it, as defaultPe says.", number(int, 1, 64)
    )
    api: _Api | None = _restart(
        None, "The API that offers this family; without it, allocation.api."
    )


@dataclass(frozen=True, kw_only=True)
class NodeApi:
    ABOUT: ClassVar = "By which API one Node offers its cards."
    AS_OPTION: ClassVar = ("NODE=API", re.compile("(?P<nodeName>[^=]+)=(?P<api>[^=]+)"))

    node_name: str = _restart(
        MISSING,
        "The Node.",
        text("a Node's name as kubectl get nodes shows it", f"^{_SUBDOMAIN}$", longest=253),
    )
    api: _Api = _restart(MISSING, "The API that offers its cards, in place of allocation.api.")


@dataclass(frozen=True, kw_only=True)
class AllocationConfig:
    ABOUT: ClassVar = "How containers are given their devices."

    method: Literal["deviceNodes", "cdi"] = _restart(
        "deviceNodes",
        "How containers get devices: deviceNodes, from the kubelet; cdi, from the runtime.",
    )
    api: _Api = _restart(
        "device-plugin",
        "How Pods request cards: device-plugin, by resources; dra, by ResourceClaims (Dynamic "
        "Resource Allocation); auto, dra if the API server and this node's kubelet support it.",
    )
    nodes: tuple[NodeApi, ...] = _restart((), "Nodes with another API, to move them one by one.")


@dataclass(frozen=True, kw_only=True)
class ContainersConfig:
    ABOUT: ClassVar = "What every container with a device gets in addition."

    device_nodes: tuple[str, ...] = _live(
        (),
        "Device nodes of the host, such as /dev/dma_heap/system, readable and writable. One that "
        "is missing on a node is left out there, and is a problem.",
        lambda words: text(
            "a path below /dev, without '.' and '..', and no node of a card",
            rf"^/dev/(?!({'|'.join(map(re.escape, words.nodes))}))"
            r"[A-Za-z0-9_][A-Za-z0-9_.:-]*(/[A-Za-z0-9_][A-Za-z0-9_.:-]*)*$",
            longest=200,
        ),
    )


@dataclass(frozen=True, kw_only=True)
class DraConfig:
    ABOUT: ClassVar = "What is offered by Dynamic Resource Allocation."

    device_names: Literal["identity", "index"] = _restart(
        "identity",
        "Names of devices: identity, npu-<uuid>; index, npu0 as the vendor's driver has it.",
    )
    partitions: bool = _live(
        False, "Offer each card in all sizes that have device nodes; the scheduler partitions it."
    )


@dataclass(frozen=True, kw_only=True)
class ConditionConfig:
    ABOUT: ClassVar = "The condition of the Node that repair systems read."

    type: str | None = _live(
        None,
        lambda words: (
            f"The condition's type: {words.condition}; without it, no condition is written."
        ),
        lambda words: text(
            f"a condition's name like {words.condition}, and none of the kubelet's",
            r"^(?!(Ready|MemoryPressure|DiskPressure|PIDPressure|NetworkUnavailable)$)"
            rf"({_SUBDOMAIN}/)?[A-Za-z]([-A-Za-z0-9_.]*[A-Za-z0-9])?$",
            longest=316,
        ),
    )


@dataclass(frozen=True, kw_only=True)
class HealthConfig:
    ABOUT: ClassVar = "When a card is taken out of service and brought back."

    interval: float = _live(
        0.5, "Seconds between two probes of each card's health.", _seconds(0.05, 60)
    )
    failures: int = _live(
        2, "Failed probes in a row that make a card unhealthy.", number(int, 1, 100)
    )
    recoveries: int = _live(
        3, "Good probes in a row after which an unhealthy card has recovered.", number(int, 1, 100)
    )
    max_temperature: float | None = _live(
        None,
        "°C above which a card is unhealthy; without it, temperature is ignored.",
        number(float, 30, 150, "°C"),
    )
    slow_after: float = _live(
        300.0,
        "Seconds for which a card has to be limited or throttled, compared with its siblings, to "
        "count as slow; 0: cards are not compared.",
        _seconds(0, 86400),
    )
    evict: bool = _live(
        False, "Evict the Pods that hold a card which is unhealthy or gone (docs/health.md)."
    )
    evict_after: float = _live(
        30.0,
        "Seconds for which a card has to be unhealthy or gone, without a break, before its Pods "
        "are evicted.",
        _seconds(0.05, 86400),
    )
    expected_cards: int | None = _live(
        None,
        "Cards of the node; fewer are a problem. So many healthy ones make the Node's condition "
        "True; without it, the most that were healthy at one time since it booted.",
        number(int, 0, 1024),
    )
    condition: ConditionConfig = ConditionConfig()

    @property
    def policy(self) -> Policy:
        return Policy(
            failures=self.failures,
            recoveries=self.recoveries,
            max_temperature=self.max_temperature,
            slow_after=self.slow_after,
        )


@dataclass(frozen=True, kw_only=True)
class LabelsConfig:
    ABOUT: ClassVar = "The labels on the Node."

    output: Literal["api", "nfd", "none"] = _restart(
        "api", "api: set on the Node; nfd: written for Node Feature Discovery; none: no labels."
    )
    sets: tuple[str, ...] = _live(
        (),
        lambda words: f"Generations of label names: {_listed(words.label_sets, ', ')}.",
        lambda words: choice(words.label_sets),
        vendor=lambda words: (words.label_set,),
    )
    resync: float = _live(
        300.0,
        "Seconds between two checks of nfd's labels for foreign changes; api watches the Node.",
        _seconds(10, 86400),
    )


def _file(about: str) -> Any:
    return _restart(None, about, text("an absolute path", "^/.*$"))


@dataclass(frozen=True, kw_only=True)
class TlsConfig:
    ABOUT: ClassVar = "TLS at metrics.listen. The files are followed while the agent runs."

    cert_file: str | None = _file(
        "The server's certificate and its chain, PEM; without it, no TLS."
    )
    key_file: str | None = _file("Its private key, PEM, without a passphrase.")
    client_ca_file: str | None = _file(
        "CAs of clients, PEM: a client without a certificate of one of them is refused."
    )


@dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    ABOUT: ClassVar = "The page for Prometheus."

    listen: str = _restart(
        ":9100",
        "Address of the HTTP server, [IP address]:port; port 0 is any free port.",
        _address("[IP address]:port like :9100, 127.0.0.1:9100 or [::1]:9100"),
    )
    probes: str | None = _restart(
        None,
        "Address of /healthz and /readyz for the kubelet's probes; without it, every interface "
        "and the port after that of metrics.listen.",
        _address("[IP address]:port like :9101 or 127.0.0.1:9101"),
    )
    schema: str = _live(
        "",
        lambda words: f"Generation of names and units: {_listed(words.metric_schemas, ' or ')}.",
        lambda words: choice(words.metric_schemas),
        vendor=lambda words: words.metric_schema,
    )
    pod_labels: bool = _live(
        True, "Add namespace, pod and container of the holder to the series of a card."
    )
    interval: float = _live(
        5.0,
        "Seconds between two readings of telemetry and of assignments. Telemetry that no client "
        "has read for two minutes is read once a minute.",
        _seconds(1, 3600),
    )
    authorization: Literal["none", "kubernetes"] = _restart(
        "none",
        "none: any client that reaches metrics.listen can read its pages. kubernetes: clients with "
        "a token of the cluster whose RBAC allows them to get the path.",
    )
    tls: TlsConfig = TlsConfig()

    @property
    def address(self) -> tuple[str, int]:
        """`listen` as host and port; the host is "" for every interface, without any brackets."""
        return _host_and_port(self.listen)

    @property
    def probes_address(self) -> tuple[str, int]:
        """`probes`, or else the next port of every interface: the kubelet comes from outside.

        Port 0 stays 0.
        """
        if self.probes is not None:
            return _host_and_port(self.probes)
        _, port = self.address
        return "", port and (port + 1 if port < _LAST_PORT else port - 1)


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    ABOUT: ClassVar = "What the agent logs."

    level: Literal["debug", "info", "warning", "error"] = _live(
        "info", "The lowest level that is logged."
    )
    format: Literal["text", "json"] = _live(
        "text", "text: lines for people; json: lines for programs."
    )


@dataclass(frozen=True, kw_only=True)
class Config:
    """Times are in seconds, temperatures in °C.

    One that is made in code is not checked, and has no defaults of the vendor.
    """

    ABOUT: ClassVar = "Configuration of npu-agent."

    default_pe: Literal["Fusion", "Single"] = _live(
        "Fusion", "Size of a device: Fusion, a whole card; Single, one core."
    )
    interval: float = _live(
        10.0,
        "Seconds between two readings of each card's identity: UUID, serial number, versions. "
        "The kernel reports cards that are added or removed; where the agent cannot hear it, it "
        "searches every health.interval.",
        _seconds(0.1, 3600),
    )
    disabled_devices: tuple[DisabledDevice, ...] = _live((), "Cards that are not offered.")
    plugin_dir: str = _restart(
        "/var/lib/kubelet/device-plugins",
        "Directory of the kubelet's device plugin sockets.",
        text("an absolute path", "^/.*$"),
    )
    socket_name: str = _restart(
        "",
        "Prefix of the names of the agent's sockets there.",
        text(
            "a bare file name of letters, digits, '.', '_' and '-'", r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
        ),
        vendor=lambda words: words.socket_name,
    )
    resource_name: str = _restart(
        "",
        "Resource of all cards whose family `resources` does not list.",
        _resource_name,
        vendor=lambda words: words.resource_name,
    )
    resources: tuple[ResourceSpec, ...] = _restart(
        (), "Resources by family and cores, in place of resourceName and defaultPe."
    )
    allocation: AllocationConfig = AllocationConfig()
    containers: ContainersConfig = ContainersConfig()
    dra: DraConfig = DraConfig()
    health: HealthConfig = HealthConfig()
    labels: LabelsConfig = LabelsConfig()
    metrics: MetricsConfig = MetricsConfig()
    events: bool = _live(True, "Send Events about cards that fail, recover, are added or removed.")
    cordon: bool = _live(
        True, "Take cards out of service that the Node's annotation npu-agent/cordoned lists."
    )
    log: LogConfig = LogConfig()


def disabled_for(config: Config, node_name: str | None) -> frozenset[str]:
    """The cards disabled on this Node: names, UUIDs or PCI addresses, in lower case."""
    return frozenset(
        device.dev_name.lower()
        for device in config.disabled_devices
        if device.node_name is None or device.node_name == node_name
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Key:
    """One key, or a group of keys."""

    attributes: tuple[str, ...]
    """The way to its value in a `Config`: ("health", "max_temperature"); in an item of a list it
    begins at the item."""
    of: "ValueKind | Group"
    """What it, or each item of it, may be."""
    many: bool = False
    """Whether it is a list, which is a tuple in a `Config`."""
    optional: bool = False
    description: str = ""
    live: bool = True
    """Whether a new value applies while running, or else after a restart."""
    default: object
    """MISSING if there is none."""

    @property
    def name(self) -> str:
        """Dotted, as the file spells it: `health.maxTemperature`."""
        return ".".join(map(camel, self.attributes))

    @property
    def group(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def option(self) -> str:
        return "--" + "-".join(self.attributes).replace("_", "-")

    def value(self, config: Config) -> object:
        value: object = reduce(getattr, self.attributes, config)
        return value


@dataclass(frozen=True, kw_only=True, eq=False)
class Group:
    """Keys that stand together: all of them, a group, or an item of a list."""

    cls: type[Any]
    keys: Mapping[str, Key]

    @property
    def must(self) -> str:
        return f"a group of keys ({', '.join(self.keys)})"

    @property
    def about(self) -> str:
        """A sentence on it. No docstring: python -OO has none."""
        return str(self.cls.ABOUT)

    @property
    def default(self) -> Any:
        return self.cls(**{key.attributes[-1]: key.default for key in self.keys.values()})


@lru_cache(8)
def schema_of(words: VendorSpec) -> Group:
    """Returns all keys, completed from the vendor's spec."""
    return _group(Config, words)


def default_config(words: VendorSpec) -> Config:
    return schema_of(words).default  # type: ignore[no-any-return]


def keys_of(group: Group) -> Iterator[Key]:
    for key in group.keys.values():
        if isinstance(key.of, Group) and not key.many:
            yield from keys_of(key.of)
        else:
            yield key


def _group(cls: type[Any], words: VendorSpec, above: tuple[str, ...] = ()) -> Group:
    types = get_type_hints(cls)
    keys = {}
    for attribute in fields(cls):
        way = (*above, attribute.name)
        kind = types[attribute.name]
        if is_dataclass(kind):
            inner = _group(types[attribute.name], words, way)
            keys[camel(attribute.name)] = Key(attributes=way, of=inner, default=inner.default)
            continue
        said = {
            name: value(words) if callable(value) else value
            for name, value in attribute.metadata.items()
        }
        optional = NoneType in get_args(kind)
        many = get_origin(kind) is tuple
        if optional or many:
            kind = get_args(kind)[0]
        of = said.pop("kind")
        if is_dataclass(kind):
            of = _group(get_args(types[attribute.name])[0], words)
        elif of is None:
            of = flag() if kind is bool else choice(get_args(kind))
        keys[camel(attribute.name)] = Key(
            attributes=way, of=of, many=many, optional=optional, **said
        )
    return Group(cls=cls, keys=keys)


_NOBODY = VendorSpec(
    families={},
    resource_name="",
    socket_name="",
    label_sets={},
    label_set="",
    metric_schemas={},
    metric_schema="",
    nodes=(),
    condition="",
)
KEYS = tuple(keys_of(schema_of(_NOBODY)))
"""Every key, without what the vendor adds."""
