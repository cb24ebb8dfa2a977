"""Bottleneck adapters: a small layer of their own behind attention and MLP blocks."""
