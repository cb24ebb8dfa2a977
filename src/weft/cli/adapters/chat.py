"""`weft chat`: a conversation with an adapter in the terminal, token by token."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from weft.cli.adapters.generate import (
    Adapters,
    BaseModel,
    Device,
    Dtype,
    MaxNewTokens,
    Seed,
    Temperature,
    TopP,
    check_decoding,
    load_voices,
)
from weft.errors import DataError, WeftError

if TYPE_CHECKING:
    from weft.engine.inference.attach import Attached
    from weft.engine.inference.generate import Decoding

HELP = """\
/adapter NAME  talk to another adapter; the conversation starts anew
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
    seed: Seed = 0,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Talk to an adapter; switch between several with /adapter NAME."""
    check_decoding(max_new_tokens, temperature, top_p, seed)
    with Console(stderr=True).status("loading the model"):
        from weft.engine.inference.generate import Decoding

        loaded = load_voices(adapter, base_model, device, dtype)
    interactive = sys.stdin.isatty()
    talk = Talk(loaded, Decoding(max_new_tokens, temperature, top_p, seed), system, interactive=interactive)
    if interactive:
        with contextlib.suppress(ImportError):
            # Gives input() its line editing and history.
            import readline  # noqa: F401
        typer.echo(f"{talk.introduction} /help shows what else you can do.")
    while not talk.is_over:
        try:
            talk.hear(input(f"{talk.voice}> " if interactive else ""))
        except EOFError:
            break
        except KeyboardInterrupt:
            if not interactive:
                raise
            break
    if interactive and not talk.is_over:
        typer.echo()


class Talk:
    """One conversation, and who is talking."""

    def __init__(self, loaded: Attached, decoding: Decoding, system: str | None, *, interactive: bool) -> None:
        """Mistakes and Ctrl-C end a conversation that is not interactive: nobody is there to try again."""
        self.loaded = loaded
        self.decoding = decoding
        self.voice = next(iter(loaded.slots))
        """Name of the adapter that answers."""
        self.is_over = False
        self._interactive = interactive
        self._opening = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._opening)

    @property
    def introduction(self) -> str:
        """Who is here."""
        names = ", ".join(self.loaded.slots)
        several = f"Adapters: {names}. " if len(self.loaded.slots) > 1 else ""
        return f"{several}You talk to {self.voice} on {self.loaded.backbone.name}."

    def hear(self, line: str) -> None:
        """Does what one typed line asks for."""
        text = line.strip()
        if text.startswith("/"):
            self._obey(*text.split(maxsplit=1))
        elif text:
            self._answer(text)

    def _obey(self, command: str, argument: str = "") -> None:
        if command in ("/quit", "/exit"):
            self.is_over = True
        elif command == "/reset":
            self._reset()
            typer.echo("The conversation starts anew.")
        elif command == "/adapter" and argument in self.loaded.slots:
            # What another adapter wrote would lead this one astray.
            self.voice = argument
            self._reset()
            typer.echo(f"You talk to {argument}; the conversation starts anew.")
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
        """Writes the answer as it comes; a turn that cannot be answered is forgotten."""
        from weft.data.prompts import prompt_of_chat
        from weft.engine.inference.generate import Request, generate

        backbone = self.loaded.backbone
        messages = [*self._messages, {"role": "user", "content": text}]
        slot = self.loaded.slots[self.voice]
        tokenizer = backbone.tokenizer_of(slot)
        stream = AnswerStream(tokenizer)
        try:
            template = self.loaded.chat_templates[self.voice]
            prompt = prompt_of_chat(messages, tokenizer, chat_template=template)
            if len(prompt.tokens) >= backbone.max_positions:
                raise DataError(
                    f"the conversation has {len(prompt.tokens):,} tokens; the model has {backbone.max_positions:,} "
                    "positions. /reset starts anew."
                )
            # Each turn draws anew, and the same turn of another adapter's conversation draws the same.
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
    """Prints an answer token by token, holding back characters that are not complete yet."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._printed = 0

    @property
    def text(self) -> str:
        """The whole answer so far."""
        return str(self._tokenizer.decode(self._tokens, skip_special_tokens=True))

    def take(self, _: int, token: int) -> None:
        """Hears one more token."""
        self._tokens.append(token)
        # A character of several tokens decodes to U+FFFD until its last one.
        self._print(self.text.rstrip("\N{REPLACEMENT CHARACTER}"))

    def end(self) -> None:
        """Prints what was held back, and a line end."""
        self._print(self.text)
        typer.echo()

    def _print(self, text: str) -> None:
        typer.echo(text[self._printed :], nl=False)
        sys.stdout.flush()
        self._printed = max(self._printed, len(text))
