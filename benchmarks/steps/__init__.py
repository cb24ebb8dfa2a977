"""Whole training steps: what is measured, Weft's side, its peers, bits and agreement."""
