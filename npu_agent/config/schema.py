"""The configuration's keys: types, defaults, limits, meaning, and which apply while running.

This is the only place that lists them. The command-line options, the error messages, the JSON
schema, `config show` and the comparison of two configurations are all derived from it. What only
the vendors of cards can say (some defaults, the label sets, the metric schemas) is empty here and
comes with their vocabulary: see `schema_of`.
"""

from __future__ import annotations

import re
from functools import lru_cache, reduce
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta
from msgspec import inspect as mi

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from npu_agent.core.vocabulary import Vocabulary

# Patterns are written so that Python and JSON schema (ECMA 262) read them alike.
_SUBDOMAIN = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
_PORT = r"([0-9]{1,4}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"


def _live(description: str) -> Meta:
    """A key whose new value applies immediately."""
    return Meta(description=description, extra={"live": True})


def _restart(description: str) -> Meta:
    """A key whose new value applies from the agent's next start."""
    return Meta(description=description, extra={"live": False})


# What Kubernetes takes as an extended resource: IsExtendedResourceName in
# k8s.io/kubernetes/pkg/apis/core/v1/helper. 244 because quota prepends "requests." to a domain
# that may have 253.
_ResourceName = Annotated[
    str,
    Meta(
        pattern=r"^(?=[^/]{1,244}/[^/]{1,63}$)(?!requests\.)(?!.*kubernetes\.io/)"
        + _SUBDOMAIN
        + r"/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$",
        extra={"must": "<domain>/<name> like {resource_name}, outside kubernetes.io"},
    ),
]


