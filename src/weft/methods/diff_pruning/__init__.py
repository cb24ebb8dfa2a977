"""Diff pruning: a sparse difference to a frozen weight."""
