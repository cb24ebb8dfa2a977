"""Sweeps: a search space expanded into jobs that train together, compared and stopped early, the best one kept."""
