"""Jobs with rows of the embedding and the output head of their own equal the same jobs trained alone by PEFT."""

from __future__ import annotations

import copy
from typing import Any

import peft
import pytest
import torch
from covering import slow
from test_exact import BOUND, CAPACITY, STEPS, largest_difference, peft_config, peft_tensors, train_peft_model
from tiny_models import VOCABULARY, Job, finish, job_spec, random_data, random_model
from tiny_tokenizer import word_tokenizer

from weft.adapters.parts import INPUT_ROWS, OUTPUT_ROWS
from weft.engine.engine import Engine
from weft.engine.jobs.live_job import LiveJob
from weft.model.backbone import Backbone
from weft.spec import AdapterSpec

ROWS = (INPUT_ROWS, OUTPUT_ROWS)
TIED: list[dict[str, Any]] = [
    {"trainable_token_indices": (30, 9, 4, 5)},
    {"trainable_token_indices": (9, 11), "method": "dora"},
    {"modules_to_save": ("embed_tokens",)},
    {"new_tokens": ("<a>", "<b>"), "trainable_token_indices": (9,)},
    {},
]
UNTIED: list[dict[str, Any]] = [
    {"trainable_token_indices": (30, 9, 4, 5)},
    {"trainable_token_indices": {"embed_tokens": (9, 11), "lm_head": (11, 30, 8)}},
    {"modules_to_save": ("lm_head",), "trainable_token_indices": (5, 6)},
    {"modules_to_save": ("embed_tokens", "lm_head")},
    {"new_tokens": ("<a>", "<b>")},
]


def made(settings: list[dict[str, Any]]) -> list[Job]:
    """Jobs with an epsilon above the rounding, as the last of test_exact."""
    return [
        (
            job_spec(f"job{i}", max_steps=STEPS, seed=i, adam_epsilon=1e-3, adapter={"method": "lora", "r": 4, **own}),
            random_data(i, num_samples=14 + i, high=VOCABULARY + (2 if "new_tokens" in own else 0)),
        )
        for i, own in enumerate(settings)
    ]


def peft_rows(model: Any) -> dict[str, torch.Tensor]:
    """PEFT's own rows by our names of them."""
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and ("trainable_tokens_delta" in name or "modules_to_save" in name):
            found[OUTPUT_ROWS if ".lm_head." in name else INPUT_ROWS] = parameter
    return found


def peft_model(plain: Any, job: LiveJob, adapter: AdapterSpec, start: dict[str, tuple[torch.Tensor, ...]]) -> Any:
    """The plain model with PEFT's own adapter and rows, set to where our job started; `adapter` names all of them."""
    config = peft_config(job, {path: own for path, own in start.items() if path not in ROWS}, plain.config.model_type)
    given = adapter.trainable_token_indices
    config.trainable_token_indices = (
        {name: list(ids) for name, ids in given.items()} if isinstance(given, dict) else list(given) if given else None
    )
    config.modules_to_save = None if adapter.modules_to_save is None else list(adapter.modules_to_save)
    model = peft.get_peft_model(copy.deepcopy(plain), config)
    with torch.no_grad():
        for path, tensors in start.items():
            theirs = [peft_rows(model)[path]] if path in ROWS else peft_tensors(model, job, path)
            for mine, other in zip(tensors, theirs, strict=True):
                other.copy_(mine)
    return model


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize(
    ("family", "settings"), [slow("llama_tied", TIED), ("gemma2", TIED[:1]), ("llama_bias", UNTIED)]
)
def test_rows_when_jobs_with_others_train_beside_them_then_each_job_equals_peft_alone(family, settings):
    plain = random_model(family)
    plain.set_attn_implementation("eager")
    backbone = Backbone(random_model(family), word_tokenizer(VOCABULARY), family)
    engine = Engine(backbone, capacity=CAPACITY)
    for spec, data in made(settings):
        engine.submit(spec, data)
    starts = {job: engine.executor.adapter_of(job) for job in engine.jobs}
    outcomes = finish(engine)
    for job, live in engine.jobs.items():
        base, mine = copy.deepcopy(plain), outcomes[job].adapter
        if live.spec.adapter.new_tokens:
            base.resize_token_embeddings(VOCABULARY + 2, mean_resizing=False)
        model = peft_model(base, live, backbone.embeddings.named(live.spec.adapter), starts[job])
        modules = [path for path in mine if path not in ROWS]
        expected, losses, _ = train_peft_model(model, live, modules)
        expected |= {name: (rows.detach(),) for name, rows in peft_rows(model).items()}
        assert mine.keys() == expected.keys()
        assert outcomes[job].losses == pytest.approx(losses, rel=BOUND)
        assert largest_difference(mine, expected) <= BOUND, job
        for name in mine.keys() & set(ROWS):
            assert not mine[name][0].equal(starts[job][name][0]), "the rows learned nothing"
