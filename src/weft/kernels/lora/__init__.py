"""Kernels of LoRA adapters beside frozen products, and the tables that map rows to owners."""
