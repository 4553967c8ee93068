"""A judge for DRA drivers: any driver, beside a real API server and a stand-in for the kubelet.

`python -m tests.conformance --help`. It asks a driver what a kubelet asks, and what kubelets ask
after restarts, races and reboots; each answer is one line. `items.py` has what is asked,
`world.py` how. README.md has what came of it.
"""
