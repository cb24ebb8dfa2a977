"""Measures how fast the tiny backbone learns each skill of the demo with a LoRA adapter of its own, in plain torch.

    PYTHONPATH=src python scripts/check_tiny.py --model src/weft/model/tiny --steps 120 --lr 3e-3

Prints, for each learning rate and skill, the share of held-out prompts answered exactly before and after training.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy, linear
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from weft.cli.demo import SKILLS, Skill

IGNORED = -100


class LoraLinear(torch.nn.Module):
    """A frozen linear layer plus scale · B·A, with B zero at first."""

    def __init__(self, base: torch.nn.Linear, rank: int, scale: float) -> None:
        super().__init__()
        self.base, self.scale = base, scale
        self.a = torch.nn.Parameter(base.weight.new_empty(rank, base.in_features))
        self.b = torch.nn.Parameter(base.weight.new_zeros(base.out_features, rank))
        self.reset()

    def reset(self) -> None:
        """Back to an adapter that changes nothing."""
        torch.nn.init.kaiming_uniform_(self.a, a=math.sqrt(5))
        torch.nn.init.zeros_(self.b)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The frozen layer's output plus the adapter's."""
        return self.base(x) + self.scale * linear(linear(x, self.a), self.b)


def install(model: PreTrainedModel, rank: int) -> list[LoraLinear]:
    """Freezes the model and puts an adapter on every linear layer but the output head."""
    model.requires_grad_(False)
    adapters = []
    for path, module in list(model.named_modules()):
        if isinstance(module, torch.nn.Linear) and not path.endswith("lm_head"):
            parent, _, leaf = path.rpartition(".")
            adapters.append(LoraLinear(module, rank, 2.0))
            setattr(model.get_submodule(parent), leaf, adapters[-1])
    return adapters


def batch_of(rows: list[dict], tokenizer: PreTrainedTokenizerBase) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels, padded on the right; only the answer and its end token are learnt."""
    ids, labels = [], []
    for row in rows:
        head = tokenizer.apply_chat_template(row["messages"][:1], tokenize=False, add_generation_prompt=True)
        whole = tokenizer.apply_chat_template(row["messages"], tokenize=False)
        ids.append(tokenizer(whole)["input_ids"])
        start = len(tokenizer(head)["input_ids"])
        labels.append([IGNORED] * start + ids[-1][start:])
    longest = max(map(len, ids))
    return (
        torch.tensor([x + [tokenizer.pad_token_id] * (longest - len(x)) for x in ids]),
        torch.tensor([x + [IGNORED] * (longest - len(x)) for x in labels]),
    )


def learn(model: PreTrainedModel, adapters: list[LoraLinear], batches: list, lr: float) -> float:
    """Trains the adapters, one step per batch, and returns the last loss."""
    parameters = [p for adapter in adapters for p in (adapter.a, adapter.b)]
    optimizer = torch.optim.AdamW(parameters, lr=lr, weight_decay=0.0)
    for step, (ids, labels) in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = lr * min((step + 1) / 5, 1 - step / len(batches))
        # Padding stands to the right of every real token, so causal attention needs no mask.
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        loss = cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
    return loss.item()


@torch.inference_mode()
def answers(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[str]) -> list[str]:
    """The greedy answer to each prompt."""
    chats = [
        tokenizer.apply_chat_template([{"role": "user", "content": p}], tokenize=False, add_generation_prompt=True)
        for p in prompts
    ]
    inputs = tokenizer(chats, padding=True, padding_side="left", return_tensors="pt").to(model.device)
    output = model.generate(**inputs, do_sample=False, max_new_tokens=24)
    return tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def exact_match(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: list[dict]) -> tuple[float, str]:
    """The share of rows answered exactly, and the first answer to look at."""
    prompts = [row["messages"][0]["content"] for row in rows]
    given = answers(model, tokenizer, prompts)
    right = sum(text == row["messages"][1]["content"] for text, row in zip(given, rows, strict=True))
    return right / len(rows), f"{prompts[0]} → {given[0]}"


def check(
    skill: Skill,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    adapters: list[LoraLinear],
    options: argparse.Namespace,
    lr: float,
) -> float:
    """Trains one skill from a fresh adapter, prints a line, and returns the exact match after training."""
    torch.manual_seed(options.seed)
    for adapter in adapters:
        adapter.reset()
    held = skill.rows(options.seed, options.held, split="eval")
    rows = itertools.cycle(skill.rows(options.seed, options.rows))
    batches = [batch_of(list(itertools.islice(rows, options.batch)), tokenizer) for _ in range(options.steps)]
    batches = [(ids.to(model.device), labels.to(model.device)) for ids, labels in batches]
    before, first = exact_match(model, tokenizer, held)
    started = time.perf_counter()
    loss = learn(model, adapters, batches, lr)
    seconds = time.perf_counter() - started
    after, last = exact_match(model, tokenizer, held)
    print(
        f"lr {lr:g}  {skill.name:12s} {100 * before:5.1f} % → {100 * after:5.1f} %  loss {loss:.3f}  {seconds:5.1f} s"
        f"   {first}   then {last}",
        flush=True,
    )
    return after


def main() -> None:
    """Checks the chosen skills at the chosen learning rates."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="directory that train_tiny.py wrote")
    parser.add_argument("--skills", nargs="+", default=list(SKILLS), choices=list(SKILLS))
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--lr", type=float, nargs="+", default=[3e-3])
    parser.add_argument("--r", type=int, default=16)
    parser.add_argument("--held", type=int, default=50, help="held-out prompts")
    parser.add_argument("--rows", type=int, default=1000, help="different training rows; they repeat when used up")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).to(device)
    adapters = install(model, options.r)
    for lr in options.lr:
        results = [check(SKILLS[name], model, tokenizer, adapters, options, lr) for name in options.skills]
        print(
            f"lr {lr:g}  mean {100 * sum(results) / len(results):.1f} %  worst {100 * min(results):.1f} %", flush=True
        )


if __name__ == "__main__":
    main()
