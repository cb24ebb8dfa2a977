"""Interprets the engine's programs with a cost model instead of tensors. No torch."""
