"""Events with the few values that a test is about; the others are unremarkable."""

from weft.engine.events import EvalDone, StepDone


def step_done(job: str, step: int, *, num_steps: int = 50, loss: float = 1.0, seconds: float = 1.0) -> StepDone:
    """One optimizer step of a hundred tokens."""
    return StepDone(
        job=job,
        step=step,
        num_steps=num_steps,
        epoch=0.1 * step,
        loss=loss,
        mean_token_accuracy=0.5,
        grad_norm=1.0,
        learning_rate=2e-4,
        tokens=100,
        num_tokens=100 * step,
        seconds=seconds,
    )


def eval_done(job: str, step: int, eval_loss: float) -> EvalDone:
    """One evaluation."""
    return EvalDone(
        job=job,
        step=step,
        epoch=0.1 * step,
        eval_loss=eval_loss,
        eval_mean_token_accuracy=0.25,
        eval_runtime=0.1,
        is_best=True,
        seconds=1.0,
    )
