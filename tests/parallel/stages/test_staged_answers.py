"""A backbone that is divided answers as one device does: the same logits to the bit, and so the same tokens."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from covering import slow
from staged_models import prompts, staged_executor
from tensor_models import tensor_executor
from test_sharded import sharded
from test_spread import engine_of
from test_tensor import MODEL
from tiny_models import VOCABULARY, Job, assert_same_bits, finish, job_spec, random_backbone, random_data, submit, train

from weft.data.load import Prompt
from weft.engine.engine import Engine
from weft.engine.events import Event, StepDone
from weft.engine.execute.local import LocalExecutor
from weft.engine.execute.protocol import AnswersWork
from weft.engine.inference import generate
from weft.engine.inference.generate import Continuation
from weft.engine.inference.sampling import Chosen, Sampler
from weft.errors import DataError
from weft.parallel.stages import stage_passes
from weft.plan.pipeline.build import PipelinePlanner, Schedule
from weft.spec.sampling import Decoding

LAYERS = 3
DRAWN = Decoding(max_new_tokens=9, temperature=0.7, top_p=0.9, seed=3)
ALL = ("lora", "middle", "prompt", "prefix", "average", "rows", "new")
FEW = ("lora", "prompt")
END = 23
"""Comes in some of the answers and not in others."""


def jobs() -> list[Job]:
    """Adapters on all layers, on one, in front of samples and of keys, an average, rows, new tokens."""
    adapters: dict[str, dict[str, Any]] = {
        "lora": {"r": 3, "lora_dropout": 0.1},
        "middle": {"r": 3, "layers_to_transform": (1,)},
        "prompt": {"method": "prompt_tuning", "num_virtual_tokens": 3},
        "prefix": {"method": "prefix_tuning", "num_virtual_tokens": 2},
    }
    settings: dict[str, Any] = {"max_steps": 2, "learning_rate": 0.3}
    found = [job_spec(name, adapter=adapter, **settings) for name, adapter in adapters.items()]
    found.append(job_spec("average", ema_decay=0.5, **settings))
    rows = {"embed_tokens": (4, 7), "lm_head": (4, 9)}
    found.append(job_spec("rows", adapter={"r": 3, "trainable_token_indices": rows}, **settings))
    own: list[Job] = [(spec, random_data(seed, num_samples=4)) for seed, spec in enumerate(found)]
    new = job_spec("new", adapter={"r": 3, "new_tokens": ("<a>", "<b>")}, **settings)
    return [*own, (new, random_data(9, num_samples=4, high=VOCABULARY + 2))]


class Words:
    """A tokenizer that knows its end token, and writes numbers and what is added to it."""

    eos_token_id = END
    is_fast = True

    def __init__(self) -> None:
        self._words = list(map(str, range(VOCABULARY)))

    def __len__(self) -> int:
        return len(self._words)

    def add_tokens(self, words: list[str]) -> None:
        self._words += words

    def convert_tokens_to_ids(self, words: list[str]) -> list[int]:
        return [self._words.index(word) for word in words]

    def decode(self, tokens: list[int], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return " ".join(self._words[token] for token in tokens)


def backbones_of(executor: Any) -> list[Any]:
    """All parts of it in this process."""
    if isinstance(executor, LocalExecutor):
        return [executor.backbone]
    groups = getattr(executor.stages, "columns", [executor.stages])
    return [stage.backbone for group in groups for stage in group.stages]


def worded(engine: Engine) -> Engine:
    """The engine, with a tokenizer."""
    executor: Any = engine.executor
    executor.tokenizer = Words()
    for backbone in backbones_of(executor):
        backbone.tokenizer = backbone.embeddings._tokenizer = Words()
    return engine


def answered(engine: Engine, *given: AnswersWork) -> tuple[list[dict[str, list[str]]], list[bytes]]:
    """The jobs' answers, and the sorted bytes of all logits that they follow from."""
    executor: Any = engine.executor
    seen: list[bytes] = []
    choose = Sampler.choose

    def noted(sampler: Sampler, logits_RV: torch.Tensor, items: Sequence[Continuation]) -> Chosen:
        seen.extend(logits_V.numpy().tobytes() for logits_V in logits_RV)
        return choose(sampler, logits_RV, items)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sampler, "choose", noted)
        # More prompts than share a pass.
        for module in (generate, stage_passes):
            patch.setattr(module, "BATCH", 4)
        found = [executor.wait(executor.start(work)) for work in given]
    texts = [{name: [answer.text for answer in own] for name, own in answers.items()} for answers in found]
    return texts, sorted(seen)


def all_together(names: Collection[str]) -> list[AnswersWork]:
    """All jobs at once, and the bare backbone in the place of one."""
    together = AnswersWork(dict.fromkeys(names, prompts()), DRAWN)
    return [together, AnswersWork({"prompt": prompts(3)}, DRAWN, is_bare=True)]


def one_by_one() -> list[AnswersWork]:
    """Where jobs are on several replicas: what is decoded together is of one job then."""
    return [AnswersWork({name: prompts()}, DRAWN) for name in FEW]


def whole(**options: Any) -> Engine:
    return Engine(random_backbone("llama", num_hidden_layers=LAYERS, **options), capacity=48)


def staged(*sizes: int, **options: Any) -> Engine:
    planner = PipelinePlanner(Schedule.EAGER, len(sizes))
    return Engine(staged_executor("llama", sizes, **options), capacity=48, planner=planner)


