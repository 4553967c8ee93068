"""`npu-agent doctor`: whether all that the agent needs is there, on this host and in this cluster.

Each module has the looks (I/O, each with a deadline, giving plain values or `Unseen`) and the pure
functions that decide what they mean. Nothing here changes anything.
"""
