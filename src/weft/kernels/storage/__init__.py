"""Kernels of frozen weights in fewer bits: FP8, int8, NF4."""
