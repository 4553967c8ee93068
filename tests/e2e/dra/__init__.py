"""DRA on a real Kubernetes: claims, from the template to the nodes in the container."""
