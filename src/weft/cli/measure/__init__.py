"""Verbs that measure this machine: profile and tune."""
