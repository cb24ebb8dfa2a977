"""Verbs that measure this machine: bench, profile and tune."""
