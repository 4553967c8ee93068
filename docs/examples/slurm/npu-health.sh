#!/bin/bash
# /etc/slurm/npu-health.sh: drains this node if a card is unhealthy or cannot be read (stderr).
# slurm.conf: HealthCheckProgram=/etc/slurm/npu-health.sh
#             HealthCheckInterval=60
bad=$(npu-agent info --format json 2>/dev/null | jq -r '.[] | select(.health == "unhealthy") | .name' | paste -sd, -)
odd=$(npu-agent info --format json 2>&1 >/dev/null | paste -sd' ' -)
[ -z "$bad$odd" ] || scontrol update nodename="$(hostname -s)" state=drain reason="npu unhealthy: $bad $odd"