class _Values(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    pass


class DisabledDevice(_Values, frozen=True, kw_only=True):
    """A card that is not offered."""

    dev_name: Annotated[
        str,
        Meta(
            pattern=r"^[^\s,/]+$",
            description="The card: npu0, its UUID, or its PCI address.",
            extra={"must": "a card's name (npu0), UUID or PCI address (0000:01:00.0)"},
        ),
    ]
    node_name: Annotated[
        Annotated[
            str,
            Meta(
                pattern=f"^{_SUBDOMAIN}$",
                max_length=253,
                extra={"must": "a Node's name as kubectl get nodes shows it"},
            ),
        ]
        | None,
        Meta(description="The Node it is disabled on; without it, on every Node."),
    ] = None


_Api = Literal["device-plugin", "dra", "auto"]


class ResourceSpec(_Values, frozen=True, kw_only=True):
    """A resource that offers one family's cards in a width of its own."""

    name: Annotated[_ResourceName, Meta(description="The resource's name: example.com/npu.")]
    family: Annotated[
        str,
        Meta(
            pattern=r"^\S+$",
            description="The family whose cards it offers: {families}.",
            extra={"must": "a family of cards"},
        ),
    ]
    cores_per_device: Annotated[
        Annotated[int, Meta(ge=1, le=64)] | None,
        Meta(description="Cores in one device; without it, as defaultPe says."),
    ] = None
    api: Annotated[
        _Api | None,
        Meta(description="By which API this family is offered; without it, as allocation.api."),
    ] = None


class AllocationConfig(_Values, frozen=True, kw_only=True):
    """How containers are given their devices."""

    method: Annotated[
        Literal["deviceNodes", "cdi"],
        _restart("deviceNodes: by the kubelet, as nodes; cdi: by the runtime, as CDI names."),
    ] = "deviceNodes"
    api: Annotated[
        _Api,
        _restart(
            "How Pods get cards: device-plugin, by resources; dra, by ResourceClaims (Dynamic "
            "Resource Allocation); auto: dra where the API server and this node's kubelet have it."
        ),
    ] = "device-plugin"


class DraConfig(_Values, frozen=True, kw_only=True):
    """What is offered by Dynamic Resource Allocation."""

    device_names: Annotated[
        Literal["identity", "index"],
        _restart("What devices are called: identity, npu-<uuid>; index, npu0, as by the vendor."),
    ] = "identity"


class HealthConfig(_Values, frozen=True, kw_only=True):
    """When a card is taken out of service and brought back."""

    interval: Annotated[
        float,
        Meta(ge=0.05, le=60, extra={"unit": "seconds"}),
        _live("Seconds between two probes of each card's health."),
    ] = 0.5
    failures: Annotated[
        int, Meta(ge=1, le=100), _live("Failed probes in a row that make a card unhealthy.")
    ] = 2
    recoveries: Annotated[
        int,
        Meta(ge=1, le=100),
        _live("Good probes in a row after which an unhealthy card has recovered."),
    ] = 3
    max_temperature: Annotated[
        Annotated[float, Meta(ge=30, le=150, extra={"unit": "°C"})] | None,
        _live("°C above which a card is unhealthy; without it, temperature does not count."),
    ] = None
    evict: Annotated[
        bool, _live("Evict the Pods whose claims hold a card that becomes unhealthy (DRA only).")
    ] = False


class LabelsConfig(_Values, frozen=True, kw_only=True):
    """The labels on the Node."""

    output: Annotated[
        Literal["api", "nfd", "none"],
        _restart("api: set on the Node; nfd: written for Node Feature Discovery; none: no labels."),
    ] = "api"
    sets: Annotated[
        tuple[str, ...],
        Meta(extra_json_schema={"uniqueItems": True}),
        _live("Generations of label names: {label_sets}."),
    ] = ()
    resync: Annotated[
        float,
        Meta(ge=10, le=86400, extra={"unit": "seconds"}),
        _live("Seconds between two checks of our labels for changes by others."),
    ] = 300.0


class MetricsConfig(_Values, frozen=True, kw_only=True):
    """The page for Prometheus."""

    listen: Annotated[
        str,
        Meta(
            pattern=rf"^(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9][A-Za-z0-9.-]*)?:{_PORT}$",
            max_length=270,
            extra={"must": "[host]:port like :9100, 127.0.0.1:9100 or [::1]:9100"},
        ),
        _restart("Address of the HTTP server, [host]:port; port 0 takes a free one."),
    ] = ":9100"
    schema: Annotated[str, _live("Generation of names and units: {metric_schemas}.")] = ""
    pod_labels: Annotated[
        bool, _live("Name the Pod that holds a card (namespace, pod, container) in its series.")
    ] = True
    interval: Annotated[
        float,
        Meta(ge=1, le=3600, extra={"unit": "seconds"}),
        _live("Seconds between two readings of telemetry and of assignments."),
    ] = 5.0

    @property
    def address(self) -> tuple[str, int]:
        """`listen` as host and port; the host is "" for every interface, without any brackets."""
        host, _, port = self.listen.rpartition(":")
        return host.strip("[]"), int(port)


class LogConfig(_Values, frozen=True, kw_only=True):
    """What the agent logs."""

    level: Annotated[
        Literal["debug", "info", "warning", "error"], _live("The lowest level that is logged.")
    ] = "info"
    format: Annotated[
        Literal["text", "json"], _live("text: lines for people; json: lines for programs.")
    ] = "text"


class Config(_Values, frozen=True, kw_only=True):
    """Configuration of npu-agent.

    Immutable. Complete and valid if it comes from `load`, `parse` or `from_args`: one that is made
    in code is not checked, and has no defaults of the vendors. Times are in seconds, temperatures
    in °C.
    """

    default_pe: Annotated[
        Literal["Fusion", "Single"],
        _live("What one device is: Fusion, a card with all its cores; Single, one core."),
    ] = "Fusion"
    interval: Annotated[
        float,
        Meta(ge=0.1, le=3600, extra={"unit": "seconds"}),
        _live(
            "Seconds between two readings of each card's identity: UUID, serial number, versions. "
            "Cards that are added or removed are found within health.interval."
        ),
    ] = 10.0
    disabled_devices: Annotated[
        tuple[DisabledDevice, ...], _live("Cards that are not offered.")
    ] = ()
    plugin_dir: Annotated[
        str,
        Meta(pattern="^/.*$", extra={"must": "an absolute path"}),
        _restart("Directory of the kubelet's device plugin sockets."),
    ] = "/var/lib/kubelet/device-plugins"
    socket_name: Annotated[
        str,
        Meta(
            pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
            extra={"must": "a bare file name of letters, digits, '.', '_' and '-'"},
        ),
        _restart("First part of the name of the agent's own sockets there."),
    ] = ""
    resource_name: Annotated[
        _ResourceName, _restart("Resource that offers all cards which `resources` does not name.")
    ] = ""
    resources: Annotated[
        tuple[ResourceSpec, ...],
        _restart("Resources per family and width, in place of resourceName and defaultPe."),
    ] = ()
    allocation: AllocationConfig = AllocationConfig()
    dra: DraConfig = DraConfig()
    health: HealthConfig = HealthConfig()
    labels: LabelsConfig = LabelsConfig()
    metrics: MetricsConfig = MetricsConfig()
    events: Annotated[
        bool, _live("Send Events about cards that fail, recover, are added or removed.")
    ] = True
    log: LogConfig = LogConfig()


def disabled_for(config: Config, node_name: str | None) -> frozenset[str]:
    """The cards that are disabled on this Node, as the user named them.

    A card's name, UUID or PCI address; letter case as written.
    """
    return frozenset(
        device.dev_name
        for device in config.disabled_devices
        if device.node_name is None or device.node_name == node_name
    )


class Key(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One key that has a value of its own: all but the groups.

    Attributes:
        name: dotted, as the file spells it: `health.maxTemperature`.
        attributes: the way to its value in a `Config`: ("health", "max_temperature").
        kind: its type, with `msgspec.inspect`'s limits.
        unit: "seconds", "°C" or "".
        live: whether a new value applies immediately, or else after a restart.
        default: its value where nobody set one.
    """

    name: str
    attributes: tuple[str, ...]
    kind: mi.Type
    description: str
    unit: str
    live: bool
    default: object

    @property
    def group(self) -> str:
        """The group it stands in (`health`), or ""."""
        return self.name.rpartition(".")[0]

    @property
    def option(self) -> str:
        """Its command-line option: `--health-max-temperature`."""
        return "--" + re.sub("[A-Z]", lambda upper: "-" + upper[0].lower(), self.name).replace(
            ".", "-"
        )

    def of(self, config: Config) -> object:
        """Its value in this configuration."""
        value: object = reduce(getattr, self.attributes, config)
        return value


def plain(kind: mi.Type) -> tuple[mi.Type, dict[str, Any]]:
    """The type without its wrapping, "or none" included, and the notes found on the way.

    The notes: `description`, `live`, `unit`, and `must`: what its pattern means, in words.
    """
    notes: dict[str, Any] = {}
    while True:
        if isinstance(kind, mi.Metadata):
            notes |= (kind.extra or {}) | (kind.extra_json_schema or {})
            kind = kind.type
        elif isinstance(kind, mi.UnionType):
            (kind,) = (each for each in kind.types if not isinstance(each, mi.NoneType))
        else:
            return kind, notes


def struct(cls: type[msgspec.Struct]) -> mi.StructType:
    """The fields of one of this module's classes."""
    kind = mi.type_info(cls)
    assert isinstance(kind, mi.StructType)  # noqa: S101  (for the type checker)
    return kind


def _keys(
    group: mi.StructType, prefix: str = "", attributes: tuple[str, ...] = ()
) -> Iterator[Key]:
    for field in group.fields:
        kind, notes = plain(field.type)
        name, way = prefix + field.encode_name, (*attributes, field.name)
        if isinstance(kind, mi.StructType):
            yield from _keys(kind, name + ".", way)
        else:
            yield Key(
                name=name,
                attributes=way,
                kind=kind,
                description=notes["description"],
                unit=notes.get("unit", ""),
                live=notes["live"],
                default=field.default,
            )


_ROOT = struct(Config)
KEYS = tuple(_keys(_ROOT))
"""Every key, without what the vendors say of some."""


class Schema(msgspec.Struct, frozen=True, eq=False):
    """The keys, with all that the vendors say.

    Attributes:
        root: the type of the whole configuration.
        keys: as `KEYS`.
        choices: of the keys whose values the vendors name.
        defaults: what these and some others are where nobody set them.
    """

    root: mi.StructType
    keys: tuple[Key, ...]
    choices: Mapping[str, tuple[str, ...]]
    defaults: Mapping[str, object]


@lru_cache(8)
def schema_of(words: Vocabulary) -> Schema:
    """The keys, completed by what the vendors call things."""
    sets, schemas = words.label_sets, words.metric_schemas
    texts = {
        "resource_name": words.resource_name,
        "families": ", ".join(words.families),
        "label_sets": ", ".join(f"{name} ({one.about})" for name, one in sets.items()),
        "metric_schemas": " or ".join(f"{name} ({one.about})" for name, one in schemas.items()),
    }
    choices = {"labels.sets": tuple(sets), "metrics.schema": tuple(schemas)}
    defaults = {
        "resourceName": words.resource_name,
        "socketName": words.socket_name,
        "labels.sets": (words.label_set,),
        "metrics.schema": words.metric_schema,
    }

    def said(notes: dict[str, Any] | None) -> dict[str, Any] | None:
        return notes and {
            name: note.format(**texts) if isinstance(note, str) else note
            for name, note in notes.items()
        }

    def completed(kind: Any, name: str) -> Any:
        match kind:
            case mi.Metadata():
                return msgspec.structs.replace(
                    kind,
                    type=completed(kind.type, name),
                    extra_json_schema=said(kind.extra_json_schema),
                    extra=said(kind.extra),
                )
            case mi.VarTupleType():
                return msgspec.structs.replace(kind, item_type=completed(kind.item_type, name))
            case mi.StructType():
                prefix = f"{name}." if name else ""
                fields = tuple(field(each, prefix + each.encode_name) for each in kind.fields)
                return msgspec.structs.replace(kind, fields=fields)
            case mi.StrType() if name in choices:
                return mi.LiteralType(choices[name])
        return kind

    def field(each: mi.Field, name: str) -> mi.Field:
        kind = completed(each.type, name)
        default = defaults.get(name, each.default)
        if isinstance(kind, mi.StructType):
            default = kind.cls(**{part.name: part.default for part in kind.fields})
        return msgspec.structs.replace(each, type=kind, default=default)

    root = completed(_ROOT, "")
    return Schema(root=root, keys=tuple(_keys(root)), choices=choices, defaults=defaults)


def default_config(words: Vocabulary) -> Config:
    """The configuration in which nobody set anything."""
    fields = schema_of(words).root.fields
    return Config(**{field.name: field.default for field in fields})
