"""`python -m benchmarks methods`: PEFT methods and objectives mixed in one run, beside LoRA alone and beside PEFT."""
