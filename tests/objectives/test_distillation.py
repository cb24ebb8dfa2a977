"""Distillation: the loss and slopes are those of the divergences as torch has them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from weft.errors import ConfigError
from weft.objectives.distillation import MEASURED, Distillation
from weft.spec import JobSpec

DIVERGENCES = ("forward_kl", "reverse_kl", "jsd")


def by_torch(objective: Distillation, logits, teacher, targets) -> torch.Tensor:
    """The loss of each row, written out."""
    t = objective.temperature
    s, p = F.log_softmax(logits / t, dim=1), F.log_softmax(teacher / t, dim=1)
    if objective.divergence == "forward_kl":
        found = F.kl_div(s, p, reduction="none", log_target=True)
    elif objective.divergence == "reverse_kl":
        found = F.kl_div(p, s, reduction="none", log_target=True)
    else:
        middle = torch.log((s.exp() + p.exp()) / 2)
        found = (F.kl_div(middle, p, reduction="none", log_target=True)) / 2
        found = found + F.kl_div(middle, s, reduction="none", log_target=True) / 2
    # torch's own makes NaN of a token that the teacher does not list.
    found = torch.where(p.isneginf() & found.isnan(), 0.0, found)
    own = F.cross_entropy(logits, targets, reduction="none")
    return objective.alpha * t * t * found.sum(dim=1) + (1 - objective.alpha) * own


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize(("alpha", "temperature"), [(0.5, 1.0), (1.0, 3.0), (0.25, 0.7), (0.0, 2.0)])
def test_rows_when_scored_then_loss_and_slopes_are_those_of_autograd(divergence, alpha, temperature):
    generator = torch.Generator().manual_seed(0)
    logits, teacher = torch.randn(2, 7, 31, generator=generator, dtype=torch.float64) * 3
    targets = torch.randint(31, (7,), generator=generator)
    objective = Distillation(alpha, temperature, divergence)
    logits.requires_grad_()
    expected = by_torch(objective, logits, teacher, targets)
    expected.sum().backward()
    loss = objective.distillation_loss(logits.detach(), teacher, targets)
    measured = dict(zip(MEASURED, loss.measured_KB, strict=True))
    torch.testing.assert_close(measured["loss"], expected.detach())
    torch.testing.assert_close(loss.slopes_BV, logits.grad)
    assert measured["teacher_agreement"].tolist() == (logits.argmax(1) == teacher.argmax(1)).tolist()
    assert (measured["kl"] > 0).all() and (measured["cross_entropy"] > 0).all()


@pytest.mark.parametrize("divergence", ["forward_kl", "jsd"])
def test_rows_when_the_teacher_names_some_tokens_then_the_others_have_no_part_in_it(divergence):
    generator = torch.Generator().manual_seed(1)
    logits, teacher = torch.randn(2, 4, 19, generator=generator, dtype=torch.float64) * 3
    top = teacher.topk(5, dim=1)
    named = torch.full_like(teacher, -torch.inf).scatter(1, top.indices, top.values)
    logits.requires_grad_()
    p = top.values.softmax(dim=1)
    s = logits.log_softmax(dim=1)
    if divergence == "forward_kl":
        expected = (p * (p.log() - s.gather(1, top.indices))).sum()
    else:
        dense = torch.zeros_like(teacher).scatter(1, top.indices, p)
        middle = ((dense + s.exp()) / 2).log()
        expected = (torch.xlogy(dense, dense) - dense * middle + s.exp() * (s - middle)).sum() / 2
    expected.backward()
    loss = Distillation(1.0, 1.0, divergence).distillation_loss(
        logits.detach(), named, torch.zeros(4, dtype=torch.long)
    )
    torch.testing.assert_close(loss.measured_KB[0].sum(), expected.detach())
    torch.testing.assert_close(loss.slopes_BV, logits.grad)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_rows_when_both_agree_to_the_bit_or_are_far_apart_then_nothing_overflows(divergence):
    objective = Distillation(1.0, 1.0, divergence)
    same = torch.randn(3, 11, generator=torch.Generator().manual_seed(2)) * 5
    loss = objective.distillation_loss(same, same, torch.zeros(3, dtype=torch.long))
    assert loss.measured_KB[0].abs().max() < 1e-6 and loss.slopes_BV.abs().max() < 1e-6
    far = torch.tensor([[1e4, -1e4, 0.0]])
    loss = objective.distillation_loss(far, far.flip(1), torch.tensor([0]))
    assert loss.measured_KB[0].isfinite().all() and loss.slopes_BV.isfinite().all()


def test_row_when_the_teacher_is_not_a_number_then_neither_is_its_loss_and_others_keep_theirs():
    logits, teacher = torch.randn(2, 2, 9, generator=torch.Generator().manual_seed(3))
    targets, objective = torch.tensor([1, 2]), Distillation()
    before = objective.distillation_loss(logits, teacher, targets)
    teacher[0] = torch.nan
    after = objective.distillation_loss(logits, teacher, targets)
    assert after.measured_KB[0][0].isnan() and after.measured_KB[0][1] == before.measured_KB[0][1]
    assert torch.equal(after.slopes_BV[1], before.slopes_BV[1])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"teacher": "base", "distillation_alpha": 1.5}, "distillation_alpha: must be at most 1, got 1.5"),
        ({"teacher": "base", "distillation_temperature": 0}, "distillation_temperature: must be above 0"),
        ({"teacher": "base", "distillation_divergence": "kl"}, "distillation_divergence: got 'kl'; accepted are"),
        (
            {"teacher": "base", "distillation_top_k": 4, "distillation_divergence": "reverse_kl"},
            "distillation_top_k: reverse_kl needs all tokens of the teacher; use forward_kl or jsd",
        ),
        (
            {"teacher": "base", "adapter": {"trainable_token_indices": [3]}},
            "adapter: rows of tokens are not trained by objective distillation; leave them out",
        ),
        ({"objective": "dpo", "teacher": "base"}, "teacher: is a setting of distillation; the objective is dpo"),
    ],
)
def test_job_when_its_settings_make_no_sense_then_is_refused_in_a_sentence(settings, message):
    with pytest.raises(ConfigError) as refused:
        JobSpec("student", ("rows.jsonl",), **{"objective": "distillation", **settings})
    assert str(refused.value).startswith(message)
