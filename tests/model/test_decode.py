"""Decoding with keys and values in pages; the reference path is the oracle."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_models import VOCABULARY, random_backbone

from weft.adapters.adapter import Adapter
from weft.data.samples import Sample
from weft.engine.inference import read
from weft.engine.inference.generate import Continuation, Passes, Request, complete, generate
from weft.engine.inference.read import next_logits, read_ahead
from weft.engine.inference.sampling import ChosenCopy
from weft.kernels.layers.paged_attention import PAGE, attend_pages
from weft.model.backbone import Backbone
from weft.model.fused import decode, pages
from weft.model.fused.decode import FusedDecoder
from weft.model.fused.pages import KeyPages
from weft.model.packed import SlotSample, pack_samples
from weft.spec import AdapterSpec
from weft.spec.sampling import Decoding

SPECS = {
    "lora": AdapterSpec(r=8, lora_alpha=16),
    "dora": AdapterSpec(method="dora", r=3),
    "prefix": AdapterSpec(method="prefix_tuning", num_virtual_tokens=3),
    "prompt": AdapterSpec(method="prompt_tuning", num_virtual_tokens=5),
    "bottleneck": AdapterSpec(method="bottleneck", bottleneck_size=12),
    "bitfit": AdapterSpec(method="bitfit", target_modules="all-linear"),
    "sparse": AdapterSpec(method="diff_pruning", density=0.05),
    "tokens": AdapterSpec(r=4, trainable_token_indices=(3, 7)),
}
LENGTHS = (1, 5, PAGE - 1, PAGE, PAGE + 3, 2 * PAGE + 7)
GREEDY = Decoding(max_new_tokens=12)


@pytest.fixture(params=[False, True], ids=["waits", "runs ahead"])
def ahead(request, monkeypatch):
    """Whether passes start before the tokens of those before are written, as on a GPU."""
    monkeypatch.setattr(FusedDecoder, "runs_ahead", request.param)


def moved(adapter: Adapter, seed: int) -> Adapter:
    generator = torch.Generator().manual_seed(seed)
    trained = adapter.trained()
    adapter.put({name: x + 0.1 * torch.randn(x.shape, generator=generator) for name, x in trained.items()})
    return adapter


def with_adapters(name: str, kernels: str, methods: tuple[str, ...] = ("lora",)) -> tuple[Backbone, list[int | None]]:
    backbone = random_backbone(name, kernels=kernels)
    adapters = [moved(backbone.new_adapter(SPECS[method], seed), seed) for seed, method in enumerate(methods)]
    return backbone, [None, *(backbone.attach(adapter) for adapter in adapters)]


def requests(slots: list[int | None], lengths: tuple[int, ...] = LENGTHS) -> list[Request]:
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, VOCABULARY, length).tolist() for length in lengths]
    return [Request(tokens, slots[index % len(slots)], index) for index, tokens in enumerate(prompts)]


def decoder_of(backbone: Backbone) -> FusedDecoder:
    decoder = backbone.decoder(None)
    assert decoder is not None
    return decoder


@pytest.mark.usefixtures("ahead")
@pytest.mark.parametrize("name", ["llama_bias", "qwen3", "gemma3_text", "olmo3", "granite"])
def test_generate_when_keys_lie_in_pages_then_writes_what_the_reference_path_writes(name):
    written = []
    for kernels in ("fused", "reference"):
        backbone, slots = with_adapters(name, kernels)
        assert (backbone.decoder(None) is not None) == (kernels == "fused")
        written.append(generate(backbone, requests(slots), GREEDY))
    assert written[0] == written[1]
    assert {len(tokens) for tokens in written[0]} != {0}


@pytest.mark.parametrize("method", SPECS)
def test_next_logits_when_slots_have_other_methods_then_they_are_those_of_the_reference_path(method):
    found = []
    for kernels in ("fused", "reference"):
        backbone, slots = with_adapters("llama", kernels, (method, "lora"))
        going = [Continuation(request, GREEDY) for request in requests(slots)]
        logits = []
        for _ in range(3):
            logits.append(next_logits(backbone, going))
            for index, item in enumerate(going):
                item.write(7 + index, set(), 1000, backbone.leading_rows(item.request.slot))
        found.append(torch.stack(logits))
    finite = found[1].isfinite()
    assert torch.equal(found[0].isfinite(), finite)
    torch.testing.assert_close(found[0][finite], found[1][finite], rtol=1e-4, atol=1e-4)


def test_next_logits_when_sequences_join_leave_and_are_read_in_pieces_then_no_bit_changes():
    """Alone or beside others; its prompt read at once, in pieces, or again after the pages were given up."""
    backbone, slots = with_adapters("llama", "fused")
    own = requests(slots)[-1]

    def steps(disturb: bool) -> torch.Tensor:
        mine, logits = Continuation(own, GREEDY), []
        others = [Continuation(request, GREEDY) for request in requests(slots)[:-1]]
        if disturb:
            read_ahead(backbone, mine, PAGE + 1)
        for step in range(4):
            if disturb and step == 2:
                decoder_of(backbone).forget()
            going = [*others[:step], mine, *others[4:]] if disturb else [mine]
            logits.append(next_logits(backbone, going)[going.index(mine)])
            for item in going:
                item.write(9 + step, set(), 1000, 0)
        return torch.stack(logits)

    torch.testing.assert_close(steps(disturb=True), steps(disturb=False), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("ahead")
def test_pages_when_sequences_end_then_are_free_again_and_memory_stays_flat():
    backbone, slots = with_adapters("llama", "fused")
    decoder = decoder_of(backbone)
    for _ in range(3):
        generate(backbone, requests(slots), GREEDY)
        gc.collect()
        assert decoder.pages.num_used == 0
        held = decoder.pages.keys_and_values(0)[0].shape
    assert decoder.pages.keys_and_values(0)[0].shape == held
    decoder.forget()
    assert decoder.pages.is_empty


def test_next_logits_when_a_neighbour_is_nan_or_pages_held_nan_before_then_changes_no_bit():
    backbone, slots = with_adapters("llama", "fused", ("lora", "lora"))
    own, neighbour = Request([1, 2, 3], slots[1]), Request([4] * 70, slots[2])

    def logits() -> torch.Tensor:
        items = [Continuation(own, GREEDY), Continuation(neighbour, GREEDY)]
        found = []
        for _ in range(3):
            found.append(next_logits(backbone, items)[0])
            for item in items:
                item.write(5, set(), 1000, 0)
        return torch.stack(found)

    expected = logits()
    assert slots[2] is not None
    for entry in backbone.path.table.entries[slots[2]].values():  # type: ignore[attr-defined]
        entry.a_PD.fill_(torch.nan)
    assert torch.equal(logits(), expected)
    decoder_of(backbone).pages._rows[0].fill_(torch.nan)
    assert torch.equal(logits(), expected)


@pytest.mark.usefixtures("ahead")
def test_generate_when_pages_do_not_fit_then_the_last_to_come_wait_and_nothing_else_changes(monkeypatch):
    backbone, slots = with_adapters("llama", "fused")
    wanted = requests(slots, LENGTHS * 2)
    expected = generate(backbone, wanted, GREEDY)
    decoder_of(backbone).forget()
    grow = KeyPages._grow

    def grow_little(self: KeyPages, missing: int) -> None:
        if self._num_pages + missing > 8:
            raise torch.OutOfMemoryError("no room for pages")
        grow(self, missing)

    monkeypatch.setattr(KeyPages, "_grow", grow_little)
    monkeypatch.setattr(pages, "LEAST_PAGES", 8)
    assert generate(backbone, wanted, GREEDY) == expected
    assert decoder_of(backbone).pages.num_used == 0


@pytest.mark.parametrize("num_rows", [64, 3 * PAGE])
def test_decoder_when_it_compares_itself_with_training_then_reads_what_training_reads(num_rows, monkeypatch):
    """On a GPU the bits must be equal. A CPU's library adds up in another order for another number of rows."""
    backbone, _ = with_adapters("llama", "fused")
    compared = []

    def close(read_LD: torch.Tensor, expected_LD: torch.Tensor) -> bool:
        compared.append(len(read_LD))
        torch.testing.assert_close(read_LD, expected_LD, rtol=1e-5, atol=1e-5)
        return True

    monkeypatch.setattr(torch, "equal", close)
    assert decoder_of(backbone)._agrees(num_rows)
    assert compared == [num_rows]
    gc.collect()
    assert decoder_of(backbone).pages.num_used == 0


