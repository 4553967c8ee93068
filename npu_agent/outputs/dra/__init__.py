"""DRA: the cards as ResourceSlices, claims prepared for containers, and what the kubelet asks."""
