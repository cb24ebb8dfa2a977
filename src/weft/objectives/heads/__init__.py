"""Objectives with a head of their own: classes of texts and of words, and rewards."""