@pytest.mark.usefixtures("ahead")
@pytest.mark.parametrize("length", [5, PAGE, PAGE + 3])
def test_sequences_when_they_begin_alike_then_are_read_once_and_go_on_apart(length, monkeypatch):
    backbone, slots = with_adapters("llama", "fused", ("prefix",))
    (own,) = requests(slots[1:], (length,))
    drawn = Decoding(max_new_tokens=9, temperature=1.5)
    wanted = [Request(own.tokens, own.slot, seed) for seed in range(4)]
    alone = [generate(backbone, [each], drawn)[0] for each in wanted]
    read, num_prompts = FusedDecoder._start, []

    def counted(self: FusedDecoder, own: list) -> tuple[torch.Tensor, list[int]]:
        num_prompts.append(len(own))
        return read(self, own)

    monkeypatch.setattr(FusedDecoder, "_start", counted)
    assert generate(backbone, wanted, drawn) == alone
    assert num_prompts == [1] and len({tuple(tokens) for tokens in alone}) > 1
    gc.collect()
    assert decoder_of(backbone).pages.num_used == 0


def test_decoder_when_it_adds_up_otherwise_than_training_then_warns_once(monkeypatch, caplog):
    decoder = decoder_of(with_adapters("llama", "fused")[0])
    monkeypatch.setattr(FusedDecoder, "_agrees", lambda self, num_rows: num_rows == 64)
    for num_rows in (64, 128):
        decoder._compare(num_rows)
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith("decoding 128 rows at once adds up otherwise than training on this GPU")
    assert not decoder.has_training_bits


