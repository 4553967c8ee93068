"""The kubelet's APIs: registration, pod-resources, and who owns a resource on this node."""
