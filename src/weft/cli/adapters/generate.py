"""`weft generate`: answers of several adapters to the same prompts, decoded in one batch on the shared backbone."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from weft.cli.user_path import user_path
from weft.errors import ConfigError, StorageError
from weft.report.readable import output_console

if TYPE_CHECKING:
    from weft.data.chat.chat_template import Tokenizer
    from weft.data.prompts import Prompt
    from weft.engine.inference.answers import Answer
    from weft.engine.inference.attach import Attached

COLDEST = 0.001
"""Lowest temperature that is not 0; below it, logits divided by it leave the range of float32."""
MOST_NEW_TOKENS = 10**6
"""Beyond what any model has positions for; an answer ends at the last of the model's own."""

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
TopP = Annotated[float, typer.Option(help="Draw from the smallest set of tokens with this probability.")]
Seed = Annotated[int, typer.Option(help="Seed of the draws when the temperature is above 0.")]
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
    seed: Seed = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            parser=user_path, metavar="PATH", help="Write the answers to this JSONL file.", show_default=False
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answers as JSONL.")] = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Answer prompts with one or several adapters, all in one batch on the shared model."""
    check_decoding(max_new_tokens, temperature, top_p, seed)
    _check_prompts(prompt or [], data)
    if out is not None and (out.is_dir() or not out.parent.is_dir()):
        reason = "is a directory; name a file." if out.is_dir() else "its directory does not exist."
        raise StorageError(reason, where=f"--out {out}")
    from weft.data.rows.find import find_source
    from weft.engine.inference.answers import answers
    from weft.engine.inference.generate import Decoding
    from weft.store.atomic import write_file

    if data is not None:
        # Nobody should wait for the model to hear that it is not there.
        find_source(data, Path())
    with Console(stderr=True).status("loading the model"):
        loaded = load_voices(adapter, base_model, device, dtype)
        prompts = loaded.as_each_reads(lambda reader, template: _prompts(prompt or [], data, reader, template))
        asked = {name: (slot, prompts[name]) for name, slot in loaded.slots.items()}
    decoding = Decoding(max_new_tokens, temperature, top_p, seed)
    with Console(stderr=True).status(f"writing {sum(map(len, prompts.values())):,} answers"):
        given = answers(loaded.backbone, asked, decoding)
    lines = "".join(_json_lines(given))
    if out is not None:
        write_file(out, lines)
    if as_json:
        typer.echo(lines, nl=False)
    elif out is not None:
        typer.echo(f"{lines.count(chr(10)):,} answers are in {out}")
    else:
        _show(given, loaded, output_console())


def check_decoding(max_new_tokens: int, temperature: float, top_p: float, seed: int) -> None:
    """Refuses options no answer can be written with."""
    if not 1 <= max_new_tokens <= MOST_NEW_TOKENS:
        bounds = f"at least 1 and at most {MOST_NEW_TOKENS:,}"
        raise ConfigError(f"must be {bounds}, got {max_new_tokens:,}.", where="--max-new-tokens")
    if temperature != 0 and not COLDEST <= temperature < math.inf:
        raise ConfigError(f"must be 0 or at least {COLDEST}, got {temperature:g}.", where="--temperature")
    if not 0 < top_p <= 1:
        raise ConfigError(f"must be above 0 and at most 1, got {top_p:g}.", where="--top-p")
    if not 0 <= seed < 2**32:
        raise ConfigError(f"must be at least 0 and below {2**32}, got {seed}.", where="--seed")


def load_voices(
    adapters: list[str] | None,
    base_model: str | None,
    device: str,
    dtype: str,
    *,
    with_base: bool = False,
    with_heads: bool = False,
) -> Attached:
    """The model with the adapters of the command line; what users should know about them goes to stderr."""
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
    from weft.data.prompts import load_prompts, prompt_of

    if data is not None:
        return load_prompts(data, tokenizer, chat_template=chat_template, base_dir=Path())
    made = [prompt_of(text, tokenizer, chat_template=chat_template) for text in typed]
    return [dataclasses.replace(item, where=f"--prompt {i}") for i, item in enumerate(made, 1)]


def _json_lines(given: dict[str, list[Answer]]) -> list[str]:
    """One line per answer, prompt by prompt."""
    lines = []
    for row in zip(*given.values(), strict=True):
        for name, answer in zip(given, row, strict=True):
            record = {
                "adapter": name,
                "where": answer.prompt.where,
                "prompt": answer.prompt.text,
                "answer": answer.text,
                "reference": answer.prompt.reference,
            }
            lines.append(json.dumps(record, ensure_ascii=False) + "\n")
    return lines


def _show(given: dict[str, list[Answer]], loaded: Attached, console: Console) -> None:
    """Each prompt, and under it what each adapter writes."""
    tokenizer: Any = loaded.tokenizer(next(iter(given)))
    for row in zip(*given.values(), strict=True):
        asked = row[0].prompt
        question = str(tokenizer.decode(asked.tokens, skip_special_tokens=True)).strip()
        table = Table.grid(padding=(0, 0, 0, 2), pad_edge=True)
        for name, answer in zip(given, row, strict=True):
            table.add_row(Text(name, style="cyan"), Text(answer.text))
        if asked.reference is not None:
            table.add_row(Text("reference", style="dim"), Text(asked.reference, style="dim"))
        console.print(Text(question, style="bold"))
        console.print(table)
        console.print()
