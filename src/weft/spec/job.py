"""What a job is: data, adapter and hyper-parameters; it ends as an adapter."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from weft.errors import ConfigError
from weft.methods.config import MethodConfig
from weft.methods.lora.config import LORA_KINDS, WORKED_OUT_STARTS
from weft.objectives.registry import OBJECTIVES as REGISTRY
from weft.objectives.registry import ObjectiveSettings
from weft.other_trainers import OBJECTIVES_ELSEWHERE, OPTIMS_ELSEWHERE, SCHEDULES_ELSEWHERE
from weft.settings import (
    KnownKeywords,
    above,
    at_least,
    between,
    check_pattern,
    field_names,
    refuse_foreign,
    setting,
    validate,
)
from weft.spec.adapter import AdapterSpec
from weft.spec.choices import OPTIMIZER_NAMES, OPTIMIZERS, SCHEDULES, check_schedule

FORMATS = ("auto", "chat", "completion", "alpaca", "sharegpt", "text", "tokens")
COLUMNS = (
    *("prompt", "completion", "text", "instruction", "input", "output", "system", "history"),
    *("messages", "conversations", "tools", "weight", "input_ids", "labels"),
    *("label", "tokens", "ner_tags", "chosen", "rejected", "teacher_ids", "teacher_logprobs"),
)
TOKEN_OBJECTIVES = ("supervised", "weighted", "distillation")
"""Objectives of single tokens."""
OBJECTIVES = ("auto", *dict.fromkeys(("supervised", "weighted", *REGISTRY)))
DEFAULT_MOMENTUM = {"muon": 0.95}
GRADIENT_SUMS = ("in_order", "any_order")
SUMS_BEFORE: Mapping[str, str] = {"ordered": "in_order", "free": "any_order"}
"""Values of `sums`, the earlier name of gradient_sum."""
LONG_SAMPLES = ("truncate", "drop", "error")
JOB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
RESERVED_NAMES = ("run.json", "timeline.json", "time.json", "report.html", "tensorboard")
"""File names in a run directory."""


@dataclass(frozen=True)
class SourceSpec:
    path: str = setting(is_path=True)
    """A file, folder, pattern or Hub data set, as in `train_data`."""
    weight: float | None = setting(None, rule=above(0, 10**6))
    """Share of an epoch's samples relative to the other sources: with 2 and 1, two of three. Missing weights count 1.
    Not for eval_data."""
    rows: int | None = setting(None, rule=at_least(1))
    """Read only this many rows from the front; of a Hub data set, only these are downloaded. Default: all."""
    streaming: bool = setting(False)
    """Read only the rows from the front that the job needs: max_steps x global_batch_size, and those that eval_data
    splits off; they are shuffled among themselves. Not for eval_data."""

    def __post_init__(self) -> None:
        validate(self)
        if self.streaming and self.rows is not None:
            raise ConfigError("rows already limits how many are read; leave out rows or streaming.", where="streaming")

    @classmethod
    def of(cls, item: str | SourceSpec) -> SourceSpec:
        """An item of a job's data, which may be a name only."""
        return cls(item) if isinstance(item, str) else item


@dataclass(frozen=True)
class JobData:
    name: str = setting()
    """Name of the job and of its directory: letters, digits, `.`, `_`, `-`; at most 64."""
    train_data: tuple[str | SourceSpec, ...] = setting(
        aliases=("dataset", "datasets", "train_file", "data"), is_path=True
    )
    """Files, folders, patterns (`data/*.jsonl`) or Hub data sets (`owner/name:config:split`), relative to the jobs
    file; or mappings: `[{path: a.jsonl, weight: 2}, {path: b.jsonl, rows: 1000}]`."""
    eval_data: int | float | tuple[str | SourceSpec, ...] | None = setting(
        None, aliases=("val_size", "eval_dataset", "val_set_size", "val_split_fraction"), is_path=True
    )
    """A fraction below 1 or a count to split off the training data, or files. Default: no evaluation."""
    data_format: str = setting("auto", aliases=("format", "formatting"), choices=FORMATS)
    """Format of the rows; `auto` looks at their columns."""
    data_columns: dict[str, str | int] = setting(factory=dict)
    """Which columns are which, e.g. `{prompt: question, completion: reply}`: names, texts with columns in braces such
    as `"Classify: {sentence}"`, or numbers from 1 for tables without a header. Default: the usual names."""
    objective: str = setting("auto", aliases=("rl",), choices=OBJECTIVES, elsewhere=OBJECTIVES_ELSEWHERE)
    """What the job learns from (docs/objectives.md): answers, pairs of answers, good and bad answers, classes, rewards
    or a teacher. auto: by the columns; dpo for pairs."""


