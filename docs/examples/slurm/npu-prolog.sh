#!/bin/bash
# slurm.conf: Prolog=/etc/slurm/npu-prolog.sh: opens each of the job's cards first. IMAGE has npu-agent.
# If it fails, Slurm drains the node and requeues the job.
indexes=$(scontrol show job -d "$SLURM_JOB_ID" | grep -oP 'npu[^ ]*\(IDX:\K[0-9,-]+' | tr ',' '\n')
for range in $indexes; do
    for n in $(seq "${range%-*}" "${range#*-}"); do
        podman run --rm --security-opt seccomp=unconfined --device "furiosa.ai/npu=npu$n" \
            IMAGE npu-agent verify --expect 1 || exit 1
    done
done
