from __future__ import annotations

import pytest

from npu_agent.config import (
    Config,
    DisabledDevice,
    MetricsConfig,
    default_config,
    disabled_for,
)
from npu_agent.config.schema import keys_of, schema_of
from npu_agent.vendors import REGISTRY

KEYS_OF_THE_SPECIFICATION = """\
defaultPe                 --default-pe                 live     Fusion
interval                  --interval                   live     10.0
disabledDevices           --disabled-devices           live     ()
pluginDir                 --plugin-dir                 restart  /var/lib/kubelet/device-plugins
socketName                --socket-name                restart  furiosa-npu
resourceName              --resource-name              restart  beta.furiosa.ai/npu
resources                 --resources                  restart  ()
allocation.method         --allocation-method          restart  deviceNodes
allocation.api            --allocation-api             restart  device-plugin
allocation.nodes          --allocation-nodes           restart  ()
dra.deviceNames           --dra-device-names           restart  identity
dra.partitions            --dra-partitions             live     False
health.interval           --health-interval            live     0.5
health.failures           --health-failures            live     2
health.recoveries         --health-recoveries          live     3
health.maxTemperature     --health-max-temperature     live     None
health.slowAfter          --health-slow-after          live     300.0
health.evict              --health-evict               live     False
health.expectedCards      --health-expected-cards      live     None
health.condition.type     --health-condition-type      live     None
labels.output             --labels-output              restart  api
labels.sets               --labels-sets                live     ('beta',)
labels.resync             --labels-resync              live     300.0
metrics.listen            --metrics-listen             restart  :9100
metrics.probes            --metrics-probes             restart  None
metrics.schema            --metrics-schema             live     0.8
metrics.podLabels         --metrics-pod-labels         live     True
metrics.interval          --metrics-interval           live     5.0
metrics.authorization     --metrics-authorization      restart  none
metrics.tls.certFile      --metrics-tls-cert-file      restart  None
metrics.tls.keyFile       --metrics-tls-key-file       restart  None
metrics.tls.clientCAFile  --metrics-tls-client-ca-file restart  None
events                    --events                     live     True
cordon                    --cordon                     live     True
log.level                 --log-level                  live     info
log.format                --log-format                 live     text
"""


def test_keys_options_and_defaults_as_the_specification_has_them() -> None:
    keys = list(keys_of(schema_of(REGISTRY)))
    assert [line.split() for line in KEYS_OF_THE_SPECIFICATION.splitlines()] == [
        [key.name, key.option, "live" if key.live else "restart", str(key.default)] for key in keys
    ]
    assert all(key.value(default_config(REGISTRY)) == key.default for key in keys)


@pytest.mark.parametrize(
    ("listen", "address"),
    [
        (":9100", ("", 9100)),
        ("127.0.0.1:80", ("127.0.0.1", 80)),
        ("[::1]:0", ("::1", 0)),
        ("node.example:65535", ("node.example", 65535)),
    ],
)
def test_address(listen: str, address: tuple[str, int]) -> None:
    assert MetricsConfig(listen=listen).address == address


@pytest.mark.parametrize(
    ("config", "address"),
    [
        (MetricsConfig(listen=":9100"), ("", 9101)),
        (MetricsConfig(listen="[::1]:9410"), ("", 9411)),
        (MetricsConfig(listen="127.0.0.1:0"), ("", 0)),
        (MetricsConfig(listen=":65535"), ("", 65534)),
        (MetricsConfig(listen="127.0.0.1:9100", probes=":80"), ("", 80)),
    ],
)
def test_probes_are_at_the_next_port_of_every_interface_unless_it_is_given(
    config: MetricsConfig, address: tuple[str, int]
) -> None:
    assert config.probes_address == address


def test_disabled_for_a_node_in_any_case() -> None:
    config = Config(
        disabled_devices=(
            DisabledDevice(dev_name="NPU0"),
            DisabledDevice(dev_name="npu1", node_name="here"),
            DisabledDevice(dev_name="npu2", node_name="there"),
        )
    )
    assert disabled_for(config, "here") == {"npu0", "npu1"}
    assert disabled_for(config, "elsewhere") == {"npu0"}
    assert disabled_for(config, None) == {"npu0"}
