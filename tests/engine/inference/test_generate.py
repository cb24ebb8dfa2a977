"""Several adapters decode in one batch what each would decode alone, merged into its own model."""

from __future__ import annotations

import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import attending_eagerly, job_spec, random_backbone, random_data, random_model, train

from weft.adapters.adapter import Adapter
from weft.data.load import Prompt
from weft.engine.engine import Engine
from weft.engine.events import Event, StepDone
from weft.engine.inference.generate import BATCH, Request, answers, complete, end_tokens, generate
from weft.spec import AdapterSpec
from weft.spec.sampling import Decoding

PROMPTS = ([5, 9, 14], [33], [7, 8, 9, 10, 11, 12, 13, 14, 15], [40, 41])
GREEDY = Decoding(max_new_tokens=14)


def adapted(name: str) -> tuple[Any, list[Adapter], list[int | None]]:
    """A backbone with two adapters of some effect, and the slots of the prompts; one has none."""
    backbone = random_backbone(name)
    backbone.model.generation_config.eos_token_id = None
    specs = [AdapterSpec(r=r, lora_alpha=2 * r, lora_dropout=0.5, init_lora_weights=False) for r in (2, 3)]
    adapters = [backbone.new_adapter(spec, seed) for seed, spec in enumerate(specs)]
    first, second = (backbone.attach(adapter) for adapter in adapters)
    return backbone, adapters, [first, None, second, first]


@torch.no_grad()
def merged(name: str, adapter: Adapter | None) -> Any:
    """A plain model with the adapter in its weights."""
    model = copy.deepcopy(random_model(name))
    model.generation_config.eos_token_id = None
    for path, weights in adapter.modules.items() if adapter else ():
        model.get_submodule(path).weight += weights.scale * weights.b_OR @ weights.a_RD
    return model


def with_transformers(model: Any, prompt: list[int], number: int) -> list[int]:
    with attending_eagerly(model):
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        out = model.generate(ids, attention_mask=mask, max_new_tokens=number, do_sample=False, pad_token_id=0)
    return out[0, len(prompt) :].tolist()


NAMES = [
    "llama_bias",
    "mistral",
    "qwen3",
    "gemma2",
    "gemma3_text",
    "phi3",
    "opt",
    "gpt_neox",
    "ministral3",
    "gemma4_e2b",
]
NAMES += ["gpt_oss", "glm4_moe_lite"]
WITH_STATES = ["qwen3_5_text", "qwen3_next", "lfm2", "granitemoehybrid_mamba", "nemotron_h", "falcon_h1", "mamba2"]


@pytest.mark.parametrize("name", NAMES + WITH_STATES)
def test_generate_when_adapters_share_a_batch_then_each_writes_what_transformers_writes_with_it_merged(name):
    backbone, adapters, slots = adapted(name)
    requests = [Request(prompt, slot) for prompt, slot in zip(PROMPTS, slots, strict=True)]
    written = generate(backbone, requests, Decoding(max_new_tokens=8))
    owners = [adapters[0], None, adapters[1], adapters[0]]
    for prompt, owner, tokens in zip(PROMPTS, owners, written, strict=True):
        assert tokens == with_transformers(merged(name, owner), prompt, 8)
    assert written[0] != generate(backbone, [Request(PROMPTS[0])], GREEDY)[0][:8], "the adapter has no effect"


@pytest.fixture(scope="module")
def backbone():
    made = random_backbone("llama")
    made.model.generation_config.eos_token_id = None
    return made


def test_generate_when_more_than_one_batch_then_all_are_answered_in_order(backbone):
    prompts = [[3 + i % 50, 4 + i % 7] for i in range(BATCH + 9)]
    together = generate(backbone, [Request(p) for p in prompts], Decoding(max_new_tokens=2))
    assert together == [generate(backbone, [Request(p)], Decoding(max_new_tokens=2))[0] for p in prompts]


def test_generate_when_an_end_token_comes_then_stops_before_it(backbone):
    free = generate(backbone, [Request(PROMPTS[0]), Request(PROMPTS[2])], GREEDY)
    end = free[0][4]
    stopper = SimpleNamespace(eos_token_id=end)
    original, backbone.tokenizer = backbone.tokenizer, stopper
    try:
        assert end_tokens(backbone) == {end}
        stopped = generate(backbone, [Request(PROMPTS[0]), Request(PROMPTS[2])], GREEDY)
    finally:
        backbone.tokenizer = original
    cut = [tokens[: tokens.index(end)] if end in tokens else tokens for tokens in free]
    assert stopped == cut
    assert len(stopped[0]) < 14


