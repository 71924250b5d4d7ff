"""Keeps blocks that the KV cache evicts in host memory, from where later requests load them."""
