"""The kubelet's APIs: registration, pod-resources, and who owns a resource on this node."""

KUBELET_SOCKET = "kubelet.sock"
"""Where the kubelet takes registrations, in its device-plugins directory."""