def trained(engine: Engine, names: Collection[str]) -> Engine:
    submit(worded(engine), *[job for job in jobs() if job[0].name in names])
    engine.run()
    return engine


@pytest.fixture(scope="module")
def one() -> Engine:
    """One device that has trained all jobs."""
    return trained(whole(), ALL)


@pytest.mark.parametrize("sizes", [(1, 2), slow((1, 1, 1))])
def test_jobs_when_stages_answer_then_the_logits_have_the_bits_of_one_device(one, sizes):
    """Several groups of prompts are under way at once, and answers end at unlike lengths."""
    expected, bits = answered(one, *all_together(ALL))
    texts, found = answered(trained(staged(*sizes), ALL), *all_together(ALL))
    assert texts == expected and found == bits
    lengths = {len(text.split()) for own in expected for texts in own.values() for text in texts}
    assert {DRAWN.max_new_tokens} < lengths
    assert expected[0]["prompt"][:3] != expected[1]["prompt"], "the adapter has no effect"
    assert any("<" in text for text in expected[0]["new"]), "no new token is written"


def test_jobs_when_stages_of_the_fused_kernels_answer_then_with_the_texts_of_one_device():
    """One device decodes on the fused path, stages on the reference path: their logits differ in the last digits."""
    expected, _ = answered(trained(whole(kernels="fused"), FEW), *all_together(FEW))
    texts, _ = answered(trained(staged(2, 1, kernels="fused"), FEW), *all_together(FEW))
    assert texts == expected


def test_jobs_when_their_replicas_answer_then_the_logits_have_the_bits_of_one_device(one):
    """Each at home on one of two unlike replicas."""
    assert answered(trained(engine_of((3,), (1, 2)), FEW), *one_by_one()) == answered(one, *one_by_one())


def test_jobs_when_shards_answer_then_the_logits_have_the_bits_of_one_device(one):
    engine, _ = sharded(2)
    assert answered(trained(engine, FEW), *one_by_one()) == answered(one, *one_by_one())


def test_job_when_devices_share_layers_then_answers_what_one_device_does():
    """Their logits differ in the last digits, which here decide nothing."""
    own = jobs()[:1]
    work = AnswersWork({"lora": prompts()}, Decoding(max_new_tokens=9))
    engines = [
        Engine(random_backbone("llama", num_hidden_layers=LAYERS, **MODEL), capacity=48),
        Engine(
            tensor_executor("llama", 2, (1, 2), **MODEL),
            capacity=48,
            planner=PipelinePlanner(Schedule.ONE_F_ONE_B, 2),
        ),
    ]
    found = []
    for engine in engines:
        submit(worded(engine), *own)
        engine.run()
        found.append(answered(engine, work)[0])
        engine.close()
    assert found[0] == found[1]


def test_job_when_it_answers_between_steps_then_no_bit_of_any_job_changes():
    """What stages have begun comes to its end first."""
    own = jobs()[:2]
    expected = train(random_backbone("llama", num_hidden_layers=LAYERS), own, capacity=48)
    engine = worded(staged(1, 2))
    given: list[Any] = []

    def request(engine: Engine, event: Event) -> None:
        if isinstance(event, StepDone) and event.job == "lora":
            given.append(engine.answer("lora", prompts(2), DRAWN))

    submit(engine, *own)
    for name, outcome in finish(engine, request).items():
        assert_same_bits(outcome, expected[name])
    assert len(given) == 2 and all(answer.text for answers in given for answer in answers)


@pytest.mark.parametrize(("stage", "what"), [slow(0, "read_on"), (1, "read_on"), (2, "read_on")])
def test_job_when_a_stage_fails_in_the_middle_of_an_answer_then_the_next_one_gets_nothing_of_it(
    one, monkeypatch, stage, what
):
    """Of several groups under way, at whichever pass; nor does it keep a slot."""
    work = AnswersWork(dict.fromkeys(FEW, prompts()), DRAWN)
    engine = trained(staged(1, 1, 1), FEW)
    backbones = backbones_of(engine.executor)
    run, num_slots = getattr(backbones[stage], what), [len(backbone._slot_paths) for backbone in backbones]
    expected = answered(one, work)
    for failing in range(4):
        numbers = itertools.count()

        def fails(*given: Any, numbers: Iterator[int] = numbers, failing: int = failing) -> Any:
            if next(numbers) == failing:
                raise RuntimeError("planted")
            return run(*given)

        monkeypatch.setattr(backbones[stage], what, fails)
        with pytest.raises(RuntimeError, match="planted"):
            answered(engine, work)
        monkeypatch.setattr(backbones[stage], what, run)
        assert [len(backbone._slot_paths) for backbone in backbones] == num_slots
        assert answered(engine, work) == expected


def test_prompt_when_it_leaves_no_position_for_an_answer_then_is_refused_in_a_sentence():
    engine = staged(1, 2)
    submit(engine, *jobs()[:1])
    most = engine.executor.facts.max_positions
    long = Prompt(np.ones(most, dtype=np.int32), "", None, "test.jsonl line 3")
    with pytest.raises(
        DataError, match=f"test.jsonl line 3: the prompt has {most:,} tokens; the backbone has {most:,}"
    ):
        engine.answer("lora", [long], DRAWN)
