"""Frozen weights of the layers spread over several devices, and gathered layer by layer ahead of use."""
