"""IA³: one learned number per output, or per input, of a frozen linear."""
