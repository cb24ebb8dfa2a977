"""`weft eval`: loss, perplexity, token accuracy and exact match of adapters beside the bare model, all in one batch.

With --logits it writes what an adapter, or the bare model, predicts for data, in a file that jobs learn from.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.console import Console

from weft.cli.adapters.generate import Adapters, BaseModel, Device, Dtype, load_adapters
from weft.cli.options import path_option
from weft.errors import ConfigError, DataError, not_accepted
from weft.objectives.distillation import MOST_TOKENS
from weft.objectives.objective import is_share
from weft.report.readable import output_console, plain_table

if TYPE_CHECKING:
    from weft.data.chat_template import Tokenizer
    from weft.data.dataset import Dataset
    from weft.data.load import Prompt
    from weft.engine.inference.attach import Attached, StoredAdapter
    from weft.model.backbone import Backbone

METRICS = ("loss", "perplexity", "token-accuracy", "exact-match")
SCORED = METRICS[:-1]
SHARES = METRICS[2:]
CAPACITY = 2048
SPARE_TOKENS = 8
"""Tokens by which an answer may exceed the longest reference: a longer answer must not be cut to a match."""


def evaluate(
    data: Annotated[str, typer.Option(help="A data file with answers.", show_default=False)],
    adapter: Adapters = None,
    base_model: BaseModel = None,
    metric: Annotated[
        str | None,
        typer.Option(help=f"Some of {','.join(METRICS)}. Default: all the data has answers for."),
    ] = None,
    objective: Annotated[
        str, typer.Option(help="Objective to measure by; auto: by the columns, dpo for pairs.")
    ] = "auto",
    reference: Annotated[
        str | None,
        typer.Option(
            help="An adapter that dpo and kto compare with, or the teacher of distillation. Default: the bare model.",
            show_default=False,
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Only the first rows.", show_default=False)] = None,
    logits: Annotated[
        Path | None,
        path_option(
            "Also write the data with the adapter's most likely tokens, or the bare model's, to a .jsonl file for "
            "jobs that learn by distillation.",
            metavar="FILE",
        ),
    ] = None,
    top_k: Annotated[int, typer.Option(help="Number of likeliest tokens that --logits writes for each token.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Measure adapters on data, beside the bare model."""
    chosen = _metrics(metric)
    if limit is not None and limit < 1:
        raise ConfigError(f"must be at least 1, got {limit}.", where="--limit")
    from weft.data.sources import find_source
    from weft.other_trainers import OBJECTIVES_ELSEWHERE
    from weft.spec.job import OBJECTIVES

    if objective not in OBJECTIVES:
        raise not_accepted(objective, OBJECTIVES, "--objective", OBJECTIVES_ELSEWHERE)
    if logits is not None:
        check_logits(logits, adapter, top_k)
    # A missing file is reported before the model is loaded.
    find_source(data, Path())
    status = Console(stderr=True).status
    with status("loading the model"):
        compared = _compared(reference)
        loaded = load_adapters(adapter, base_model, device, dtype, with_base=True, with_heads=True)
        loaded = _only_heads(loaded) if loaded.heads else loaded
        datasets = _datasets(data, loaded, limit, objective)
        first = next(iter(datasets.values()))
        _refuse_foreign_metrics(chosen, first)
        if compared is not None and not first.reads_reference:
            raise ConfigError(f"objective {first.objective.name} compares with nothing.", where="--reference")
        if compared is not None and first.has_teacher:
            raise ConfigError("the rows have the outputs of their teacher; leave it out.", where="--reference")
        if logits is not None:
            find_teacher(loaded, datasets, top_k)
        prompts: dict[str, list[Prompt]] = {}
        if _wants_answers(chosen, first):
            stated = chosen is not None
            prompts = loaded.as_each_reads(lambda reader, template: _prompts(data, reader, limit, template, stated))
    results: dict[str, dict[str, float]] = {name: {} for name in loaded.slots}
    with status("evaluating"):
        if chosen is None or set(SCORED) & set(chosen):
            _add_scores(results, loaded, datasets, compared)
        if any(prompts.values()):
            _add_exact_match(results, loaded, prompts)
        if logits is not None:
            from weft.engine.execute.teacher_file import write_teacher_file

            write_teacher_file(logits, *find_teacher(loaded, datasets, top_k), top_k, CAPACITY)
    fitting = [name for name in METRICS if name not in _foreign_metrics(first)]
    shown = [m for m in chosen or fitting if m != "exact-match" or any(prompts.values())]
    if chosen is None:
        # Further metrics of the objective.
        shown += [name for name in results[next(iter(results))] if name not in METRICS]
    if as_json:
        typer.echo(_as_json(data, first, loaded, results, shown), nl=False)
    else:
        _show(first, compared, results, shown, output_console())
        if logits is not None:
            typer.echo(f"\nlogits  {logits}")


def _compared(reference: str | None) -> StoredAdapter | None:
    from weft.engine.inference.attach import BASE, read_stored

    return None if reference in (None, BASE) else read_stored(Path(reference).expanduser())


