"""Adapters on the outputs of blocks: plain autograd agrees, and jobs without one notice nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from adapter_on import adapter_on
from covering import chosen, slow
from tiny_families import plain_model
from tiny_models import assert_same_bits, finish, job_spec, random_backbone, random_data, train
from torch import nn

from weft.adapters.adapter import Adapter
from weft.adapters.method import Attachment, ModuleTensors
from weft.adapters.routing import Routing, Rows, slot_rows
from weft.adapters.sites import BlockOutput
from weft.engine.engine import Engine
from weft.engine.inference.attach import attach_adapter, read_named
from weft.engine.inference.generate import Request, generate
from weft.engine.inference.merge import merge_adapter
from weft.engine.jobs.live_job import LiveJob
from weft.errors import AdapterFileError, ConfigError
from weft.model.backbone import Backbone
from weft.model.load import load_backbone
from weft.model.path import Memory
from weft.spec import AdapterSpec, BackboneSpec
from weft.spec.sampling import Decoding
from weft.store.peft_config import check_servable
from weft.store.peft_files import CARD_FILE, write_adapter

DESCRIBED = ["llama", "mistral", "qwen2", "qwen3", "phi3", "gemma3_text"]
SPEC = {"method": "bottleneck", "bottleneck_size": 5, "bottleneck_activation": "tanh"}
CPU = torch.device("cpu")
D = 12


def plainly_adapted(name: str, tensors: dict[str, ModuleTensors]) -> tuple[Any, dict[str, list[nn.Parameter]]]:
    """The same model by transformers and autograd alone, with trainable copies of an adapter's tensors."""
    model = plain_model(name).requires_grad_(False)
    params = {path: [nn.Parameter(tensor.clone()) for tensor in own] for path, own in tensors.items()}

    def hook_of(
        down_WD: torch.Tensor, bias_W: torch.Tensor, up_DW: torch.Tensor, bias_D: torch.Tensor
    ) -> Callable[..., Any]:
        def changed(y: torch.Tensor) -> torch.Tensor:
            return y + F.linear(torch.tanh(F.linear(y, down_WD, bias_W)), up_DW, bias_D)

        return lambda _, __, out: (changed(out[0]), *out[1:]) if isinstance(out, tuple) else changed(out)

    for path, own in params.items():
        model.get_submodule(path).register_forward_hook(hook_of(*own))
    return model, params


def train_plainly(name: str, job: LiveJob, start: dict[str, ModuleTensors]) -> tuple[dict[str, Any], list[float]]:
    """The job alone with torch.optim, sample by sample without any padding."""
    model, params = plainly_adapted(name, start)
    trained = [param for own in params.values() for param in own]
    optimizer = torch.optim.AdamW(trained, lr=job.spec.learning_rate, weight_decay=job.spec.weight_decay)
    losses = []
    for step in range(job.progress.order.num_steps):
        samples = [job.data.train.samples[i] for i in job.progress.order.batch(step)]
        total = torch.zeros(())
        for sample in samples:
            tokens = torch.from_numpy(sample.tokens.astype("int64"))
            targets = torch.where(torch.from_numpy(sample.supervised.copy()), tokens, -100)[1:]
            total = total + F.cross_entropy(model(tokens[None]).logits[0, :-1], targets, reduction="sum")
        loss = total / sum(int(sample.supervised[1:].sum()) for sample in samples)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(trained, job.spec.max_grad_norm)
        optimizer.step()
        losses.append(float(loss.detach()))
    return params, losses


@pytest.mark.parametrize("name", chosen(DESCRIBED, 0, 5))
def test_job_when_trained_beside_others_then_equals_plain_autograd(name):
    """Twenty steps in fp32, in every family that has a description."""
    backbone = random_backbone(name)
    engine = Engine(backbone, capacity=40)
    spec = job_spec("me", adapter=SPEC, max_steps=20, lr_scheduler_type="constant", weight_decay=0.05, seed=2)
    engine.submit(spec, random_data(2))
    engine.submit(job_spec("lora", seed=4), random_data(4))
    start = engine.adapter_of("me")
    assert list(start) == [f"model.layers.{i}.{block}" for i in range(2) for block in ("self_attn", "mlp")]
    mine = finish(engine)["me"]
    params, losses = train_plainly(name, engine.jobs["me"], start)
    assert len(losses) == 20 and mine.losses == pytest.approx(losses, rel=1e-5)
    for path, tensors in mine.adapter.items():
        for ours, theirs, begun in zip(tensors, params[path], start[path], strict=True):
            torch.testing.assert_close(ours, theirs.detach(), rtol=1e-5, atol=1e-5)
            assert not torch.equal(ours, begun), "it has not learned"


