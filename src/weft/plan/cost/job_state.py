"""What a job keeps of each trainable parameter besides its weight and gradient, in bytes.

Counted from the settings alone, so that admission, previews and controllers without torch agree. Where the exact number
depends on shapes it is the most that it can be.
"""

from __future__ import annotations

from weft.spec import JobSpec

FLOAT_BYTES = 4
WORD_BYTES = 8


def optimizer_bytes(job: JobSpec) -> float:
    """What the optimizer remembers; of AdamW the two moments."""
    side = job.adapter.config.smallest_side(job.adapter)
    match job.optim:
        case "adamw_8bit":
            # Two codes, and two scales for every 256; a short buffer has one of each more.
            return 2 + 2 * FLOAT_BYTES / 256
        case "sgd":
            return FLOAT_BYTES * (job.used_momentum > 0)
        case "lion":
            return FLOAT_BYTES
        case "adafactor":
            # A matrix of r by d, with r not above d, has r + d numbers for its r · d weights.
            return FLOAT_BYTES * 2 / side
        case "muon":
            return FLOAT_BYTES * (1 if side > 1 else 2)
    return FLOAT_BYTES * 2


def kept_bytes(job: JobSpec) -> float:
    """What the optimizer remembers, and the average of the weights if there is one."""
    return optimizer_bytes(job) + (0 if job.ema_decay is None else FLOAT_BYTES)


def passing_bytes(job: JobSpec) -> int:
    """What a step or an evaluation holds for a moment: where no kernel steps, a change as large as the weights; the
    weights before the step where some have a rate of their own; the last weights while their average is evaluated."""
    in_a_step = (job.optim in ("sgd", "lion")) + bool(job.learning_rate_pattern)
    return FLOAT_BYTES * max(in_a_step, job.ema_decay is not None)


def sum_bytes(job: JobSpec) -> int:
    """Bytes of order-independent sums for each weight: a word of 8 bytes, and a second where gradients are large."""
    return 2 * WORD_BYTES if job.gradient_sum == "any_order" else 0


def best_bytes(job: JobSpec) -> int:
    """The weights of the best evaluation, if early stopping asks for them."""
    return FLOAT_BYTES if job.early_stopping_patience else 0


def job_state_bytes(job: JobSpec) -> float:
    """All of it together, as admission counts it."""
    return kept_bytes(job) + passing_bytes(job) + best_bytes(job) + sum_bytes(job)
