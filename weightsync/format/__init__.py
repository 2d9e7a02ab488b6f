"""What travels: chunks, safetensors layouts, manifests and their digests."""