def test_output_when_neighbours_are_nan_then_own_rows_and_gradients_are_those_alone():
    """The block's output needs no gradient here, and the adapter's has one all the same."""
    torch.manual_seed(0)
    block, routing = nn.Linear(4, D), Routing(slots=(slot_rows(-1, [Rows(2, 5), Rows(5, 8)], None, 10),))
    block.requires_grad_(False)
    site, path = BlockOutput(block, D, routing), "layers.0.mlp"
    adapter = adapter_on({path: site}, AdapterSpec(**SPEC))
    adapter.groups["up"].params.normal_()
    site.put(-1, adapter.modules[path])
    x, dy_TD = torch.randn(10, 4), torch.randn(10, D)
    x[0], dy_TD[9] = torch.nan, torch.nan
    y_TD = block(x)
    y_TD.backward(dy_TD)
    down_WD, bias_W, up_DW, bias_D = theirs = [tensor.requires_grad_() for tensor in adapter.tensors()[path]]
    site.free(-1)
    plain_TD = block(x)
    assert not block._forward_hooks and y_TD[8:].equal(plain_TD[8:])
    own_LD = plain_TD[2:8]
    expected_LD = own_LD + F.linear(torch.tanh(F.linear(own_LD, down_WD, bias_W)), up_DW, bias_D)
    expected_LD.backward(dy_TD[2:8])
    torch.testing.assert_close(y_TD[2:8].detach(), expected_LD.detach())
    for group, tensor in zip(adapter.groups.values(), theirs, strict=True):
        torch.testing.assert_close(group.grad, tensor.grad.flatten(), rtol=1e-5, atol=1e-5)


def test_blocks_when_no_such_adapter_is_attached_then_they_have_no_hooks():
    backbone = random_backbone()
    hooks = lambda: sum(len(module._forward_hooks) for module in backbone.model.modules())  # noqa: E731
    lora = backbone.attach(backbone.new_adapter(AdapterSpec(r=2), 0))
    assert hooks() == 0
    slots = [backbone.attach(backbone.new_adapter(AdapterSpec(**SPEC), seed)) for seed in (0, 1)]
    assert hooks() == len(backbone.sites.of(Attachment.BLOCK_OUTPUT)) == 4
    for slot in (slots[0], lora):
        backbone.detach(slot)
    assert hooks() == 4
    backbone.detach(slots[1])
    assert hooks() == 0 and not any(site.slots for site in backbone.sites.of(Attachment.BLOCK_OUTPUT).values())


@pytest.mark.parametrize("memory", [Memory("full"), Memory("mlp", offload=True)])
def test_job_when_neighbours_recompute_or_offload_then_all_have_the_bits_they_have_alone(memory):
    """On the fused path, which such a job does not take."""
    backbone = random_backbone(kernels="fused", memory=memory)
    me = (job_spec("me", adapter=SPEC, seed=3), random_data(3))
    lora = (job_spec("lora", seed=5), random_data(5))
    together = train(backbone, [me, lora])
    for job in (me, lora):
        assert_same_bits(together[job[0].name], train(backbone, [job])[job[0].name])


@pytest.mark.parametrize("quantize", [slow("int8"), "nf4"])
def test_job_when_the_base_is_quantised_then_learns_and_has_the_bits_it_has_alone(quantize):
    backbone = load_backbone(BackboneSpec("tiny", device="cpu", quantize=quantize))
    me = (job_spec("me", adapter=SPEC, seed=3, max_steps=4), random_data(3))
    alone = train(backbone, [me])["me"]
    assert alone.state == "succeeded" and alone.losses[-1] < alone.losses[0]
    assert_same_bits(train(backbone, [me, (job_spec("lora", seed=5, max_steps=3), random_data(5))])["me"], alone)