def _metrics(text: str | None) -> list[str] | None:
    if text is None:
        return None
    chosen = [name.strip().replace("_", "-") for name in text.split(",") if name.strip()]
    for name in chosen:
        if name not in METRICS:
            raise not_accepted(name, METRICS, "--metric")
    if not chosen:
        raise ConfigError(f"names none; accepted are {', '.join(METRICS)}.", where="--metric")
    return list(dict.fromkeys(chosen))


def _wants_answers(chosen: list[str] | None, dataset: Dataset) -> bool:
    """True if exact match was chosen; by default, if the data may have answers."""
    if chosen is not None:
        return "exact-match" in chosen
    return "exact-match" not in _foreign_metrics(dataset) and dataset.summary.format not in ("text", "tokens")


def _refuse_foreign_metrics(chosen: list[str] | None, dataset: Dataset) -> None:
    unfit = _foreign_metrics(dataset)
    foreign = [name for name in chosen or () if name in unfit]
    if foreign:
        raise ConfigError(
            f"{foreign[0]} is of single answers, and {dataset.summary.sources[0]} is measured by objective "
            f"{dataset.objective.name}; accepted are {', '.join(name for name in METRICS if name not in unfit)}.",
            where="--metric",
        )


def _foreign_metrics(dataset: Dataset) -> tuple[str, ...]:
    """Metrics without a meaning for the objective: pairs have no perplexity, and a head predicts no token."""
    if dataset.head is not None:
        return METRICS[1:]
    if dataset.likelihood_objective is not None:
        return ("perplexity", "exact-match")
    # The loss of distillation is not a cross entropy.
    return ("perplexity",) if dataset.distillation is not None else ()


def _only_heads(loaded: Attached) -> Attached:
    """Drops the bare model, which has no head; ConfigError if an adapter has none."""
    other = next((name for name in loaded.slots if name not in loaded.heads and loaded.slots[name] is not None), None)
    if other is not None:
        first = next(iter(loaded.heads))
        raise ConfigError(f"{first} has a head for labels and {other} has none; measure them apart.", where="--adapter")
    slots = {name: slot for name, slot in loaded.slots.items() if name in loaded.heads}
    return replace(loaded, slots=slots, chat_templates={name: loaded.chat_templates[name] for name in slots})


def _datasets(data: str, loaded: Attached, limit: int | None, objective: str) -> dict[str, Dataset]:
    """The data by adapter: each has its own tokenizer, template and labels."""
    leading = max(map(loaded.backbone.leading_rows, loaded.slots.values()))
    longest = loaded.backbone.max_positions - leading
    if not loaded.heads:
        return loaded.as_each_reads(
            lambda reader, template: _samples(data, reader, longest, limit, template, objective)
        )
    found = {}
    for name, head in loaded.heads.items():
        if objective not in ("auto", head.name):
            raise ConfigError(f"got {objective}; {name} was trained for {head.name}.", where="--objective")
        reader, template = loaded.tokenizer(name), loaded.chat_templates[name]
        read = _samples(data, reader, longest, limit, template, head.name, head.labels)
        found[name] = replace(read, objective=head)
    return found


def _samples(
    data: str,
    tokenizer: Tokenizer,
    longest: int,
    limit: int | None,
    chat_template: str | None,
    objective: str,
    labels: tuple[str, ...] = (),
) -> Dataset:
    from weft.data.load import load_dataset

    dataset = load_dataset(
        [data],
        tokenizer,
        objective=objective,
        labels=labels,
        max_length=longest,
        chat_template=chat_template,
        base_dir=Path(),
    )
    return dataset if limit is None else dataset.subset(range(min(limit, dataset.num_groups)))


def _prompts(
    data: str, tokenizer: Tokenizer, limit: int | None, chat_template: str | None, stated: bool
) -> list[Prompt]:
    """Prompts with an answer to compare with; if there is none and `stated`, a DataError."""
    from weft.data.load import load_prompts

    prompts = load_prompts(data, tokenizer, chat_template=chat_template, base_dir=Path())[:limit]
    answered = [prompt for prompt in prompts if prompt.reference is not None]
    if stated and not answered:
        raise DataError("has no answers to compare with, which exact-match needs.", where=data)
    return answered


def _add_scores(
    results: dict[str, dict[str, float]],
    loaded: Attached,
    datasets: dict[str, Dataset],
    compared: StoredAdapter | None,
) -> None:
    from weft.engine.execute.evaluate import ScoreRequest, mean_scores
    from weft.engine.execute.references import JobReference, ReferenceCache

    reference = None
    if compared is not None:
        reference = JobReference(ReferenceCache(loaded.backbone), next(iter(datasets.values())), compared)
        reference.take_slot()
    requests = [
        ScoreRequest(slot, replace(datasets[name], num_leading=loaded.backbone.leading_rows(slot)), reference)
        for name, slot in loaded.slots.items()
    ]
    capacity = max(CAPACITY, *(request.data.longest_group for request in requests))
    found = mean_scores(loaded.backbone, requests, capacity, loaded.backbone.path.row_tile(capacity))
    for name, means in zip(loaded.slots, found, strict=True):
        perplexity = math.exp(means.loss) if means.loss < 700 else math.inf
        results[name] |= {"loss": means.loss, "perplexity": perplexity, "token-accuracy": means.accuracy}
        results[name] |= means.further


