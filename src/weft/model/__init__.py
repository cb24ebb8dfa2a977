"""Loads frozen models and runs packed microbatches through them."""