def test_end_tokens_when_the_generation_config_lists_several_then_all_end(backbone):
    backbone.model.generation_config.eos_token_id = [7, 9]
    try:
        assert end_tokens(backbone) == {7, 9}
    finally:
        backbone.model.generation_config.eos_token_id = None


def test_generate_when_the_positions_run_out_then_stops(backbone):
    prompt = [5] * (backbone.max_positions - 3)
    (written,) = generate(backbone, [Request(prompt)], Decoding(max_new_tokens=50))
    assert len(prompt) + len(written) == backbone.max_positions


def test_generate_when_tokens_come_then_each_is_reported_at_once(backbone):
    received: list[tuple[int, int]] = []
    requests = [Request(PROMPTS[0]), Request(PROMPTS[1])]
    written = generate(backbone, requests, GREEDY, on_token=lambda which, token: received.append((which, token)))
    assert [token for which, token in received if which == 0] == written[0]
    assert [which for which, _ in received[:4]] == [0, 1, 0, 1]


def test_sampling_when_the_seed_is_the_same_then_so_is_the_text(backbone):
    requests = [Request(PROMPTS[0], seed=i) for i in range(4)]
    warm = Decoding(max_new_tokens=8, temperature=1.0, seed=5)
    first = generate(backbone, requests, warm)
    assert first == generate(backbone, requests, warm)
    assert len({tuple(tokens) for tokens in first}) > 1, "requests draw independently"
    assert first != generate(backbone, requests, Decoding(max_new_tokens=8, temperature=1.0, seed=99))


def test_sampling_when_the_others_change_then_a_request_keeps_its_draws(backbone):
    warm = Decoding(max_new_tokens=8, temperature=1.0, seed=5)
    mine = Request(PROMPTS[0], seed=3)
    (alone,) = generate(backbone, [mine], warm)
    assert generate(backbone, [Request(PROMPTS[1], seed=3), Request(PROMPTS[2]), mine], warm)[2] == alone


def next_probabilities(backbone, prompt: list[int], temperature: float) -> torch.Tensor:
    with attending_eagerly(random_model("llama")) as model, torch.no_grad():
        return torch.softmax(model(torch.tensor([prompt])).logits[0, -1] / temperature, 0)


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.5, 1.0), (2.0, 0.7)])
def test_sampling_when_drawn_often_then_follows_the_probabilities(backbone, temperature, top_p):
    number = 12 * BATCH
    requests = [Request(PROMPTS[0], seed=i) for i in range(number)]
    decoding = Decoding(max_new_tokens=1, temperature=temperature, top_p=top_p)
    drawn = torch.tensor([t for (t,) in generate(backbone, requests, decoding)])
    expected = next_probabilities(backbone, PROMPTS[0], temperature)
    ordered, tokens = expected.sort(descending=True)
    kept = tokens[ordered.cumsum(0) - ordered < top_p]
    assert set(drawn.tolist()) <= set(kept.tolist())
    allowed = torch.zeros_like(expected)
    allowed[kept] = expected[kept] / expected[kept].sum()
    error = (allowed * (1 - allowed) / number).sqrt()
    share = torch.bincount(drawn, minlength=len(expected)) / number
    assert ((share - allowed).abs() <= 5 * error + 1e-3).all()


def test_sampling_when_top_p_is_tiny_then_greedy(backbone):
    narrow = Decoding(max_new_tokens=8, temperature=1.0, top_p=1e-6)
    assert generate(backbone, [Request(PROMPTS[0])], narrow) == generate(
        backbone, [Request(PROMPTS[0])], Decoding(max_new_tokens=8)
    )


def test_generate_when_called_between_training_events_then_training_keeps_its_bits(backbone):
    job = job_spec("a", adapter={"lora_dropout": 0.2}, max_steps=4), random_data(0)
    undisturbed = train(backbone, [job])["a"]

    def decode(engine: Engine, event: Event) -> None:
        if isinstance(event, StepDone):
            generate(
                backbone, [Request(PROMPTS[0], engine.executor.jobs["a"].weights.slot), Request(PROMPTS[1])], GREEDY
            )

    disturbed = train(backbone, [job], on_event=decode)["a"]
    assert disturbed.losses == undisturbed.losses
    assert all(b.equal(undisturbed.adapter[path][1]) for path, (_, b) in disturbed.adapter.items())


