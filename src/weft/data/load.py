"""The training and evaluation data of a job."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from weft.data.chat_template import ChatTemplate, Tokenizer
from weft.data.chats import ChatTurn, Conversation, Form, Text, message_turns
from weft.data.dataset import Dataset, JobData
from weft.data.formats import convert_rows
from weft.data.json_rows import ColumnMap
from weft.data.order import Mixture, permutation
from weft.data.prepared.convert import DataSettings
from weft.data.prepared.prepare import prepared_data
from weft.data.render import Renderer
from weft.data.sources import Source, find_source, read_rows
from weft.data.tokenise import tokenise_prompt, with_new_tokens
from weft.errors import ConfigError, DataError
from weft.objectives.distillation import LOGPROBS
from weft.objectives.heads import Classification, label_name
from weft.objectives.registry import OBJECTIVES
from weft.settings import refuse_foreign
from weft.spec.job import JobSpec, SourceSpec


def load_dataset(
    sources: Sequence[str | SourceSpec], tokenizer: Tokenizer, *, base_dir: Path, **settings: Any
) -> Dataset:
    """The samples of files (relative to `base_dir`) or Hub data sets; any problem is a DataError naming the row.
    `settings` are those of `DataSettings`."""
    named = [SourceSpec.of(source) for source in sources]
    return prepared_data(named, tokenizer, DataSettings(**settings), base_dir)


def find_sources(job: JobSpec, base_dir: Path) -> list[Source]:
    """All data sources of a job, unread; a DataError if something does not exist."""
    named = job.eval_data if isinstance(job.eval_data, tuple) else ()
    return [find_source(SourceSpec.of(source).path, base_dir) for source in (*job.train_sources, *named)]


def load_job_data(
    job: JobSpec, tokenizer: Tokenizer, base_dir: Path, *, clock: datetime.datetime | None = None
) -> JobData:
    """The training and evaluation data of a job; a fraction or count is split off by the job's seed. The tokenizer is
    the backbone's; the job's new tokens are added here. `clock` is the time for chat templates that read it, the
    beginning of the job's run; None for the current time."""
    at = clock or datetime.datetime.now()
    tokenizer = with_new_tokens(tokenizer, job.adapter.new_tokens)
    job = _with_labels(job, base_dir)
    leading = job.adapter.num_leading_rows
    settings = {field.name: getattr(job, field.name) for field in fields(DataSettings) if field.name != "clock"}
    settings |= {"max_length": job.max_length - leading, "clock": at}

    def load(setting: str, sources: Sequence[str | SourceSpec], objective: str) -> Dataset:
        try:
            return load_dataset(sources, tokenizer, base_dir=base_dir, **settings | {"objective": objective})
        except DataError as error:
            error.setting = setting
            if leading and "max_length" in error.message:
                error.hint = f"Of max_length {job.max_length:,}, the adapter's virtual tokens take {leading:,}."
            raise

    train = load("train_data", job.train_sources, job.objective)
    refuse_foreign(job, "objectives", train.objective.name, "the objective")
    check_teacher(train, job)
    if job.eval_data is None:
        data = JobData(train, None)
    elif isinstance(job.eval_data, tuple):
        data = JobData(train, load("eval_data", job.eval_data, train.objective.name))
    else:
        data = _split(train, job.eval_data, job)
    _check_labels(data.train, train, job)
    if data.eval is not None and data.eval.has_teacher != train.has_teacher:
        problem = f"holds {'no' if train.has_teacher else 'its'} {LOGPROBS}, unlike train_data"
        raise DataError(f"{problem}.", where=f"{job.name}: eval_data")
    data = of_job(data, job)
    data = data.led_by(leading)
    return data if job.source_weights is None else replace(data, train=_mixed(data.train, job))


def _with_labels(job: JobSpec, base_dir: Path) -> JobSpec:
    objective = OBJECTIVES.get(job.objective)
    if job.labels or not isinstance(objective, Classification):
        return job
    try:
        return replace(job, labels=find_labels(job.train_sources, objective, job.data_columns, base_dir))
    except DataError as error:
        error.setting = "train_data"
        raise


