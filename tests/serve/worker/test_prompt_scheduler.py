"""A worker's turns: what is trained and what is written share the backbone, pass by pass."""

from __future__ import annotations

import gc
from dataclasses import replace
from functools import partial

import pytest
import torch
from tiny_models import random_backbone
from worker_bench import PATIENCE_S

from weft.engine.inference import adapter_slots
from weft.engine.inference.adapter_slots import host_adapter
from weft.engine.inference.attach import StoredAdapter, attach_adapter
from weft.engine.inference.generate import Passes, Request, complete, generate
from weft.errors import ConfigError, JobError
from weft.model.fused.decode import FusedDecoder
from weft.serve.errors import Busy
from weft.serve.settings import Settings, WorkerOptions
from weft.serve.worker import prompt_replica
from weft.serve.worker import prompt_scheduler as scheduler_module
from weft.serve.worker.prompt_scheduler import AnswerEnd, PromptRequest, PromptScheduler
from weft.spec import AdapterSpec
from weft.spec.sampling import Decoding


class Clock:
    """Time that passes only when a pass of the backbone takes it."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def backbone():
    made = random_backbone("llama")
    made.model.generation_config.eos_token_id = None
    return made


def written(request):
    tokens = []
    while not isinstance(got := request.answer.get(timeout=PATIENCE_S), AnswerEnd):
        tokens.append(got)
    return tokens, got.reason


def test_turn_when_something_trains_then_takes_its_share_and_at_least_one_pass(backbone, monkeypatch):
    clock, advance = Clock(), Passes.advance
    passes = []

    def slow(self, going):
        clock.now += 2**-7  # times here are sums of powers of two, so that none is rounded
        passes.append(len(going))
        return advance(self, going)

    monkeypatch.setattr(Passes, "advance", slow)
    monkeypatch.setattr(scheduler_module, "time", clock)
    # What was started of the training before the turn takes longer than the turn, and is none of it.
    monkeypatch.setattr(backbone, "wait", lambda: setattr(clock, "now", clock.now + 5.0))
    scheduler = PromptScheduler(backbone, 64)
    assert not scheduler.take_turn(0.1)
    assert clock.now == 0.0, "without prompts a turn takes no time"
    scheduler.submit(PromptRequest([5, 6], None, Decoding(50)))
    scheduler.take_turn(0.001)
    assert passes == [1], "one pass, however short training was"
    scheduler.submit(PromptRequest([5], None, Decoding(50)))
    scheduler.take_turn(20 * 2**-7)
    assert passes == [1, 2, 2, 2, 2, 2], "a quarter of that"


def test_turn_when_the_operator_sets_a_share_then_prompts_get_that(backbone, monkeypatch):
    clock, advance = Clock(), Passes.advance
    passes = []

    def slow(self, going):
        clock.now += 2**-7
        passes.append(len(going))
        return advance(self, going)

    monkeypatch.setattr(Passes, "advance", slow)
    monkeypatch.setattr(scheduler_module, "time", clock)
    scheduler = PromptScheduler(backbone, 64, share=0.5)
    scheduler.submit(PromptRequest([5, 6], None, Decoding(50)))
    scheduler.take_turn(20 * 2**-7)
    assert passes == [1] * 10


def test_turn_when_a_request_is_longer_than_the_capacity_then_it_is_read_in_parts(backbone):
    tokens = [3 + i % 40 for i in range(21)]
    (whole,) = generate(backbone, [Request(tokens)], Decoding(6))
    scheduler = PromptScheduler(backbone, 8)
    short, long = PromptRequest([5, 9], None, Decoding(6)), PromptRequest(tokens, None, Decoding(6))
    for request in (long, short):
        scheduler.submit(request)
    while scheduler.take_turn(None):
        pass
    assert written(long) == (whole, "length")
    assert written(short) == (generate(backbone, [Request([5, 9])], Decoding(6))[0], "length")


def stored(backbone, name, seed):
    spec = AdapterSpec(r=2, init_lora_weights=False)
    adapter = backbone.new_adapter(spec, seed)
    return StoredAdapter(name, None, spec, dict(adapter.tensors()), None)


def test_turn_when_there_are_a_hundred_adapters_and_room_for_ten_then_each_answers_as_if_alone(backbone, monkeypatch):
    """Round-robin is the worst order for the least recently used: every adapter comes back from host memory."""
    files = [stored(backbone, f"v{i}", i) for i in range(100)]
    adapters = [host_adapter(backbone, file) for file in files]
    monkeypatch.setattr(adapter_slots, "LEAST_SLOTS", 2)
    scheduler = PromptScheduler(backbone, 64)
    scheduler._slots.most_bytes = 10 * adapters[0].num_bytes
    before = slots(backbone)
    questions = [PromptRequest([7, 8, 9], adapter, Decoding(3)) for _ in range(2) for adapter in adapters]
    for request in questions:
        scheduler.submit(request)
    most = 0
    while scheduler.take_turn(None):
        most = max(most, len(slots(backbone) - before))
    assert most == 10
    answers = [written(request)[0] for request in questions]
    for index, file in enumerate(files):
        slot = attach_adapter(backbone, replace(file, path="-"))
        expected = generate(backbone, [Request([7, 8, 9], slot)], Decoding(3))[0]
        backbone.detach(slot)
        assert answers[index] == answers[index + 100] == expected
    assert len({tuple(answer) for answer in answers}) > 10, "the adapters have no effect"


def test_turn_when_there_is_no_memory_for_an_adapter_then_waits_for_another_or_gets_the_error(backbone, monkeypatch):
    first, second = (host_adapter(backbone, stored(backbone, name, 1)) for name in ("one", "two"))
    attach, refused = backbone.attach, []

    def full(adapter):
        if len(slots(backbone)) - len(before) >= most:
            refused.append(adapter)
            raise torch.OutOfMemoryError
        return attach(adapter)

    before = slots(backbone)
    monkeypatch.setattr(backbone, "attach", full)
    scheduler = PromptScheduler(backbone, 64)
    most = 1
    questions = [PromptRequest([5, 6], adapter, Decoding(3)) for adapter in (first, second)]
    for request in questions:
        scheduler.submit(request)
    while scheduler.take_turn(None):
        pass
    assert refused and [len(written(request)[0]) for request in questions] == [3, 3]
    most = 0
    request = PromptRequest([5, 6], first, Decoding(3))
    scheduler.submit(request)
    scheduler.take_turn(None)
    assert isinstance(request.answer.get(timeout=PATIENCE_S), Busy)


def slots(backbone):
    return {slot for linear in backbone.linears.values() for slot in linear.slots}


def test_turn_when_the_client_is_gone_then_nothing_more_is_written(backbone):
    scheduler = PromptScheduler(backbone, 64)
    request = PromptRequest([5, 6], None, Decoding(50))
    scheduler.submit(request)
    scheduler.take_turn(0.0)
    request.is_cancelled = True
    assert not scheduler.take_turn(0.0)
    assert scheduler.num_waiting == 0


def test_turn_when_passes_run_ahead_then_answers_are_whole_and_cancelled_ones_harm_none(monkeypatch):
    backbone = random_backbone("llama", kernels="fused")
    backbone.model.generation_config.eos_token_id = None
    prompts = [[5, 6], [7, 8, 9], [11], [12, 13]]
    expected = [generate(backbone, [Request(tokens)], Decoding(9))[0] for tokens in prompts]
    monkeypatch.setattr(FusedDecoder, "runs_ahead", True)
    scheduler = PromptScheduler(backbone, 64)
    requests = [PromptRequest(tokens, None, Decoding(9)) for tokens in prompts]
    for request in requests[:3]:
        scheduler.submit(request)
    scheduler.take_turn(0.0)
    scheduler._pass()
    assert any(item.num_pending for item in scheduler._active.values())
    requests[1].is_cancelled = True
    scheduler.submit(requests[3])
    while scheduler.take_turn(None):
        pass
    assert [written(request)[0] for request in requests[:1] + requests[2:]] == expected[:1] + expected[2:]
    assert scheduler.num_waiting == 0


def test_turn_when_clients_go_away_then_their_pages_are_free_at_once():
    fused = random_backbone("llama")
    fused.model.generation_config.eos_token_id = None
    fused.use_kernels("fused")
    decoder = fused.decoder(None)
    assert decoder is not None
    scheduler = PromptScheduler(fused, 64)
    adapter = host_adapter(fused, stored(fused, "a", 1))
    requests = [PromptRequest([5, 6, 7 + i], [None, adapter][i % 2], Decoding(50)) for i in range(6)]
    for request in requests:
        scheduler.submit(request)
    scheduler.take_turn(0.0)
    assert decoder.pages.num_used == len(requests)
    for request in requests[1:]:
        request.is_cancelled = True
    scheduler.take_turn(0.0)
    gc.collect()
    assert decoder.pages.num_used == 1
    requests[0].is_cancelled = True
    scheduler.take_turn(0.0)
    gc.collect()
    assert decoder.pages.num_used == 0


def test_turn_when_decoding_adds_up_otherwise_than_training_then_scored_tokens_come_at_the_end(monkeypatch):
    fused = random_backbone("llama")
    fused.model.generation_config.eos_token_id = None
    fused.use_kernels("fused")
    wanted = Decoding(6, temperature=1.0, logprobs=1, prompt_logprobs=0)
    (expected,) = complete(fused, [Request([5, 6, 7])], wanted)
    monkeypatch.setattr(FusedDecoder, "has_training_bits", False)
    scheduler = PromptScheduler(fused, 64)
    scored, plain = PromptRequest([5, 6, 7], None, wanted), PromptRequest([5, 6, 7], None, Decoding(6))
    monkeypatch.setattr(prompt_replica, "text_of", lambda *_: lambda tokens: "".join(map(chr, tokens)))
    stopped = PromptRequest([5, 6, 7], None, replace(wanted, stop=(chr(expected.tokens[2]),)))
    for request in (scored, plain, stopped):
        scheduler.submit(request)
    while plain.answer.qsize() < 4:
        scheduler.take_turn(0.0)
    assert scored.answer.qsize() == 0
    while scheduler.take_turn(None):
        pass
    (prompt, *tokens), reason = written(scored)
    assert ([each.token for each in tokens], reason) == (expected.tokens, "length")
    values = [each.logprob for each in [*prompt.logprobs[1:], *tokens]]
    assert values == pytest.approx([each.logprob for each in [*expected.prompt_logprobs[1:], *expected.logprobs]])
    (_, *tokens), reason = written(stopped)
    assert ([each.token for each in tokens], reason) == (expected.tokens[:3], "stop")


def test_turn_when_a_pass_fails_then_its_prompts_get_the_error_and_later_ones_are_answered(backbone, monkeypatch):
    scheduler = PromptScheduler(backbone, 64)
    first, second = PromptRequest([5, 6], None, Decoding(2)), PromptRequest([5, 6], None, Decoding(2))
    scheduler.submit(first)
    with monkeypatch.context() as patch:
        patch.setattr(Passes, "advance", lambda *_: 1 / 0)
        scheduler.take_turn(0.0)
    assert isinstance(first.answer.get(timeout=PATIENCE_S), ZeroDivisionError)
    scheduler.submit(second)
    while scheduler.take_turn(None):
        pass
    assert len(written(second)[0]) == 2


def test_turn_when_one_prompt_cannot_be_read_then_only_it_fails_and_the_others_are_written_as_if_alone(
    backbone, monkeypatch
):
    tokens = [3 + i % 40 for i in range(21)]
    expected = [generate(backbone, [Request(t)], Decoding(6))[0] for t in ([5, 9], tokens)]
    advance = Passes.advance

    def poisoned(self, going):
        if any(item.request.tokens == [7, 7] and len(item.tokens) == 2 for item in going):
            raise ValueError("poison")
        return advance(self, going)

    monkeypatch.setattr(Passes, "advance", poisoned)
    scheduler = PromptScheduler(backbone, 12)
    poison, short, long = (PromptRequest(t, None, Decoding(6)) for t in ([7, 7], [5, 9], tokens))
    for request in (poison, short, long):
        scheduler.submit(request)
    while scheduler.take_turn(None):
        pass
    got = [poison.answer.get(timeout=PATIENCE_S) for _ in range(3)]
    assert isinstance(got[2], ValueError)
    assert [written(short)[0], written(long)[0]] == expected
    assert scheduler.num_waiting == 0


def test_turn_when_the_logits_of_one_prompt_are_not_finite_then_the_others_are_answered(backbone):
    broken = host_adapter(backbone, stored(backbone, "nan", 1))
    for tensor in broken.flat.values():
        tensor.fill_(float("nan"))
    scheduler = PromptScheduler(backbone, 64)
    poison = PromptRequest([5, 6], broken, Decoding(4, temperature=1.0))
    good = [PromptRequest([5, 6 + i], None, Decoding(4, temperature=1.0)) for i in range(3)]
    for request in (poison, *good):
        scheduler.submit(request)
    while scheduler.take_turn(None):
        pass
    assert isinstance(poison.answer.get(timeout=PATIENCE_S), JobError)
    assert [len(written(request)[0]) for request in good] == [4, 4, 4]


@pytest.mark.parametrize("top_p", [1e-300, 1e-46, 1e-9])
def test_turn_when_top_p_is_tiny_then_the_likeliest_token_is_taken(backbone, top_p):
    scheduler = PromptScheduler(backbone, 64)
    request = PromptRequest([5, 6], None, Decoding(4, temperature=1.0, top_p=top_p))
    scheduler.submit(request)
    while scheduler.take_turn(None):
        pass
    assert written(request)[0] == generate(backbone, [Request([5, 6])], Decoding(4))[0]


def test_turn_when_an_adapter_cannot_be_attached_then_only_its_own_prompt_gets_the_error(backbone, monkeypatch):
    """Whatever one prompt raises, the others are answered and the worker lives."""
    scheduler = PromptScheduler(backbone, 64)
    broken = PromptRequest([5, 6], host_adapter(backbone, stored(backbone, "a", 1)), Decoding(2))
    good = PromptRequest([5, 6], None, Decoding(2))
    monkeypatch.setattr(backbone, "attach", lambda *_: 1 / 0)
    scheduler.submit(broken)
    scheduler.submit(good)
    while scheduler.take_turn(None):
        pass
    assert isinstance(broken.answer.get(timeout=PATIENCE_S), ZeroDivisionError)
    assert len(written(good)[0]) == 2


def test_turn_when_the_driver_has_no_memory_then_its_prompts_may_be_tried_again(backbone, monkeypatch):
    def end(*_: object) -> None:
        raise RuntimeError("CUDA error: out of memory")

    scheduler = PromptScheduler(backbone, 64)
    request = PromptRequest([5, 6], None, Decoding(2))
    scheduler.submit(request)
    monkeypatch.setattr(Passes, "advance", end)
    scheduler.take_turn(0.0)
    assert isinstance(request.answer.get(timeout=PATIENCE_S), Busy)


def test_scheduler_when_closed_then_waiting_prompts_get_the_error(backbone):
    scheduler = PromptScheduler(backbone, 64)
    active, waiting = PromptRequest([5], None, Decoding(9)), PromptRequest([6], None, Decoding(9))
    scheduler.submit(active)
    scheduler.take_turn(0.0)
    scheduler.submit(waiting)
    scheduler.close()
    active.answer.get()
    assert isinstance(active.answer.get(timeout=PATIENCE_S), Busy)
    assert isinstance(waiting.answer.get(timeout=PATIENCE_S), Busy)
    with pytest.raises(Busy):
        scheduler.submit(PromptRequest([5], None, Decoding(1)))


def test_scheduler_when_too_many_wait_then_refuses_more(backbone):
    scheduler = PromptScheduler(backbone, 64)
    for _ in range(scheduler_module.MAX_WAITING):
        scheduler.submit(PromptRequest([5], None, Decoding(1)))
    with pytest.raises(Busy):
        scheduler.submit(PromptRequest([5], None, Decoding(1)))


@pytest.mark.parametrize("share", [0.0, -1.0, float("nan"), float("inf")])
def test_sampling_share_when_it_is_no_share_then_the_service_does_not_start(share, tmp_path):
    for made in (partial(Settings, tmp_path), partial(WorkerOptions, tmp_path)):
        with pytest.raises(ConfigError, match="--sampling-share: got"):
            made(sampling_share=share)
