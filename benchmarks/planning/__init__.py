"""Figures of planning: what docs/planning.md publishes, beside the papers' own schedules."""
