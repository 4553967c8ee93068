"""Fuzzing of all that reads bytes of others: drivers, users, the kubelet, the API server, clients.

`targets` is the table of what is tried and of what must hold, `mutate` makes new inputs of known
ones, `corpus/` has the inputs that are kept, `test_corpus` tries both (``make fuzz`` for longer).
"""
