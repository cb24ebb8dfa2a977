"""Data prepared once: rows become flat arrays chunk by chunk, and a cache on disk keeps them."""
