"""Kernels of other PEFT methods than LoRA, for the rows of their slots."""
