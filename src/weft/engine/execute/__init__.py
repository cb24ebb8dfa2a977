"""Runs work on a backbone: microbatches, evaluations and optimizer steps of the jobs that are seated on it."""
