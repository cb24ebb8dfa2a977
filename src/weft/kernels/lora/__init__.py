"""Kernels of LoRA adapters beside frozen products, and the tables that tell them whose rows are whose."""
