"""Verbs of the service: serve, worker, and the operator's keys and tenants."""