def model_logprobs(tokens: list[int]) -> torch.Tensor:
    """Row t: log-probabilities of the token after the first t + 1."""
    with attending_eagerly(random_model("llama")) as model, torch.no_grad():
        return torch.log_softmax(model(torch.tensor([tokens])).logits[0].double(), -1)


def test_complete_when_logprobs_are_wanted_then_each_token_has_the_models_own(backbone):
    decoding = Decoding(6, temperature=0.8, top_k=20, seed=2, logprobs=2)
    plain, wanted = ([Request(p, seed=i) for i, p in enumerate(PROMPTS)] for _ in range(2))
    finished = complete(backbone, wanted, decoding)
    assert [each.tokens for each in finished] == generate(backbone, plain, replace(decoding, logprobs=None))
    for prompt, each in zip(PROMPTS, finished, strict=True):
        rows = model_logprobs([*prompt, *each.tokens])[len(prompt) - 1 : -1]
        assert [found.token for found in each.logprobs] == each.tokens
        for row, found in zip(rows, each.logprobs, strict=True):
            assert found.logprob == pytest.approx(float(row[found.token]), abs=1e-4)
            assert [token for token, _ in found.top] == row.topk(2).indices.tolist()
            assert [value for _, value in found.top] == pytest.approx(row.topk(2).values.tolist(), abs=1e-4)
        assert each.prompt_logprobs == []


@pytest.mark.parametrize("at_once", [2, 256])
def test_complete_when_the_prompt_is_scored_then_its_tokens_have_their_logprobs_and_the_answer_is_the_same(
    backbone, monkeypatch, at_once
):
    monkeypatch.setattr("weft.engine.inference.read.SCORED_TOKENS", at_once)
    finished = complete(backbone, [Request(p) for p in PROMPTS], Decoding(4, prompt_logprobs=1))
    assert [each.tokens for each in finished] == generate(backbone, [Request(p) for p in PROMPTS], Decoding(4))
    for prompt, each in zip(PROMPTS, finished, strict=True):
        first, *rest = each.prompt_logprobs
        assert first is None and [found.token for found in rest] == prompt[1:]
        for row, found in zip(model_logprobs(prompt), rest, strict=False):
            assert found.logprob == pytest.approx(float(row[found.token]), abs=1e-4)
            assert [token for token, _ in found.top] == [int(row.argmax())]


def test_complete_when_a_stop_token_comes_then_ends_before_it(backbone):
    (free,) = generate(backbone, [Request(PROMPTS[0])], GREEDY)
    (found,) = complete(backbone, [Request(PROMPTS[0])], replace(GREEDY, stop_token_ids=(free[5],)))
    assert (found.tokens, found.reason) == (free[: free.index(free[5])], "stop")
    assert complete(backbone, [Request(PROMPTS[0])], GREEDY)[0].reason == "length"


class Letters:
    """A letter for each token."""

    eos_token_id = None

    def decode(self, tokens: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(0x4E00 + token) for token in tokens)


def test_answers_when_a_stop_string_comes_then_end_before_it_and_decode_no_further(backbone, monkeypatch):
    monkeypatch.setattr(backbone, "tokenizer", Letters())
    monkeypatch.setattr(backbone, "tokenizer_of", lambda slot: Letters())
    prompts = [Prompt(np.array(tokens, dtype=np.int32), "", None, "here") for tokens in PROMPTS]
    free = answers(backbone, {"a": (None, prompts)}, GREEDY)["a"]
    stop = free[0].text[4:6]
    stopped = answers(backbone, {"a": (None, prompts)}, replace(GREEDY, stop=(stop, "never")))["a"]
    assert [each.text for each in stopped] == [each.text.split(stop)[0] for each in free]
    assert stopped[0].finished is not None and stopped[0].finished.reason == "stop"
    assert len(stopped[0].finished.tokens) == free[0].text.index(stop) + 2


def test_answers_when_several_are_wanted_then_each_prompt_has_them_and_the_first_is_the_only_one(backbone, monkeypatch):
    monkeypatch.setattr(backbone, "tokenizer", Letters())
    monkeypatch.setattr(backbone, "tokenizer_of", lambda slot: Letters())
    prompts = [Prompt(np.array(tokens, dtype=np.int32), "", None, "here") for tokens in PROMPTS]
    warm = Decoding(8, temperature=1.0)
    one = answers(backbone, {"a": (None, prompts)}, warm)["a"]
    three = answers(backbone, {"a": (None, prompts)}, replace(warm, n=3))["a"]
    assert [each.prompt for each in three[::3]] == prompts
    assert [each.text for each in three[::3]] == [each.text for each in one]
    assert len({each.text for each in three}) == len(three)
