"""Figures of sweeps: what benchmarks/README.md publishes, beside PLoRA's plans."""
