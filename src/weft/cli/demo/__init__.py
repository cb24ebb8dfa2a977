"""The embedded demo: generated skills, and the run that learns them together."""
