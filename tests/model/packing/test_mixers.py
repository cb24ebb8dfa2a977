"""Mixers with a state in a packed microbatch: neighbours, decoding, and packages that transformers would use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_families import plain_model as plain_model
from tiny_models import random_backbone, random_sample

from weft.adapters.adapter import Adapter
from weft.data.samples import Sample
from weft.engine.inference.generate import Continuation, Passes, Request, generate
from weft.engine.inference.read import read_ahead
from weft.model.backbone import Backbone
from weft.model.packed import SlotSample, pack_samples
from weft.spec import AdapterSpec
from weft.spec.sampling import Decoding

NAMES = ["qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "lfm2", "lfm2_moe", "granitemoehybrid_mamba", "nemotron_h"]
NAMES += ["bamba", "falcon_h1", "mamba2"]


def with_two_adapters(name: str) -> tuple[Backbone, list[Adapter], list[int]]:
    backbone = random_backbone(name)
    backbone.model.generation_config.eos_token_id = None
    adapters = [backbone.new_adapter(AdapterSpec(r=r, init_lora_weights=False), r) for r in (2, 3)]
    return backbone, adapters, [backbone.attach(adapter) for adapter in adapters]


def drawn(*lengths: int) -> list[Sample]:
    rng = np.random.default_rng(7)
    return [random_sample(rng, length) for length in lengths]


@pytest.mark.parametrize("name", NAMES)
def test_adapter_when_its_neighbour_is_nan_then_keeps_its_losses_and_gradients(name):
    """More than a chunk long, shorter than the convolution, and one token: beside a clean neighbour, a NaN, alone."""
    backbone, (mine, other), slots = with_two_adapters(name)
    own, others = drawn(70, 2, 1), drawn(9, 66)

    def run(*, beside: bool) -> tuple[list[float], list[torch.Tensor]]:
        mine.zero_grad()
        ours = [SlotSample(s, slots[0], 0.1) for s in own]
        theirs = [SlotSample(s, slots[1], 0.1) for s in others]
        slot_samples = [theirs[0], *ours[:2], theirs[1], ours[2]] if beside else ours
        losses = backbone.forward_backward(pack_samples(slot_samples, 128, backbone.device), 128)
        kept = [loss for item, loss in zip(slot_samples, losses, strict=True) if item.slot == slots[0]]
        return kept, [group.grad.clone() for group in mine.groups.values()]

    alone, clean = run(beside=False), run(beside=True)
    other.groups["b"].params[3] = float("nan")
    other.changed()
    spoiled = run(beside=True)
    assert alone[0] == clean[0] == spoiled[0]
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(alone[1], clean[1], spoiled[1], strict=True))
    assert not torch.isfinite(other.groups["b"].grad).all(), "the neighbour was not spoiled"


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_when_decoded_with_states_then_those_of_full_passes(name):
    """Several adapters in a batch, prompts of one token and of more than a chunk, one of them read in two passes."""
    backbone, _, slots = with_two_adapters(name)
    prompts = [sample.tokens.tolist() for sample in drawn(1, 70, 3, 64)]
    owners = [slots[0], slots[1], None, slots[0]]
    items = [Continuation(Request(*given), Decoding(6)) for given in zip(prompts, owners, strict=True)]
    passes = Passes(backbone)
    read_ahead(backbone, items[1], 66)
    while going := [item for item in items if not item.is_over]:
        passes.advance(going)
    for item in items:
        tokens = list(item.request.tokens)
        for token in item.tokens:
            whole = Sample(np.array(tokens, np.int32), np.zeros(len(tokens), bool))
            logits = backbone.logits(pack_samples([SlotSample(whole, item.request.slot)], None, backbone.device))
            assert token == int(logits[-1].argmax())
            tokens.append(token)
    assert [item.tokens for item in items] == generate(
        backbone, [Request(*given) for given in zip(prompts, owners, strict=True)], Decoding(6)
    )


PLANTED = """
class Planted:
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *given, **options):
        raise SystemExit("planted code ran")

def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return Planted()
"""
KINDS = ["qwen3_5_text", "lfm2", "granitemoehybrid_mamba"]
RUN = f"""
import torch
from test_mixers import losses_and_gradients, plain_model
torch.set_num_threads(1)
print([losses_and_gradients(name) for name in {KINDS}])
for name in {KINDS}:
    try:
        plain_model(name)(input_ids=torch.tensor([[5, 6, 7]]))
    except SystemExit as planted:
        print(planted)
"""


def losses_and_gradients(name: str) -> tuple[list[float], list[float]]:
    """Losses of one microbatch, and some numbers of its gradients."""
    backbone, adapters, slots = with_two_adapters(name)
    slot_samples = [SlotSample(s, slot, 0.1) for s, slot in zip(drawn(9, 66), slots, strict=True)]
    losses = backbone.forward_backward(pack_samples(slot_samples, 128, backbone.device), 128)
    return losses, [float(group.grad[7]) for adapter in adapters for group in adapter.groups.values()]


TAKEN = ("causal_conv1d_fn", "torch_chunk_gated_delta_rule", "mamba2_chunk_scan", "mamba2_split_conv1d_scan_combined")
"""Functions of transformers that other packages replace."""


@pytest.mark.parametrize("name", KINDS)
def test_functions_that_packages_replace_when_a_microbatch_runs_then_are_never_called(name, monkeypatch):
    def planted(*_: object, **__: object) -> None:
        raise AssertionError("code of another package ran")

    modeling = sys.modules[type(random_backbone(name).model).__module__]
    for taken in TAKEN:
        monkeypatch.setattr(modeling, taken, planted, raising=False)
    losses_and_gradients(name)
    with pytest.raises(AssertionError, match="code of another package ran"):
        plain_model(name)(input_ids=torch.tensor([[5, 6, 7]]))


@pytest.mark.slow
def test_packages_when_transformers_would_take_them_then_no_code_of_theirs_runs(tmp_path):
    """Planted ones end whatever calls them, as transformers itself does here."""
    for package in ("fla", "causal_conv1d", "mamba_ssm"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(PLANTED)
    where = [str(tmp_path), str(Path(__file__).parent), *sys.path]
    code = f"import sys; sys.path[:0] = {where!r}\n{RUN}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    expected = str([losses_and_gradients(name) for name in KINDS])
    assert done.stdout.splitlines() == [expected, *["planted code ran"] * len(KINDS)], done.stderr