@dataclass(frozen=True)
class JobSpec(ObjectiveSettings, JobData, KnownKeywords):
    """One fine-tuning job. Settings left out of a job come from `defaults`, then from here. The bases' settings come
    first, from the last base to the first; an objective's are in its file."""

    adapter: AdapterSpec = setting(factory=AdapterSpec, aliases=("lora", "peft"))
    """The adapter to train."""
    init_adapter: str | None = setting(None, aliases=("adapter_name_or_path", "lora_model_dir"), is_path=True)
    """A PEFT adapter directory to continue from. `adapter` may be left out; if given, rank and targets must match."""

    learning_rate: float = setting(None, aliases=("lr",), rule=above(0))
    """Peak learning rate. Default: by the adapter's method; bottleneck 5e-4, bitfit 3e-3, vera and diff_pruning 5e-3,
    ia3 1e-2, prompt_tuning and prefix_tuning 3e-2, all others 2e-4."""
    lr_scheduler_type: str = setting(
        "linear", aliases=("lr_scheduler",), choices=SCHEDULES, elsewhere=SCHEDULES_ELSEWHERE
    )
    """Shape of the learning rate over the job's steps."""
    lr_scheduler_kwargs: dict[str, float | str] = setting(factory=dict)
    """Settings of some shapes: `num_cycles` of cosine_with_restarts; `min_lr` or `min_lr_rate` of cosine_with_min_lr;
    `num_decay_steps`, `num_stable_steps`, `decay_type` (cosine, linear, 1-sqrt) and `min_lr_ratio` of
    warmup_stable_decay. Steps below 1 are a fraction of all steps."""
    learning_rate_pattern: dict[str, float] = setting(factory=dict)
    """Learning rates of some modules: a regular expression that ends a module path, mapped to a factor on the job's
    learning rate; the first match counts."""
    warmup_steps: float = setting(0.0, aliases=("warmup_ratio", "num_warmup_steps"), rule=at_least(0))
    """Steps of linear warm-up; below 1: a fraction of all steps."""
    num_train_epochs: float = setting(1.0, aliases=("num_epochs", "epochs", "n_epochs"), rule=above(0, 10**6))
    """Passes over the training data; fractions allowed."""
    max_steps: int | None = setting(None, rule=at_least(1, 10**9))
    """Number of optimizer steps; overrides num_train_epochs."""
    global_batch_size: int | None = setting(None, aliases=("batch_size",), rule=at_least(1, 10**6))
    """Samples per optimizer step. Default: per_device_train_batch_size x gradient_accumulation_steps, else 8."""
    per_device_train_batch_size: int | None = setting(None, aliases=("micro_batch_size",), rule=at_least(1, 10**6))
    """Accepted from other tools' files; only its product with gradient_accumulation_steps matters."""
    gradient_accumulation_steps: int | None = setting(None, rule=at_least(1, 10**6))
    """Accepted from other tools' files; see per_device_train_batch_size."""
    optim: str = setting(
        "adamw", aliases=("optimizer",), choices=OPTIMIZERS, synonyms=OPTIMIZER_NAMES, elsewhere=OPTIMS_ELSEWHERE
    )
    """The optimizer; transformers' names work too. adamw_8bit keeps its moments in 8 bits, adafactor only those of rows
    and columns; muon steps matrices by their orthogonal part, all else as adamw."""
    weight_decay: float = setting(0.0, rule=at_least(0))
    """Decoupled weight decay; sgd adds it to the gradient."""
    adam_beta1: float = setting(0.9, rule=between(0, 1), optims=("adamw", "adamw_8bit", "lion", "muon"))
    """First-moment decay of AdamW; of lion, the decay in the step."""
    adam_beta2: float = setting(0.999, rule=between(0, 1), optims=("adamw", "adamw_8bit", "lion", "muon"))
    """Second-moment decay of AdamW; of lion, the decay of its moment."""
    adam_epsilon: float = setting(1e-8, rule=above(0), optims=("adamw", "adamw_8bit", "muon"))
    """AdamW's epsilon."""
    momentum: float | None = setting(None, rule=between(0, 1), optims=("sgd", "muon"))
    """Momentum. Default: none for sgd, 0.95 for muon."""
    nesterov: bool = setting(False, optims=("sgd",))
    """Nesterov momentum, which needs a momentum above 0; muon always has it."""
    ema_decay: float | None = setting(None, rule=between(0, 1))
    """Decay of a moving average of the weights, which is evaluated and exported instead of the last weights. Default:
    no average."""
    max_grad_norm: float = setting(1.0, aliases=("gradient_clipping",), rule=at_least(0))
    """Norm to clip this job's gradient to; 0: no clipping."""
    gradient_sum: str = setting("in_order", former="sums", choices=GRADIENT_SUMS, synonyms=SUMS_BEFORE)
    """How gradients of samples are added: in_order, in fp32 and in the job's order, or any_order, as integers, so that
    the order of samples does not change a bit. any_order runs on CPUs and, for lora, with the fused kernels; it takes
    up to 16 bytes a trainable parameter."""
    loraplus_lr_ratio: float | None = setting(None, rule=above(0), methods=LORA_KINDS)
    """LoRA+: learning rate of B over that of A."""

    max_length: int = setting(1024, aliases=("cutoff_len", "sequence_len", "max_seq_length"), rule=at_least(2))
    """Longest sample in tokens."""
    long_samples: str = setting("truncate", aliases=("truncation_policy",), choices=LONG_SAMPLES)
    """What happens to longer samples: truncate (counted), drop (counted) or error."""
    group_texts: bool = setting(False)
    """For continued pre-training: join plain texts, with the end token between, and cut them into blocks of max_length.
    Attention crosses texts within a block."""
    train_on_inputs: bool = setting(False, aliases=("train_on_prompt", "train_on_input"), objectives=TOKEN_OBJECTIVES)
    """Count the prompt and user turns in the loss as well."""
    mask_history: bool = setting(False, objectives=(*TOKEN_OBJECTIVES, "dpo", "cpo", "simpo", "orpo", "kto"))
    """Train only the last answer of each chat. Default: every assistant turn that has something before it."""
    chat_template: str | None = setting(None, aliases=("chat_template_jinja",))
    """A Jinja chat template to use instead of the tokenizer's."""
    shuffle: bool = setting(True)
    """Draw a new order of the samples each epoch, from the job's seed."""
    seed: int = setting(42, rule=between(0, 2**32))
    """Seed of the adapter's initial weights, the data order, the eval split and dropout."""

    eval_steps: int | None = setting(None, rule=at_least(1))
    """Steps between evaluations. Default: at the end of each epoch."""
    early_stopping_patience: int | None = setting(None, rule=at_least(1))
    """Stop after this many evaluations without a better eval_loss; the best adapter is written."""
    save_steps: int = setting(100, rule=at_least(1))
    """Steps between checkpoints."""
    save_minutes: float = setting(10.0, rule=at_least(0))
    """Minutes after which a checkpoint is also written, at the next step; 0: only by steps."""
    save_total_limit: int = setting(2, rule=at_least(1))
    """Checkpoints kept."""
    logging_steps: int = setting(1, rule=at_least(1))
    """Steps between lines of metrics.jsonl."""
    priority: int = setting(0)
    """Higher first: into a microbatch, and when not all jobs fit."""
    tenant: str = setting("default")
    """Owner of the job. When not all jobs fit, the tenant with fewer tokens so far comes first."""

    def __post_init__(self) -> None:
        self._refuse_foreign_sources()
        # Which method it is, is known when the adapter has been read.
        has_rate = self.learning_rate is not None
        object.__setattr__(self, "learning_rate", self.learning_rate if has_rate else MethodConfig.learning_rate)
        validate(self)
        if not has_rate:
            object.__setattr__(self, "learning_rate", self.adapter.config.learning_rate)
        refuse_foreign(self, "methods", self.adapter.method, "the method")
        if self.objective != "auto":
            refuse_foreign(self, "objectives", self.objective, "the objective")
        start = self.adapter.init_lora_weights
        if self.init_adapter is not None and start in WORKED_OUT_STARTS:
            raise ConfigError(
                f"continues an adapter, which then cannot start by {start}; leave one of them out.",
                where="init_adapter",
            )
        self._check_optim()
        check_schedule(self.lr_scheduler_type, self.lr_scheduler_kwargs)
        least = self.lr_scheduler_kwargs.get("min_lr")
        if isinstance(least, int | float) and least > self.learning_rate:
            found = f"got {least:g}, which is above the learning_rate of {self.learning_rate:g}"
            raise ConfigError(f"{found}: it is where the rate ends.", where="lr_scheduler_kwargs.min_lr")
        self._check_rates()
        self.check_objective(self)
        if not JOB_NAME.fullmatch(self.name):
            raise ConfigError(
                f"{self.name!r} is not a job name; use a to z, A to Z, digits, '.', '_' and '-', starting with a "
                "letter or digit, at most 64.",
                where="name",
            )
        if self.name.lower() in RESERVED_NAMES:
            raise ConfigError(f"{self.name!r} is a name the run directory uses itself.", where="name")
        self._check_sources()
        self._check_eval_amount()
        self._check_columns()
        leading = self.adapter.num_leading_rows
        if self.max_length < leading + 2:
            left = max(0, self.max_length - leading)
            raise ConfigError(
                f"{leading} virtual tokens leave room for {left} of the sample's own.", where="max_length"
            )
        if self.early_stopping_patience and self.eval_data is None:
            raise ConfigError("needs eval_data.", where="early_stopping_patience")
        product = (self.per_device_train_batch_size or 1) * (self.gradient_accumulation_steps or 1)
        stated = self.per_device_train_batch_size or self.gradient_accumulation_steps
        if self.global_batch_size and stated and self.global_batch_size != product:
            raise ConfigError(
                f"global_batch_size is {self.global_batch_size}, but per_device_train_batch_size x "
                f"gradient_accumulation_steps is {product}; keep one of them.",
                where="global_batch_size",
            )

    @property
    def batch_size(self) -> int:
        if self.global_batch_size:
            return self.global_batch_size
        if self.per_device_train_batch_size or self.gradient_accumulation_steps:
            return (self.per_device_train_batch_size or 1) * (self.gradient_accumulation_steps or 1)
        return 8

    @property
    def used_momentum(self) -> float:
        return DEFAULT_MOMENTUM.get(self.optim, 0.0) if self.momentum is None else self.momentum

    @property
    def source_weights(self) -> tuple[float, ...] | None:
        """Weight of every training source; None if none has one."""
        weights = [SourceSpec.of(item).weight for item in self.train_data]
        if all(weight is None for weight in weights):
            return None
        return tuple(1.0 if weight is None else weight for weight in weights)

    @property
    def train_sources(self) -> tuple[SourceSpec, ...]:
        """The training sources; streamed ones with the number of rows to read."""
        sources = tuple(SourceSpec.of(item) for item in self.train_data)
        return tuple(
            replace(source, streaming=False, rows=self._num_streamed) if source.streaming else source
            for source in sources
        )

    @property
    def _num_streamed(self) -> int:
        """Number of rows of an epoch plus those that are split off for evaluation."""
        assert self.max_steps is not None, "checked when the job was made"
        trained, split = self.max_steps * self.batch_size, self.eval_data
        if not isinstance(split, int | float):
            return trained
        return trained + int(split) if split >= 1 else math.ceil(Fraction(trained) / (1 - Fraction(split)))

    def _check_optim(self) -> None:
        refuse_foreign(self, "optims", self.optim, "optim")
        if self.optim == "muon" and self.adapter.trains_rows:
            raise ConfigError(
                "muon trains matrices only, not rows of tokens; use another optimizer.",
                where="optim",
            )
        if self.nesterov and not self.momentum:
            raise ConfigError("needs a momentum above 0.", where="nesterov")

    def _check_rates(self) -> None:
        for pattern, factor in self.learning_rate_pattern.items():
            check_pattern(pattern, "learning_rate_pattern")
            if factor < 0:
                raise ConfigError(f"must be at least 0, got {factor:g}.", where=f"learning_rate_pattern.{pattern}")

    def _refuse_foreign_sources(self) -> None:
        """Refuses mappings with other tools' keys for data."""
        known = field_names(SourceSpec)
        for name in ("train_data", "eval_data"):
            given = getattr(self, name)
            for item in given if isinstance(given, list | tuple) else [given]:
                foreign = [str(key) for key in item if str(key) not in known] if isinstance(item, Mapping) else []
                if foreign:
                    raise ConfigError(
                        f"{foreign[0]!r} is no setting of a data source, which has {', '.join(known)}; the format of "
                        "rows goes in data_format.",
                        where=name,
                    )

    def _check_sources(self) -> None:
        if not self.train_data or "" in self.train_data:
            raise ConfigError("no files; name at least one.", where="train_data")
        streamed = _first_streamed(self.train_data)
        if streamed is not None and self.max_steps is None:
            raise ConfigError(
                "needs max_steps, which limits the rows that are read; or set rows.",
                where=f"train_data.{streamed}.streaming",
            )
        if not isinstance(self.eval_data, tuple):
            return
        if not self.eval_data or "" in self.eval_data:
            raise ConfigError("no files; name at least one, or leave it out.", where="eval_data")
        sources = [SourceSpec.of(item) for item in self.eval_data]
        weighted = next((i for i, source in enumerate(sources) if source.weight is not None), None)
        if weighted is not None:
            raise ConfigError(
                "evaluation reads every sample once, so a weight changes nothing; leave it out.",
                where=f"eval_data.{weighted}.weight",
            )
        streamed = _first_streamed(self.eval_data)
        if streamed is not None:
            raise ConfigError("is not for eval_data; limit it with rows.", where=f"eval_data.{streamed}.streaming")

    def _check_columns(self) -> None:
        for name, column in self.data_columns.items():
            if name not in COLUMNS:
                raise ConfigError(
                    f"{name!r} is no column that a format reads; use {', '.join(COLUMNS)}.", where="data_columns"
                )
            if column == "" or (isinstance(column, int) and column < 1):
                raise ConfigError(
                    f"got {column!r}; use a column's name, a text with columns in braces, or a number from 1.",
                    where=f"data_columns.{name}",
                )

    def _check_eval_amount(self) -> None:
        amount = SourceSpec.of(self.eval_data[0]).path if isinstance(self.eval_data, tuple) else self.eval_data
        if isinstance(amount, str):
            is_wrong = re.fullmatch(r"[\d.]+ *%", amount) is not None
        else:
            is_wrong = amount is not None and (amount <= 0 or (amount >= 1 and not float(amount).is_integer()))
        if isinstance(amount, float) and amount == 1:
            raise ConfigError(
                "got 1.0, which could be all samples or one; write 1 for one sample, or a fraction below 1.",
                where="eval_data",
            )
        if is_wrong:
            raise ConfigError(
                f"got {amount}; accepted are a fraction between 0 and 1, a whole number of samples, or files.",
                where="eval_data",
            )


def _first_streamed(items: Sequence[str | SourceSpec]) -> int | None:
    return next((i for i, item in enumerate(items) if SourceSpec.of(item).streaming), None)
