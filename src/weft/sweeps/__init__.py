"""Sweeps: a search space expanded into jobs that train together, judged and stopped early, the best one kept."""
