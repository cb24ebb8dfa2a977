"""Objectives that learn which of two answers is better."""
