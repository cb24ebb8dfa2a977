"""Optimizers of jobs: one file for each kind, their registry, and the step of all jobs whose batch is complete."""
