"""`weft bench methods`: PEFT methods and objectives mixed in one run, beside LoRA alone and beside PEFT."""