def training_logprobs(backbone: Backbone, request: Request, tokens: list[int]) -> list[float]:
    """Of an answer, by the pass that training makes."""
    every = np.array([*request.tokens, *tokens], dtype=np.int32)
    sample = Sample(every, np.arange(len(every)) >= len(request.tokens)).led_by(backbone.leading_rows(request.slot))
    row_tile = backbone.path.row_tile(256)
    pending = backbone.look(pack_samples([SlotSample(sample, request.slot)], row_tile, backbone.device), row_tile)
    return (-pending._results_2N[0]).tolist()


@pytest.mark.usefixtures("ahead")
def test_complete_when_decoding_adds_up_otherwise_then_log_probabilities_are_those_of_a_training_pass(
    monkeypatch, caplog
):
    backbone, slots = with_adapters("llama", "fused", ("lora", "prefix"))
    monkeypatch.setattr(decode, "attend_pages", lambda *given: attend_pages(*given) * 1.01)
    decoding = Decoding(6, temperature=1.0, logprobs=2)
    wanted = requests(slots, (5, PAGE + 3, 9))
    expected = [
        training_logprobs(backbone, each, tokens)
        for each, tokens in zip(wanted, generate(backbone, wanted, decoding), strict=True)
    ]

    def errors() -> list[float]:
        pairs = zip(complete(backbone, wanted, decoding), expected, strict=True)
        return [
            abs(found.logprob - right) for each, own in pairs for found, right in zip(each.logprobs, own, strict=True)
        ]

    assert max(errors()) > 1e-4, "the stand-in is as good as training's"
    decoder_of(backbone)._compare(64)
    assert "log-probabilities come from a training pass" in caplog.text
    assert max(errors()) < 1e-6
    scored = complete(backbone, wanted, replace(decoding, prompt_logprobs=0))
    assert [len(each.prompt_logprobs) for each in scored] == [len(each.tokens) for each in wanted]
    for each, found in zip(wanted, scored, strict=True):
        own = training_logprobs(backbone, replace(each, tokens=each.tokens[:1]), list(each.tokens[1:]))
        assert [one.logprob for one in found.prompt_logprobs[1:]] == pytest.approx(own, abs=1e-6)
        assert all(len(one.top) == 2 for one in found.logprobs)


def test_complete_when_a_model_without_pages_decodes_on_a_gpu_then_its_answers_are_scored_again(monkeypatch):
    backbone, slots = with_adapters("llama", "reference")
    wanted, decoding = requests(slots, (5, 9)), Decoding(6, logprobs=1, prompt_logprobs=1)
    expected = complete(backbone, wanted, decoding)
    reading = []
    monkeypatch.setattr(read, "is_gpu", lambda device: True)
    monkeypatch.setattr(
        type(backbone.path),
        "read",
        lambda path, *given: reading.append(path) or path.hidden(*given)[given[0].supervised_N],
    )
    for found, before in zip(complete(backbone, wanted, decoding), expected, strict=True):
        assert found.tokens == before.tokens
        pairs = zip(
            [*found.prompt_logprobs[1:], *found.logprobs], [*before.prompt_logprobs[1:], *before.logprobs], strict=True
        )
        for one, other in pairs:
            assert (one.token, one.logprob) == (other.token, pytest.approx(other.logprob, abs=1e-5))
    assert len(reading) == len(wanted)


def test_complete_when_a_prompt_is_scored_then_all_but_its_last_token_are_read_in_one_pass(monkeypatch):
    backbone, slots = with_adapters("llama", "fused")
    (own,) = requests(slots, (5 * PAGE,))
    read_one, num_rows = FusedDecoder._go_on, []

    def counted(self: FusedDecoder, sequences: list, tokens: list, *given: object) -> tuple[torch.Tensor, list[int]]:
        num_rows.append(sum(map(len, tokens)))
        return read_one(self, sequences, tokens, *given)

    monkeypatch.setattr(FusedDecoder, "_go_on", counted)
    (found,) = complete(backbone, [own], Decoding(1, prompt_logprobs=0))
    assert num_rows == [1] and len(found.prompt_logprobs) == 5 * PAGE
    expected = training_logprobs(backbone, replace(own, tokens=own.tokens[:1]), list(own.tokens[1:]))
    assert [one.logprob for one in found.prompt_logprobs[1:]] == pytest.approx(expected, abs=1e-5)


