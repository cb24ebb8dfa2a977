"""Bottleneck adapters: a small layer of their own after attention and MLP blocks."""
