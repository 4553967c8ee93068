"""The configuration: its keys, how it is read from a file or from options, and how it changes.

`Config` is an immutable value. `from_args` makes one from a command line, `parse` from a file's
content; both raise only `ConfigError`. Of the environment only NPU_AGENT_CONFIG_FILE and
NPU_AGENT_PLUGIN_DIR are read, as defaults.
"""

from npu_agent.config.load import Effective, load, parse
from npu_agent.config.options import add_options, file_of, from_args
from npu_agent.config.poller import Poller
from npu_agent.config.schema import (
    KEYS,
    Config,
    Key,
    LogConfig,
    MetricsConfig,
    TlsConfig,
    default_config,
    disabled_for,
)
from npu_agent.config.values import ConfigError

__all__ = [
    "KEYS",
    "Config",
    "ConfigError",
    "Effective",
    "Key",
    "LogConfig",
    "MetricsConfig",
    "Poller",
    "TlsConfig",
    "add_options",
    "default_config",
    "disabled_for",
    "file_of",
    "from_args",
    "load",
    "parse",
]
