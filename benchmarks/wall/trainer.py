"""What people would run instead: transformers' Trainer or TRL's SFTTrainer with PEFT, one job after another on a model
loaded once.

`python -m benchmarks.wall.trainer jobs.yaml OUT [trl]` trains the same jobs on the same samples for the same number of
steps, and leaves an adapter of each. The batch is one pass where it fits, nothing is evaluated or checkpointed
on the way, and TRL finds the samples prepared: the peer is given every doubt.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from weft.data.load import load_job_data
from weft.kernels.device import default_device, is_gpu
from weft.spec import JobSpec, load_run


def train_all(jobs_file: Path, out: Path, *, by_trl: bool = False) -> None:
    """Trains every job of a jobs file, alone."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec = load_run(jobs_file)
    device = default_device()
    tokenizer = AutoTokenizer.from_pretrained(spec.base_model)
    dtype = torch.bfloat16 if is_gpu(device) else torch.float32
    model: Any = AutoModelForCausalLM.from_pretrained(spec.base_model, dtype=dtype, attn_implementation="sdpa")
    model.to(device)
    for job in spec.jobs:
        samples = load_job_data(job, tokenizer, jobs_file.parent).train.samples
        rows = [{"input_ids": s.tokens, "labels": _labels(s)} for s in samples]
        model = _train(model, job, rows, out / job.name, tokenizer if by_trl else None).unload()


def _labels(sample: Any) -> Any:
    return np.where(sample.supervised, sample.tokens, -100)


def _padded(rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A batch as wide as its longest row."""
    longest = max(len(row["labels"]) for row in rows)
    batch = {
        "input_ids": torch.zeros(len(rows), longest, dtype=torch.long),
        "attention_mask": torch.zeros(len(rows), longest, dtype=torch.long),
        "labels": torch.full((len(rows), longest), -100),
    }
    for index, row in enumerate(rows):
        size = len(row["labels"])
        batch["attention_mask"][index, :size] = 1
        for name in ("input_ids", "labels"):
            batch[name][index, :size] = torch.tensor(row[name], dtype=torch.long)
    return batch


def _train(model: Any, job: JobSpec, rows: list[dict[str, Any]], out: Path, for_trl: Any = None) -> Any:
    """`for_trl`: the tokenizer, for TRL's trainer; None: transformers'."""
    import peft

    adapter = job.adapter
    assert job.max_steps is not None
    wrapped = peft.get_peft_model(
        model,
        peft.LoraConfig(task_type="CAUSAL_LM", r=adapter.r, lora_alpha=2 * adapter.r, target_modules="all-linear"),
    )
    settings: dict[str, Any] = {
        "output_dir": str(out),
        "max_steps": job.max_steps,
        "per_device_train_batch_size": job.batch_size,
        "learning_rate": job.learning_rate,
        "bf16": is_gpu(default_device()),
        "save_strategy": "no",
        "logging_steps": 10,
        "report_to": [],
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "dataloader_num_workers": 2,
    }
    trainer: Any
    if for_trl is None:
        from transformers import Trainer, TrainingArguments

        trainer = Trainer(wrapped, TrainingArguments(**settings), train_dataset=rows, data_collator=_padded)
    else:
        import datasets
        import trl

        settings |= {"gradient_checkpointing": False, "dataset_kwargs": {"skip_prepare_dataset": True}}
        trainer = trl.SFTTrainer(
            wrapped,
            trl.SFTConfig(**settings),
            train_dataset=datasets.Dataset.from_list(rows).with_format("numpy"),
            data_collator=_padded,
            processing_class=for_trl,
        )
    trainer.train()
    wrapped.save_pretrained(str(out))
    return wrapped


if __name__ == "__main__":
    train_all(Path(sys.argv[1]), Path(sys.argv[2]), by_trl=sys.argv[3:] == ["trl"])
