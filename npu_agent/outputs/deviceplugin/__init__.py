"""The device plugin: advertised devices, Allocate, and the session with the kubelet."""
