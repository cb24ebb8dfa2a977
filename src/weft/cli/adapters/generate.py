"""`weft generate` and `weft chat`: answers of several adapters, decoded in one batch on the shared backbone."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from weft.cli.options import path_option
from weft.errors import ConfigError, DataError, StorageError, WeftError
from weft.report.readable import output_console
from weft.spec.sampling import Decoding

if TYPE_CHECKING:
    from weft.data.chat_template import Tokenizer
    from weft.data.load import Prompt
    from weft.engine.inference.answer_text import TokenTexts
    from weft.engine.inference.attach import Attached
    from weft.engine.inference.generate import Answer
    from weft.engine.inference.sampling import TokenLogprobs

Adapters = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter",
        metavar="[NAME=]DIR",
        help="An adapter or a job's directory; repeat it for several. `base` is the bare model.",
        show_default=False,
    ),
]
BaseModel = Annotated[
    str | None,
    typer.Option(help="The frozen model. Default: the one the adapters were trained on.", show_default=False),
]
MaxNewTokens = Annotated[int, typer.Option(help="Longest answer, in tokens, as far as the model has positions.")]
Temperature = Annotated[float, typer.Option(help="0 takes the most likely token; more is more varied.")]
TopP = Annotated[float, typer.Option(help="Draw from the smallest set of likeliest tokens with this probability.")]
TopK = Annotated[int, typer.Option(help="Draw from this many likeliest tokens; 0 is all.")]
MinP = Annotated[float, typer.Option(help="Draw only tokens with this share of the likeliest one's probability.")]
RepetitionPenalty = Annotated[float, typer.Option(help="Above 1: tokens of prompt and answer become less likely.")]
PresencePenalty = Annotated[float, typer.Option(help="Above 0: tokens that the answer has become less likely.")]
FrequencyPenalty = Annotated[
    float, typer.Option(help="Above 0: a token becomes less likely each time that the answer has it.")
]
Seed = Annotated[int, typer.Option(help="Seed of the draws when the temperature is above 0.")]
Stop = Annotated[list[str] | None, typer.Option(help="A text that ends an answer before it; repeat it for several.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Dtype = Annotated[str, typer.Option(help="auto, float32 or bfloat16.")]


def generate(
    adapter: Adapters = None,
    base_model: BaseModel = None,
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt; repeat it for several.")] = None,
    data: Annotated[str | None, typer.Option(help="A data file; each row is a prompt.", show_default=False)] = None,
    max_new_tokens: MaxNewTokens = 256,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    presence_penalty: PresencePenalty = 0.0,
    frequency_penalty: FrequencyPenalty = 0.0,
    seed: Seed = 0,
    stop: Stop = None,
    n: Annotated[int, typer.Option("--n", help="Number of answers to each prompt.")] = 1,
    logprobs: Annotated[
        int | None,
        typer.Option(
            help="Write log-probabilities of the answers' tokens, and of so many likeliest tokens beside each, with "
            "--json or --out.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[Path | None, path_option("Write the answers to this JSONL file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answers as JSONL.")] = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Answer prompts with one or several adapters, all in one batch on the shared model."""
    decoding = decoding_of(
        max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
        stop=tuple(stop or ()),
        n=n,
        logprobs=logprobs,
    )
    _check_prompts(prompt or [], data)
    if logprobs is not None and not as_json and out is None:
        raise ConfigError("log-probabilities are written with --json or --out FILE; add one.", where="--logprobs")
    if out is not None and (out.is_dir() or not out.parent.is_dir()):
        reason = "is a directory; name a file." if out.is_dir() else "its directory does not exist."
        raise StorageError(reason, where=f"--out {out}")
    from weft.data.sources import find_source
    from weft.engine.inference.generate import answers
    from weft.store.atomic import write_file

    if data is not None:
        # A missing file is reported before the model is loaded.
        find_source(data, Path())
    with Console(stderr=True).status("loading the model"):
        loaded = load_adapters(adapter, base_model, device, dtype)
        prompts = loaded.as_each_reads(lambda reader, template: _prompts(prompt or [], data, reader, template))
        requests = {name: (slot, prompts[name]) for name, slot in loaded.slots.items()}
    with Console(stderr=True).status(f"writing {sum(map(len, prompts.values())):,} answers"):
        given = answers(loaded.backbone, requests, decoding)
    lines = "".join(_json_lines(given, decoding, loaded))
    if out is not None:
        write_file(out, lines)
    if as_json:
        typer.echo(lines, nl=False)
    elif out is not None:
        typer.echo(f"{lines.count(chr(10)):,} answers are in {out}")
    else:
        _show(given, loaded, output_console())


