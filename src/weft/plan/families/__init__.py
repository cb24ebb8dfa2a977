"""Decoder families on the fast path: what their layers are made of, as plain data that needs no torch."""
