"""Whole runs by the command line and the wall clock, beside what people would run instead."""
