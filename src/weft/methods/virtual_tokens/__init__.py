"""Prompt tuning and prefix tuning: rows in front of every sample that hold what the adapter has learned."""
