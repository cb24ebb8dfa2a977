"""Decoding on a GPU: adapters together on one backbone, beside transformers' `generate` in the same run.

    python -m benchmarks decode [--layers 32] [--quick] [--json FILE]

Llama-3.1-8B's layers with random weights in bfloat16; prompts of 128 tokens, 128 new ones each, greedy. Adapters have
rank 8, 16, 32 or 64 on all linears. Log-probabilities are compared to the bit with those of a training pass over prompt
and answer, sequences in another order and packed otherwise.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from benchmarks.clock import release
from weft.adapters.frozen import quantise
from weft.data.samples import Sample
from weft.engine.inference.generate import Continuation, Request, complete, end_tokens
from weft.engine.inference.read import next_logits
from weft.engine.inference.sampling import Sampler
from weft.kernels.layers.cross_entropy import cross_entropy_rows
from weft.model.backbone import Backbone
from weft.model.packed import SlotSample, pack_samples
from weft.spec import AdapterSpec
from weft.spec.sampling import Decoding

SIZES: dict[str, Any] = {
    "vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336, "num_attention_heads": 32,
    "num_key_value_heads": 8, "max_position_embeddings": 131_072, "rope_theta": 500_000.0,
    "tie_word_embeddings": False, "pad_token_id": 0,
}  # fmt: skip
RANKS = (8, 16, 32, 64)
PROMPT, NEW = 128, 128
LONG = 4096
CAPACITY = 8192


class NoTokenizer:
    """Stands in for a tokenizer: nothing here is text."""

    eos_token_id = None

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        return ""


def model(layers: int, device: torch.device) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    with device:
        made = LlamaForCausalLM._from_config(LlamaConfig(**SIZES, num_hidden_layers=layers), dtype=torch.bfloat16)
    made.generation_config.eos_token_id = None
    return made.eval()


def with_adapters(plain: Any, number: int, kind: str = "none") -> tuple[Backbone, list[int]]:
    """A backbone whose weights are stored as `kind`, and the slots of its adapters."""
    backbone = Backbone(plain, NoTokenizer(), "decode")  # type: ignore[arg-type]
    for linear in backbone.linears.values() if kind != "none" else ():
        linear.frozen = quantise(linear.frozen.dense(), kind)
    backbone.use_kernels("fused")
    slots = []
    for index in range(number):
        adapter = backbone.new_adapter(AdapterSpec(r=RANKS[index % len(RANKS)], target_modules="all-linear"), index)
        generator = torch.Generator(backbone.device).manual_seed(index)
        params = adapter.groups["b"].params
        params.copy_(torch.randn(params.shape, generator=generator, device=params.device) * 0.01)
        adapter.changed()
        slots.append(backbone.attach(adapter))
    return backbone, slots


def requests(number: int, slots: Sequence[int | None], length: int = PROMPT) -> list[Request]:
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, SIZES["vocab_size"], (number, length))
    return [Request(tokens.tolist(), slots[index % len(slots)], index) for index, tokens in enumerate(prompts)]


def tokens_per_s(backbone: Backbone, wanted: Sequence[Request], new: int) -> dict[str, float]:
    """Of whole calls, after one that captures what it needs; and milliseconds of a step once prompts are read."""
    complete(backbone, wanted, Decoding(max_new_tokens=new))
    torch.cuda.synchronize()
    begun_s = time.perf_counter()
    complete(backbone, wanted, Decoding(max_new_tokens=1))
    first_s = time.perf_counter() - begun_s
    begun_s = time.perf_counter()
    complete(backbone, wanted, Decoding(max_new_tokens=new))
    seconds = time.perf_counter() - begun_s
    step_ms = 1e3 * (seconds - first_s) / (new - 1)
    per_s = {"tokens_per_s": len(wanted) * new / seconds, "tokens_per_s_after_prompts": 1e3 * len(wanted) / step_ms}
    return {**per_s, "step_ms": step_ms, "prompts_s": first_s}


def differing_logprobs(backbone: Backbone, wanted: Sequence[Request], new: int) -> dict[str, int]:
    """How many log-probabilities of drawn tokens are not those of a training pass, to the bit."""
    decoding, ends, sampler = Decoding(max_new_tokens=new, temperature=1.0), end_tokens(backbone), Sampler()
    going = [Continuation(request, decoding) for request in wanted]
    decoded: list[torch.Tensor] = []
    for _ in range(new):
        logits = next_logits(backbone, going)
        chosen = sampler.choose(logits, going).tokens_R
        decoded.append(cross_entropy_rows(logits.to(backbone.dtype), chosen, None)[0])
        for item, token in zip(going, chosen.tolist(), strict=True):
            item.write(token, ends, backbone.max_positions, 0)
    decoded_NL = torch.stack(decoded, dim=1)
    order = np.random.default_rng(1).permutation(len(going))
    row_tile, differing = backbone.path.row_tile(CAPACITY), 0
    for start in range(0, len(order), CAPACITY // (PROMPT + new)):
        mine = order[start : start + CAPACITY // (PROMPT + new)]
        samples = []
        for index in mine:
            tokens = np.array([*going[index].request.tokens, *going[index].tokens], dtype=np.int32)
            supervised = np.arange(len(tokens)) >= len(tokens) - new
            samples.append(SlotSample(Sample(tokens, supervised), going[index].request.slot))
        pending = backbone.look(pack_samples(samples, row_tile, backbone.device), row_tile)
        trained_NL = pending._results_2N[0].view(len(mine), new)
        differing += int((trained_NL != decoded_NL[torch.from_numpy(mine).to(trained_NL.device)]).sum())
    return {"log_probabilities": decoded_NL.numel(), "differing": differing}


def first_token(backbone: Backbone, slot: int) -> dict[str, float]:
    """Milliseconds to the first token of a long prompt, and of a training pass forward over it."""
    (request,) = requests(1, [slot], LONG)
    sample = Sample(np.array(request.tokens, dtype=np.int32), np.arange(LONG) == LONG - 1)
    row_tile = backbone.path.row_tile(LONG)
    batch = pack_samples([SlotSample(sample, slot)], row_tile, backbone.device)

    def forward() -> None:
        backbone.look(batch, row_tile).wait()

    def answer() -> None:
        complete(backbone, [request], Decoding(max_new_tokens=1))

    found: dict[str, list[float]] = {"forward_ms": [], "first_token_ms": []}
    for _ in range(6):
        for name, run in (("forward_ms", forward), ("first_token_ms", answer)):
            begun_s = time.perf_counter()
            run()
            found[name].append(1e3 * (time.perf_counter() - begun_s))
    return {name: min(times[1:]) for name, times in found.items()}


def alone_and_beside(backbone: Backbone, wanted: Sequence[Request]) -> bool:
    """Whether a sequence's tokens alone are those beside all others, greedy and drawn."""
    equal = True
    for decoding in (Decoding(max_new_tokens=24), Decoding(max_new_tokens=24, temperature=1.0, top_p=0.9)):
        beside = complete(backbone, wanted, decoding)
        for index in (0, len(wanted) // 2):
            equal &= complete(backbone, [wanted[index]], decoding)[0].tokens == beside[index].tokens
    return equal


def by_transformers(plain: Any, number: int, new: int) -> dict[str, float]:
    ids = torch.randint(0, SIZES["vocab_size"], (number, PROMPT), device="cuda")
    settings = {"do_sample": False, "attention_mask": torch.ones_like(ids)}
    plain.generate(ids, max_new_tokens=2, min_new_tokens=2, **settings)
    torch.cuda.synchronize()
    begun_s = time.perf_counter()
    plain.generate(ids, max_new_tokens=new, min_new_tokens=new, **settings)
    torch.cuda.synchronize()
    return {"tokens_per_s": number * new / (time.perf_counter() - begun_s)}


def decode(
    layers: Annotated[int, typer.Option(help="Layers of the model; 32 are the whole one.")] = 32,
    quick: Annotated[bool, typer.Option(help="Fewer new tokens for each figure.")] = False,
    file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
) -> None:
    """Tokens per second, first tokens, and equality with training."""
    device, new = torch.device("cuda", 0), 32 if quick else NEW
    plain = model(layers, device)
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(device), "layers": layers, "new_tokens": new}
    found["transformers64"] = by_transformers(plain, 64, 16 if quick else 32)
    release(device)
    backbone, slots = with_adapters(plain, 32)
    eight = slots[:8]
    found["decode1"] = tokens_per_s(backbone, requests(1, eight), new)
    found["decode64"] = tokens_per_s(backbone, requests(64, eight), new)
    found["bare64"] = tokens_per_s(backbone, requests(64, [None]), new)
    found["decode512"] = tokens_per_s(backbone, requests(512, slots), new)
    found["first_token"] = first_token(backbone, slots[0])
    found["training_bits"] = differing_logprobs(backbone, requests(256 if quick else 800, eight), new)
    found["alone_equals_beside_255"] = alone_and_beside(backbone, requests(256, eight))
    decoder = backbone.decoder(None)
    found["decoder_agrees_with_training"] = decoder is not None and decoder.has_training_bits
    found["adapters_over_bare"] = found["decode64"]["step_ms"] / found["bare64"]["step_ms"] - 1
    found["first_token_over_forward"] = found["first_token"]["first_token_ms"] / found["first_token"]["forward_ms"]
    found["decode64_over_transformers"] = found["decode64"]["tokens_per_s"] / found["transformers64"]["tokens_per_s"]
    text = json.dumps(found, indent=1)
    print(text)
    if file is not None:
        file.write_text(text + "\n")
