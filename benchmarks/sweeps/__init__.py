"""Figures of sweeps: what docs/sweeps.md and docs/planning.md publish, beside PLoRA's plans."""
