"""What other methods than LoRA change on the rows of their slots."""