def decoding_of(max_new_tokens: int, **settings: Any) -> Decoding:
    """ConfigError for an option out of range."""
    try:
        return Decoding(max_new_tokens, **settings)
    except ConfigError as error:
        raise error.at(f"--{(error.where or '').replace('_', '-')}") from None


def load_adapters(
    adapters: list[str] | None,
    base_model: str | None,
    device: str,
    dtype: str,
    *,
    with_base: bool = False,
    with_heads: bool = False,
) -> Attached:
    """The model with the adapters of the command line; prints notes about them to stderr."""
    from weft.engine.inference.attach import load_with_adapters

    loaded = load_with_adapters(
        adapters or (),
        base_model=base_model,
        device=device,
        dtype=dtype,
        with_base=with_base,
        with_heads=with_heads,
    )
    for note in loaded.notes:
        typer.echo(f"note: {note}", err=True)
    return loaded


def _check_prompts(typed: list[str], data: str | None) -> None:
    if typed and data is not None:
        raise ConfigError("--prompt and --data are both given; keep one.")
    if not typed and data is None:
        raise ConfigError("there is nothing to answer; give --prompt TEXT or --data FILE.")
    if any(not text.strip() for text in typed):
        raise ConfigError("the prompt is empty.", where="--prompt")


def _prompts(typed: list[str], data: str | None, tokenizer: Tokenizer, chat_template: str | None) -> list[Prompt]:
    from weft.data.load import load_prompts, prompt_of

    if data is not None:
        return load_prompts(data, tokenizer, chat_template=chat_template, base_dir=Path())
    made = [prompt_of(text, tokenizer, chat_template=chat_template) for text in typed]
    return [dataclasses.replace(item, where=f"--prompt {i}") for i, item in enumerate(made, 1)]


def _json_lines(given: dict[str, list[Answer]], decoding: Decoding, loaded: Attached) -> list[str]:
    from weft.engine.inference.answer_text import TokenTexts

    lines = []
    tokenizers: dict[str, Any] = {name: loaded.tokenizer(name) for name in given}
    texts = {name: TokenTexts(tokenizer.decode) for name, tokenizer in tokenizers.items()}
    for index, row in enumerate(zip(*given.values(), strict=True)):
        for name, answer in zip(given, row, strict=True):
            record: dict[str, Any] = {
                "adapter": name,
                "where": answer.prompt.where,
                "prompt": answer.prompt.text,
                "answer": answer.text,
                "reference": answer.prompt.reference,
            }
            if decoding.n > 1:
                record["sample"] = index % decoding.n
            if decoding.logprobs is not None and answer.finished is not None:
                record["logprobs"] = [_logprobs_record(each, texts[name]) for each in answer.finished.logprobs]
            lines.append(json.dumps(record, ensure_ascii=False) + "\n")
    return lines


def _logprobs_record(logprobs: TokenLogprobs, texts: TokenTexts) -> dict[str, Any]:
    top = [{"id": token, "token": texts[token], "logprob": value} for token, value in logprobs.top]
    return {"id": logprobs.token, "token": texts[logprobs.token], "logprob": logprobs.logprob, "top": top}


def _show(given: dict[str, list[Answer]], loaded: Attached, console: Console) -> None:
    tokenizer: Any = loaded.tokenizer(next(iter(given)))
    for row in zip(*given.values(), strict=True):
        prompt = row[0].prompt
        question = str(tokenizer.decode(prompt.tokens, skip_special_tokens=True)).strip()
        table = Table.grid(padding=(0, 0, 0, 2), pad_edge=True)
        for name, answer in zip(given, row, strict=True):
            table.add_row(Text(name, style="cyan"), Text(answer.text))
        if prompt.reference is not None:
            table.add_row(Text("reference", style="dim"), Text(prompt.reference, style="dim"))
        console.print(Text(question, style="bold"))
        console.print(table)
        console.print()


HELP = """\
/adapter NAME  talk to another adapter in a new conversation
/reset         forget the conversation
/help          show this
/quit          leave (also Ctrl-D)
Ctrl-C stops an answer; at the prompt it leaves."""


