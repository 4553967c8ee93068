"""The device plugin: what to advertise, what Allocate answers, and the session with the kubelet."""
