"""DoRA: LoRA whose updated weight has learned lengths of its rows."""