def chat(
    adapter: Adapters = None,
    base_model: BaseModel = None,
    system: Annotated[str | None, typer.Option(help="A system prompt.", show_default=False)] = None,
    max_new_tokens: MaxNewTokens = 256,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    presence_penalty: PresencePenalty = 0.0,
    frequency_penalty: FrequencyPenalty = 0.0,
    seed: Seed = 0,
    stop: Stop = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Talk to an adapter; switch between several with /adapter NAME."""
    decoding = decoding_of(
        max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
        stop=tuple(stop or ()),
    )
    with Console(stderr=True).status("loading the model"):
        loaded = load_adapters(adapter, base_model, device, dtype)
    interactive = sys.stdin.isatty()
    talk = Talk(loaded, decoding, system, interactive=interactive)
    if interactive:
        with contextlib.suppress(ImportError):
            # Gives input() its line editing and history.
            import readline  # noqa: F401
        several = f"Adapters: {', '.join(loaded.slots)}. " if len(loaded.slots) > 1 else ""
        typer.echo(f"{several}You talk to {talk.adapter} on {loaded.backbone.name}. /help shows what else you can do.")
    while not talk.is_over:
        try:
            talk.read_line(input(f"{talk.adapter}> " if interactive else ""))
        except EOFError:
            break
        except UnicodeDecodeError:
            raise DataError("is not UTF-8 text.", where="standard input") from None
        except KeyboardInterrupt:
            if not interactive:
                raise
            break
    if interactive and not talk.is_over:
        typer.echo()


class Talk:
    def __init__(self, loaded: Attached, decoding: Decoding, system: str | None, *, interactive: bool) -> None:
        """Errors and Ctrl-C end a conversation that is not interactive."""
        self.loaded = loaded
        self.decoding = decoding
        self.adapter = next(iter(loaded.slots))
        self.is_over = False
        self._interactive = interactive
        self._opening = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._opening)

    def read_line(self, line: str) -> None:
        """Runs a typed command or answers a question."""
        text = line.strip()
        if text.startswith("/"):
            self._run_command(*text.split(maxsplit=1))
        elif text:
            self._answer(text)

    def _run_command(self, command: str, argument: str = "") -> None:
        if command in ("/quit", "/exit"):
            self.is_over = True
        elif command == "/reset":
            self._reset()
            typer.echo("A new conversation starts.")
        elif command == "/adapter" and argument in self.loaded.slots:
            # The conversation starts again: another adapter's answers would mislead this one.
            self.adapter = argument
            self._reset()
            typer.echo(f"You talk to {argument} in a new conversation.")
        elif command == "/adapter":
            wrong = f"there is no adapter {argument!r}; " if argument else ""
            typer.echo(f"{wrong}there are {', '.join(self.loaded.slots)}.")
        elif command == "/help":
            typer.echo(HELP)
        else:
            typer.echo(f"unknown command {command}; /help lists them.")

    def _reset(self) -> None:
        self._messages = list(self._opening)

    def _answer(self, text: str) -> None:
        """Prints the answer as it is decoded; a turn that cannot be answered is forgotten."""
        from weft.data.load import prompt_of_chat
        from weft.engine.inference.generate import Request, generate

        backbone = self.loaded.backbone
        messages = [*self._messages, {"role": "user", "content": text}]
        slot = self.loaded.slots[self.adapter]
        tokenizer = backbone.tokenizer_of(slot)
        stream = AnswerStream(tokenizer, self.decoding.stop)
        try:
            template = self.loaded.chat_templates[self.adapter]
            prompt = prompt_of_chat(messages, tokenizer, chat_template=template)
            if len(prompt.tokens) >= backbone.max_positions:
                raise DataError(
                    f"the conversation has {len(prompt.tokens):,} tokens; the model has {backbone.max_positions:,} "
                    "positions. /reset starts a new conversation."
                )
            # A seed per turn: the same turn of another adapter's conversation draws the same.
            request = Request(prompt.tokens.tolist(), slot, seed=len(messages))
            generate(backbone, [request], self.decoding, on_token=stream.take)
        except WeftError as error:
            if not self._interactive:
                raise
            typer.echo(f"error: {error}", err=True)
            return
        except KeyboardInterrupt:
            if not self._interactive:
                raise
            stream.end()
            typer.echo("(stopped)")
        else:
            stream.end()
        self._messages = [*messages, {"role": "assistant", "content": stream.text}]


class AnswerStream:
    """Prints an answer token by token, holding back what is not final: incomplete characters, beginnings of `stops`."""

    def __init__(self, tokenizer: Any, stops: Sequence[str] = ()) -> None:
        from weft.engine.inference.answer_text import AnswerText

        self._answer = AnswerText(lambda tokens: str(tokenizer.decode(tokens, skip_special_tokens=True)))
        self._stops = stops
        self._printed = 0

    @property
    def text(self) -> str:
        from weft.engine.inference.answer_text import before_stop

        whole = self._answer.whole()
        before = before_stop(whole, self._stops)
        return whole if before is None else before

    def take(self, _: int, token: int) -> None:
        from weft.engine.inference.answer_text import before_stop, safe_length

        text = self._answer.add(token)
        if before_stop(text, self._stops) is None:
            self._print(text[: safe_length(text, self._stops)])

    def end(self) -> None:
        """Prints what was held back, and a line end."""
        self._print(self.text)
        typer.echo()

    def _print(self, text: str) -> None:
        typer.echo(text[self._printed :], nl=False)
        sys.stdout.flush()
        self._printed = max(self._printed, len(text))
