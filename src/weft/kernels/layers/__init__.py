"""Kernels of the frozen layers: attention, norms, rotary positions, activations, the loss."""
