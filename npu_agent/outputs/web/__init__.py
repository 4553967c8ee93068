"""The HTTP side: metrics, probes and the status page, read by programs and by people on call."""
