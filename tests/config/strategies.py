"""Random valid configurations."""

from __future__ import annotations

from operator import itemgetter

from hypothesis import settings
from hypothesis import strategies as st

from npu_agent.config import Config, LogConfig, MetricsConfig, TlsConfig
from npu_agent.config.schema import (
    AllocationConfig,
    ContainersConfig,
    DisabledDevice,
    HealthConfig,
    LabelsConfig,
    NodeApi,
    ResourceSpec,
)
from npu_agent.vendors import SPEC

# A whole configuration takes some milliseconds to draw; the keys are independent of each other.
FEW = settings(max_examples=25, deadline=None)

# All that YAML may hold in one line of text; Cn has the two non-characters U+FFFE and U+FFFF.
TEXT = st.text(st.characters(exclude_categories=("Cc", "Cs", "Cn")), min_size=1, max_size=12)
WORD = st.text("abz09", min_size=1, max_size=8)
RESOURCE = st.builds("{}.{}/{}-{}".format, WORD, WORD, WORD, WORD)

DEVICES = st.builds(
    DisabledDevice,
    dev_name=st.sampled_from(["npu0", "0000:01:00.0", "1e3", "yes", "null", "~", "010"])
    | TEXT.filter(lambda text: not set(text) & set(",/") and not any(c.isspace() for c in text)),
    node_name=st.sampled_from([None, "node-1", "10.0.0.1", "true"]),
)


NODES = st.builds(
    NodeApi,
    node_name=st.sampled_from(["node-1", "10.0.0.1", "true"]),
    api=st.sampled_from(["dra", "auto", "device-plugin"]),
)


@st.composite
def resources(draw: st.DrawFn) -> tuple[ResourceSpec, ...]:
    shapes = [(family, width) for family, widths in SPEC.families.items() for width in widths]
    chosen = draw(st.lists(st.sampled_from(shapes), unique_by=itemgetter(0), max_size=2))
    names = draw(st.lists(RESOURCE, unique=True, min_size=len(chosen), max_size=len(chosen)))
    return tuple(
        ResourceSpec(name=name, family=family, cores_per_device=width)
        for name, (family, width) in zip(names, chosen, strict=True)
    )


CONFIGS = st.builds(
    Config,
    default_pe=st.sampled_from(["Fusion", "Single"]),
    interval=st.floats(0.1, 3600),
    disabled_devices=st.lists(DEVICES, max_size=3).map(tuple),
    plugin_dir=TEXT.map("/".__add__),
    socket_name=st.builds("{}_{}".format, WORD, WORD) | st.sampled_from(["1", "0x1", "1e3", "no"]),
    resource_name=RESOURCE,
    resources=resources(),
    allocation=st.builds(
        AllocationConfig,
        method=st.sampled_from(["deviceNodes", "cdi"]),
        nodes=st.lists(NODES, max_size=2, unique_by=lambda one: one.node_name).map(tuple),
    ),
    containers=st.builds(
        ContainersConfig,
        device_nodes=st.lists(WORD.map("/dev/x{}/system".format), max_size=2).map(tuple),
    ),
    health=st.builds(
        HealthConfig,
        interval=st.floats(0.05, 60),
        failures=st.integers(1, 100),
        recoveries=st.integers(1, 100),
        max_temperature=st.none() | st.floats(30, 150),
    ),
    labels=st.builds(
        LabelsConfig,
        output=st.sampled_from(["api", "nfd", "none"]),
        sets=st.lists(st.sampled_from(["alpha", "beta", "current"]), unique=True, min_size=1).map(
            tuple
        ),
        resync=st.floats(10, 86400),
    ),
    metrics=st.builds(
        MetricsConfig,
        listen=st.sampled_from([":9100", "127.0.0.1:0", "[::1]:65535", "10.0.0.1:80"]),
        tls=st.sampled_from(
            [
                TlsConfig(),
                TlsConfig(cert_file="/c", key_file="/k"),
                TlsConfig(cert_file="/c", key_file="/k", client_ca_file="/ca"),
            ]
        ),
        probes=st.none() | st.sampled_from([":9101", "127.0.0.1:0"]),
        schema=st.sampled_from(["0.8", "2025", "prometheus"]),
        pod_labels=st.booleans(),
        interval=st.floats(1, 3600),
    ),
    events=st.booleans(),
    cordon=st.booleans(),
    log=st.builds(
        LogConfig,
        level=st.sampled_from(["debug", "info", "warning", "error"]),
        format=st.sampled_from(["text", "json"]),
    ),
)
