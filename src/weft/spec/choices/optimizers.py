"""The optimizers a job can choose, and the names that other trainers have for them."""

from __future__ import annotations

OPTIMIZERS = ("adamw", "adamw_8bit", "sgd", "lion", "adafactor", "muon")
OPTIMIZER_NAMES = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "paged_adamw_32bit"), "adamw"),
    **dict.fromkeys(("adamw_bnb_8bit", "adamw_torch_8bit", "paged_adamw_8bit"), "adamw_8bit"),
    **dict.fromkeys(("lion_32bit", "lion_pytorch", "paged_lion_32bit"), "lion"),
}
"""What transformers' TrainingArguments and those who build on it call them."""