def check_teacher(data: Dataset, job: JobSpec) -> None:
    if data.distillation is None:
        return
    if not data.has_teacher and job.teacher is None:
        problem = f"is missing; name an adapter directory, or base for the bare backbone, or give rows with {LOGPROBS}"
        raise ConfigError(f"{problem}: objective distillation learns from it.", where="teacher")
    if data.has_teacher and job.teacher is not None:
        raise ConfigError(f"the rows hold a teacher's outputs ({LOGPROBS}); leave it out.", where="teacher")
    if data.has_teacher and job.distillation_divergence == "reverse_kl":
        problem = "reverse_kl needs all tokens of the teacher, and the rows hold the most likely ones"
        raise ConfigError(f"{problem}; use forward_kl or jsd.", where="distillation_divergence")


def _check_labels(trained: Dataset, read: Dataset, job: JobSpec) -> None:
    """DataError if answers have true/false labels and all trained ones have the same."""
    if trained.likelihood_objective is None or not trained.likelihood_objective.reads_labels:
        return
    labels = trained.samples.first_labels
    if labels.min() == labels.max():
        all_alike = len(np.unique(read.samples.first_labels)) == 1
        problem = (
            f"{'' if all_alike else 'with eval_data split off, '}every label is {'true' if labels[0] else 'false'}"
        )
        raise DataError(f"{problem}; objective {trained.objective.name} needs both.", where=f"{job.name}: train_data")


def of_job(data: JobData, job: JobSpec) -> JobData:
    parts = (data.train, data.eval)
    train, evaluated = (part and replace(part, objective=part.objective.of_job(job)) for part in parts)
    assert train is not None
    return JobData(train, evaluated)


def _mixed(data: Dataset, job: JobSpec) -> Dataset:
    """The data with a note on the shares of its sources; DataError for one that would never be used."""
    assert job.source_weights is not None
    counts = Mixture(data.sizes, job.source_weights).counts if all(data.sizes) else data.sizes
    shares = []
    for source, size, count in zip(job.train_data, data.sizes, counts, strict=True):
        name = SourceSpec.of(source).path
        if not count:
            problem = (
                f"its weight gives it none of the {sum(counts):,} samples of an epoch" if size else "has no samples"
            )
            where = f"{job.name}: train_data: {name}"
            raise DataError(f"{problem}; give it more, or leave it out.", where=where)
        shares.append(f"{count:,} from {name} (which has {size:,})")
    note = f"an epoch takes {', '.join(shares)}"
    return replace(data, summary=replace(data.summary, notes=(*data.summary.notes, note)))


def _split(data: Dataset, amount: float, job: JobSpec) -> JobData:
    """Splits off whole rows: samples of one chat overlap, so none may be on both sides."""
    row_of_group = _rows_counted(data)
    num_rows = int(row_of_group[-1]) + 1
    num_eval = round(num_rows * amount) if amount < 1 else int(amount)
    if not 1 <= num_eval < num_rows:
        side = "no sample to evaluate on" if num_eval < 1 else "no sample to train on"
        what = "samples" if num_rows == data.num_groups else "rows"
        raise DataError(
            f"{amount:g} of {num_rows:,} {what} leaves {side}.",
            where=f"{job.name}: eval_data",
            hint="Split off another amount, or name files.",
        )
    is_eval = np.zeros(num_rows, dtype=np.bool_)
    # A third number, so that the split never repeats the draw of an epoch.
    is_eval[permutation(num_rows, (job.seed, 0, 1))[:num_eval]] = True
    evaluated = is_eval[row_of_group]
    return JobData(data.subset(np.flatnonzero(~evaluated)), data.subset(np.flatnonzero(evaluated)))


def _rows_counted(data: Dataset) -> npt.NDArray[np.int64]:
    """The row of every group, counting only rows with groups; groups are in the order of their rows."""
    if data.rows is None:
        return np.arange(data.num_groups)
    return np.cumsum(np.diff(data.rows, prepend=data.rows[:1]) != 0)


MOST_LABELS = 10_000
"""More labels than these are a mistake: a column of other numbers or of texts."""


