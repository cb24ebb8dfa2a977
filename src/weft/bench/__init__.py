"""Measures Weft beside what people run today, on this machine, in one process."""
