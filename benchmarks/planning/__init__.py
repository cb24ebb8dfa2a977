"""Figures of planning: what benchmarks/README.md publishes, beside the papers' own schedules."""
