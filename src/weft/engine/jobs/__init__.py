"""The jobs of an engine: how far each has come, who has a place, and what becomes of them at step boundaries."""
