"""Weft trains many LoRA adapters at once on one frozen language model."""

__version__ = "0.1.0"