def test_complete_when_there_is_no_memory_to_score_an_answer_then_it_fails_alone(monkeypatch):
    backbone, slots = with_adapters("llama", "fused")
    monkeypatch.setattr(FusedDecoder, "has_training_bits", False)
    monkeypatch.setattr(
        FusedDecoder, "read_as_training", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("no"))
    )
    one, other = (
        Continuation(each, Decoding(2, logprobs=n)) for each, n in zip(requests(slots, (3, 4)), (0, None), strict=True)
    )
    passes = Passes(backbone)
    for _ in range(2):
        passes.advance([one, other])
    assert isinstance(one.error, torch.OutOfMemoryError) and other.error is None and len(other.tokens) == 2


@pytest.mark.usefixtures("ahead")
def test_sequences_when_one_of_another_slot_replaces_them_then_each_keeps_its_own_adapter():
    """One after the other on the same line of the page table, with the same number of rows in every pass."""
    backbone, slots = with_adapters("llama", "fused", ("lora", "lora"))
    wanted = [Request([5, 9, 11], slot) for slot in slots]
    expected = [generate(with_adapters("llama", "fused", ("lora", "lora"))[0], [each], GREEDY) for each in wanted]
    assert [generate(backbone, [each], GREEDY) for each in wanted] == expected
    assert len({tuple(tokens) for (tokens,) in expected}) == len(slots)


@pytest.mark.usefixtures("ahead")
def test_complete_when_memory_ends_halfway_then_answers_and_scores_of_prompts_are_whole(monkeypatch):
    backbone, slots = with_adapters("llama", "fused")
    scored = Decoding(max_new_tokens=6, logprobs=1, prompt_logprobs=1)
    wanted = requests(slots, LENGTHS)
    expected = complete(backbone, wanted, scored)
    run, calls = FusedDecoder._run, []

    def fails(self: FusedDecoder, *given: object) -> torch.Tensor:
        calls.append(1)
        if len(calls) in (3, 9):
            raise torch.OutOfMemoryError("no room for a pass")
        return run(self, *given)

    monkeypatch.setattr(FusedDecoder, "_run", fails)
    found = complete(backbone, wanted, scored)
    assert [each.tokens for each in found] == [each.tokens for each in expected]
    assert [len(each.prompt_logprobs) for each in found] == list(LENGTHS)


def test_passes_when_they_run_ahead_then_write_what_those_write_that_wait(monkeypatch):
    """Answers end by their length, an end token or a stop token, and others join; penalties wait for tokens."""
    backbone, slots = with_adapters("llama", "fused", ("prefix",))
    given = requests(slots)
    kinds = [
        Decoding(1), Decoding(9), Decoding(8, temperature=1.3, logprobs=2), Decoding(7, temperature=0.9, top_k=20),
        Decoding(6, temperature=1.0, frequency_penalty=0.9), Decoding(2, temperature=1.0),
    ]  # fmt: skip
    ends = generate(backbone, given[1:2], GREEDY)[0][3:4]
    monkeypatch.setattr(backbone.model.generation_config, "eos_token_id", ends)
    late: list[bool] = []
    get = ChosenCopy.get

    def written(*, runs_ahead: bool) -> list[Continuation]:
        monkeypatch.setattr(FusedDecoder, "runs_ahead", runs_ahead)
        items = [Continuation(request, kind) for request, kind in zip(given, kinds, strict=True)]
        passes, num_joined = Passes(backbone), 2

        def noted(self: ChosenCopy) -> tuple[list, Sequence]:
            late.append(any(item.num_pending > 1 for item in items))
            return get(self)

        monkeypatch.setattr(ChosenCopy, "get", noted)
        while going := [item for item in items[:num_joined] if not item.is_over]:
            passes.advance(going)
            num_joined = min(len(items), num_joined + 1)
        assert passes.finish() == [] or runs_ahead
        return items

    waited = written(runs_ahead=False)
    assert not any(late)
    ran = written(runs_ahead=True)
    assert any(late)
    assert [(item.tokens, item.reason, item.logprobs) for item in ran] == [
        (item.tokens, item.reason, item.logprobs) for item in waited
    ]
    assert {item.reason for item in ran} == {"stop", "length"} and not any(item.cache for item in ran)
    gc.collect()
    assert decoder_of(backbone).pages.num_used == 0
