"""`npu-agent doctor`: whether all that the agent needs is there, on this host and in this cluster.

`examine` runs everything. Each other module has a subject: its probes (I/O, each with a deadline,
giving plain values or `Unseen`) and the pure functions that decide what they mean. Nothing here
changes anything.
"""
