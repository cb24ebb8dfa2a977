"""Decoder families on the fast path: the structure of their layers, as plain data that needs no torch."""
