"""The live table, report.html, and experiment trackers."""