@pytest.mark.parametrize("name", [slow("llama"), "phi3"])
def test_generate_when_the_adapter_is_on_blocks_then_writes_what_transformers_writes_with_it(name):
    """With a cache of keys and values, beside a prompt without an adapter."""
    backbone = random_backbone(name)
    adapter = changed(backbone)
    prompt, bare = [5, 9, 14, 7], [33, 40]
    requests = [Request(bare), Request(prompt, backbone.attach(adapter))]
    backbone.model.generation_config.eos_token_id = None
    written = generate(backbone, requests, Decoding(max_new_tokens=10))
    models = [plain_model(name), plainly_adapted(name, adapter.tensors())[0]]
    for tokens, given, model in zip(written, (bare, prompt), models, strict=True):
        model.generation_config.eos_token_id = None
        ids = torch.tensor([given])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=10, do_sample=False)
        assert tokens == out[0, len(given) :].tolist()
    assert written[1] != generate(backbone, [Request(prompt)], Decoding(max_new_tokens=10))[0]


def changed(backbone: Backbone) -> Adapter:
    """An adapter with an effect."""
    adapter = backbone.new_adapter(AdapterSpec(**SPEC), 1)
    generator = torch.Generator().manual_seed(5)
    adapter.put({name: x + 0.3 * torch.randn(x.shape, generator=generator) for name, x in adapter.flat().items()})
    return adapter


def written(backbone: Backbone, folder: Path) -> Path:
    adapter = changed(backbone)
    names = ["mlp", "self_attn"]
    write_adapter(folder, adapter.spec, adapter.tensors(), base_model=backbone.name, target_names=names)
    return folder


def test_files_when_peft_has_no_such_method_then_nothing_sends_people_there(tmp_path):
    backbone = random_backbone()
    path = written(backbone, tmp_path / "a")
    card = (path / CARD_FILE).read_text()
    assert "peft" not in card.lower() and "weft chat" in card
    stored = read_named(str(path))
    for server, sentence in (
        ("peft", "PEFT has no bottleneck; only Weft runs this adapter."),
        ("vllm", "vLLM takes LoRA adapters only, and this bottleneck cannot be merged into its base."),
    ):
        (remark,) = check_servable(stored.spec, stored.tensors, server)
        assert remark.refused and remark.text == sentence
    with pytest.raises(AdapterFileError, match="changes no weights, so there are none to merge it into"):
        merge_adapter(stored, BackboneSpec("missing"), tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_attach_when_the_model_has_other_blocks_then_refused_in_one_sentence(tmp_path):
    stored = read_named(str(written(random_backbone(), tmp_path / "a")))
    with pytest.raises(AdapterFileError, match=r"model.layers.1.\w+ is not a block of base_model llama"):
        attach_adapter(random_backbone(num_hidden_layers=1), stored)
    with pytest.raises(AdapterFileError, match="is for a module of 32 x 32; in base_model llama it is 40 x 40"):
        attach_adapter(random_backbone(hidden_size=40), stored)


@pytest.mark.parametrize(
    ("name", "targets", "sentence"),
    [
        ("llama", ["mpl"], "the backbone has no block 'mpl'; it has mlp, self_attn."),
        ("llama", ["q_proj"], "the backbone has no block 'q_proj'; it has mlp, self_attn."),
        ("llama", "all-linear", "got all-linear; bottleneck adapters sit on blocks, for which it is all-blocks."),
        ("gpt_neox", "auto", "the backbone has no block to adapt; llama, mistral"),
    ],
)
def test_targets_when_they_name_no_block_then_one_sentence_lists_the_blocks(name, targets, sentence):
    backbone = random_backbone(name)
    with pytest.raises(ConfigError, match=sentence):
        backbone.check_adapter(AdapterSpec(**SPEC, target_modules=targets))


def test_targets_when_layers_and_blocks_are_chosen_then_only_those_are_adapted():
    backbone = random_backbone()
    chosen = backbone.new_adapter(AdapterSpec(**SPEC, target_modules=["mlp"], layers_to_transform=[1]), 0)
    assert list(chosen.modules) == ["model.layers.1.mlp"]
    with pytest.raises(ConfigError, match="got all-blocks; lora adapters sit on linear modules, for which it is"):
        backbone.check_adapter(AdapterSpec(target_modules="all-blocks"))
