"""The live table, report.html of runs and sweeps, and experiment trackers."""
