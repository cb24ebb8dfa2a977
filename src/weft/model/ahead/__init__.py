"""Kernels of the fused path compiled on all cores while the weights load."""
