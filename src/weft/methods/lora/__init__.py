"""LoRA: a low-rank update beside a frozen linear."""