def _add_exact_match(results: dict[str, dict[str, float]], loaded: Attached, prompts: dict[str, list[Prompt]]) -> None:
    from weft.engine.inference.generate import answers, exact_match
    from weft.spec.sampling import Decoding

    encode = loaded.backbone.tokenizer.encode
    references = {prompt.reference or "" for each in prompts.values() for prompt in each}
    longest = max(len(encode(reference, add_special_tokens=False, verbose=False)) for reference in references)
    requests = {name: (slot, prompts[name]) for name, slot in loaded.slots.items()}
    for name, given in answers(loaded.backbone, requests, Decoding(longest + SPARE_TOKENS)).items():
        results[name]["exact-match"] = exact_match(given)


def _as_json(
    data: str, dataset: Dataset, loaded: Attached, results: dict[str, dict[str, float]], shown: list[str]
) -> str:
    from weft.store import json_text

    rows: list[dict[str, Any]] = [
        {"adapter": name, **{metric.replace("-", "_"): found[metric] for metric in shown}}
        for name, found in results.items()
    ]
    account = {"data": data, "objective": dataset.objective.name, "num_samples": dataset.summary.num_samples}
    account["base_model"] = loaded.backbone.name
    return json.dumps(json_text.finite({**account, "results": rows}), indent=2, ensure_ascii=False) + "\n"


def _show(
    dataset: Dataset,
    compared: StoredAdapter | None,
    results: dict[str, dict[str, float]],
    shown: list[str],
    console: Console,
) -> None:
    table = plain_table("adapter", *(metric.replace("-", " ") for metric in shown), left=("adapter",))
    for name, found in results.items():
        style = "dim" if name == "base" else None
        table.add_row(name, *(_number(metric, found[metric]) for metric in shown), style=style)
    for line in (dataset.summary.describe(), *_measured_by(dataset, compared)):
        console.print(line, style="dim", markup=False, highlight=False, soft_wrap=True)
    console.print(table)


def _measured_by(dataset: Dataset, compared: StoredAdapter | None) -> list[str]:
    """The objective that measures the loss, if it is not the cross entropy of every token."""
    objective = dataset.likelihood_objective or dataset.distillation
    if dataset.head is not None:
        labels = f": {', '.join(dataset.head.labels)}" if dataset.head.labels else ""
        return [f"measured by objective {dataset.head.name}{labels}"]
    if objective is None:
        return []
    settings = ", ".join(f"{name} {value}" for name, value in vars(objective).items())
    reference = "the bare model" if compared is None else compared.name
    reference = "the outputs in the rows" if dataset.has_teacher else reference
    against = f"compared with {reference if dataset.reads_reference else 'nothing'}"
    return [f"measured by objective {objective.name} ({settings}), {against}"]


def _number(metric: str, value: float) -> str:
    if metric in SHARES or is_share(metric):
        return f"{value:.1%}"
    return f"{value:.4f}" if abs(value) < 1e5 else f"{value:.2e}"


def check_logits(path: Path, adapters: list[str] | None, top_k: int) -> None:
    """ConfigError if the file cannot be written or more than one adapter could be the teacher."""
    if path.suffix != ".jsonl":
        raise ConfigError(f"got {path}; expected the name of a .jsonl file.", where="--logits")
    if path.exists():
        raise ConfigError(f"{path} is there already; name another file.", where="--logits")
    if not path.parent.is_dir():
        raise ConfigError(f"there is no directory {path.parent}.", where="--logits")
    if adapters is not None and len(adapters) > 1:
        raise ConfigError(
            f"got {len(adapters)} adapters; the teacher is one adapter, or the bare model.", where="--logits"
        )
    if not 1 <= top_k <= MOST_TOKENS:
        raise ConfigError(f"must be from 1 to {MOST_TOKENS:,}, got {top_k}.", where="--top-k")


class Teacher(NamedTuple):
    backbone: Backbone
    slot: int | None
    data: Dataset


def find_teacher(loaded: Attached, datasets: dict[str, Dataset], top_k: int) -> Teacher:
    """The only adapter, or the bare model; ConfigError if its outputs for the data cannot be distilled."""
    name = list(loaded.slots)[-1]
    slot, data = loaded.slots[name], datasets[name]
    if data.likelihood_objective is not None or data.head is not None:
        found = f"the data is measured by objective {data.objective.name}"
        raise ConfigError(f"{found}; a teacher is for single answers and texts.", where="--logits")
    if loaded.backbone.has_own_head(slot):
        found = f"{name} has rows of the output head of its own, and a student has the backbone's"
        raise ConfigError(f"{found}; name another.", where="--logits")
    if top_k > loaded.backbone.vocabulary:
        raise ConfigError(f"got {top_k}; the model has {loaded.backbone.vocabulary:,} tokens.", where="--top-k")
    return Teacher(loaded.backbone, slot, data)