def find_labels(
    sources: Sequence[SourceSpec], objective: Classification, data_columns: Mapping[str, str | int], base_dir: Path
) -> tuple[str, ...]:
    """The names of all labels: numbers from 0 to the largest where all are numbers, else in alphabetical order."""
    named, labels = ColumnMap(data_columns), set[str]()
    for source in sources:
        rows = find_source(source.path, base_dir, has_header=not named.by_number, max_rows=source.rows).rows()
        for row in map(named.apply, rows):
            labels |= {label_name(given, "label", row.where) for given in objective.given_labels(row.values, row.where)}
            if len(labels) > MOST_LABELS:
                raise DataError(f"there are more than {MOST_LABELS:,} labels up to here.", where=row.where)
    names = sorted(labels)
    if all(name.isdecimal() for name in names):
        largest = max((int(name) for name in names), default=-1)
        if largest >= MOST_LABELS:
            where = sources[0].path
            raise DataError(f"the largest label is {largest:,}; expected one below {MOST_LABELS:,}.", where=where)
        names = [str(number) for number in range(largest + 1)]
    if len(names) < 2:
        problem = f"has only the label {names[0]!r}" if names else "has no labels"
        raise DataError(f"{problem}; objective {objective.name} needs two or more.", where=sources[0].path)
    return tuple(names)


@dataclass(frozen=True, eq=False)
class Prompt:
    tokens: npt.NDArray[np.int32]
    text: str
    reference: str | None
    where: str
    """Origin, e.g. `test.jsonl line 3`."""


def load_prompts(
    source: str,
    tokenizer: Tokenizer,
    *,
    chat_template: str | None = None,
    base_dir: Path,
) -> list[Prompt]:
    """One prompt per row of a file or Hub data set; rows need no answer here."""
    renderer = Renderer(ChatTemplate(tokenizer, chat_template))
    rows = read_rows(source, base_dir)
    _, forms = convert_rows(rows, "auto", need_answer=False)
    return [_prompt(form, renderer, row.where) for row, form in zip(rows, forms, strict=True)]


def prompt_of(text: str, tokenizer: Tokenizer, *, chat_template: str | None = None) -> Prompt:
    """The prompt for one typed question: a user turn if there is a chat template, else the text as it is."""
    question = Conversation((ChatTurn("user", text),), is_chat=False)
    return _prompt(question, Renderer(ChatTemplate(tokenizer, chat_template)), "the prompt")


def prompt_of_chat(
    messages: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, *, chat_template: str | None = None
) -> Prompt:
    """The prompt for the next turn of a chat of OpenAI messages; without a template, the turns joined. A tool's call
    and its result must appear in the prompt; a template that omits them is refused."""
    where = "the chat"
    # Nothing is trained here, so an assistant turn may also be empty.
    untrained = [{**message, "weight": 0} if message["role"] == "assistant" else message for message in messages]
    turns = message_turns(untrained, "messages", where)
    prompt = _prompt(Conversation(turns, is_chat=False), Renderer(ChatTemplate(tokenizer, chat_template)), where)
    for number, turn in enumerate(turns):
        names = [call["function"]["name"] for call in turn.extra.get("tool_calls", ())]
        texts = [turn.content.strip()] if turn.role == "tool" else names
        if not all(text in prompt.text for text in texts):
            raise DataError(f"messages[{number}] is about a tool; this model's chat template has no place for it.")
    return prompt


def _prompt(form: Form, renderer: Renderer, where: str) -> Prompt:
    if not isinstance(form, Conversation | Text):
        raise DataError("token ids cannot be split into a prompt and its answer.", where=where)
    rendered, reference = renderer.render_prompt(form, where)
    try:
        rendered.text.encode()
    except UnicodeEncodeError:
        # Bytes of a command line that are no text, or half of a surrogate pair: tokenizers take neither.
        raise DataError("is not UTF-8 text.", where=where) from None
    tokens = tokenise_prompt(rendered, renderer.tokenizer)
    if not len(tokens):
        raise DataError("the prompt is empty.", where=where)
    return Prompt(tokens, rendered.text, reference, where)
