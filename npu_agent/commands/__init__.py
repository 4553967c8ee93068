"""The commands of `npu-agent`, one module each."""
