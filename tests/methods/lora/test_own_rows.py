"""Which rows of tokens an adapter may have of its own."""

from typing import Any

import pytest

from weft.errors import ConfigError
from weft.methods.lora.config import OwnRows
from weft.spec import AdapterSpec, JobSpec


@pytest.mark.parametrize(
    ("settings", "rows"),
    [
        ({}, OwnRows()),
        ({"trainable_token_indices": [7, 3]}, OwnRows(inputs=(7, 3))),
        ({"trainable_token_indices": {"wte": [7], "lm_head": [8]}}, OwnRows(inputs=(7,), outputs=(8,))),
        ({"modules_to_save": ["model.embed_tokens", "embed_out"]}, OwnRows(all_inputs=True, all_outputs=True)),
        ({"modules_to_save": "lm_head", "trainable_token_indices": [1]}, OwnRows(inputs=(1,), all_outputs=True)),
    ],
)
def test_rows_when_stated_as_peft_does_then_are_those(settings: dict[str, Any], rows: OwnRows):
    found = AdapterSpec(**settings).own_rows
    assert found == rows
    assert bool(found) is bool(settings)


def test_count_when_a_module_is_whole_then_is_the_vocabulary():
    assert OwnRows(inputs=(1, 2), all_outputs=True).count(100) == 102


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"trainable_token_indices": []}, "trainable_token_indices: the list is empty; expected ids of tokens"),
        ({"trainable_token_indices": [4, -1]}, "trainable_token_indices: got -1; expected ids of tokens, from 0 up"),
        ({"trainable_token_indices": [4, 1, 4]}, "trainable_token_indices: token 4 is there twice"),
        ({"trainable_token_indices": {"q_proj": [4]}}, r"trainable_token_indices.q_proj: got 'q_proj'; accepted are"),
        ({"modules_to_save": ["norm"]}, "modules_to_save: got 'norm'; accepted are embed_tokens, the input embedding"),
        (
            {"modules_to_save": ["wte"], "trainable_token_indices": [1]},
            "wte is the input embedding, whose rows are",
        ),
        ({"modules_to_save": ["lm_head"], "method": "ia3"}, "modules_to_save: is a setting of lora and dora"),
    ],
)
def test_rows_when_no_adapter_can_have_them_then_refused_in_one_sentence(settings: dict[str, Any], sentence: str):
    with pytest.raises(ConfigError, match=sentence):
        AdapterSpec(**settings)


def test_job_when_muon_would_step_rows_then_is_refused():
    with pytest.raises(ConfigError, match="optim: muon trains matrices only, not rows of tokens"):
        JobSpec("a", "rows.jsonl", optim="muon", adapter=AdapterSpec(trainable_token_indices=[1]))
