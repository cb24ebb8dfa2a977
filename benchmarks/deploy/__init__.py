"""Deployments of unlike replicas: how long planning takes, and what it gains by the models."""
