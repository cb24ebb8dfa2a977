"""`weft init`: a commented jobs file that trains as it is, with the data it names."""

from __future__ import annotations

import contextlib
import json
import shlex
from pathlib import Path
from typing import Annotated

import typer

from weft.cli.user_path import user_path
from weft.errors import StorageError

SKILLS = ("shout", "reverse")
"""The example jobs; each has a data file of its own."""
NUM_ROWS = 1000

JOBS_FILE = """\
# Adapters that learn together on one frozen model. Check this file, then train:
#
#   weft train {file} --dry-run
#   weft train {file}
#
# `weft config` explains every setting. Lines that start with #: are examples to switch on.

# The frozen model: tiny (embedded, to try things out), a model directory, or a name on the Hugging Face Hub.
base_model: tiny

# Where results go: one directory per job, and report.html.
output_dir: runs/first

#: device: cpu
#: report_to: [tensorboard]

# Settings of every job that does not say otherwise.
defaults:
  max_steps: 60
  global_batch_size: 8
  learning_rate: 4e-3
  max_length: 128
  # A fraction or a number of samples to split off for evaluation, or a file.
  eval_data: 32
  adapter:
    r: 8
    #: lora_dropout: 0.05
    #: target_modules: [q_proj, k_proj, v_proj, o_proj]

# One adapter each. Data may be chats, prompt and completion, Alpaca, ShareGPT or text, as jsonl, ndjson, json,
# csv, tsv, parquet or txt.
jobs:
  - name: shout
    train_data: data/shout.jsonl

  - name: reverse
    train_data: data/reverse.jsonl
    # Anything set here is this job's own.
    learning_rate: 3e-3
    #: seed: 7
"""


def init(
    file: Annotated[Path, typer.Argument(parser=user_path, metavar="PATH", help="The jobs file to write.")] = Path(
        "jobs.yaml"
    ),
    force: Annotated[bool, typer.Option("--force", help="Replace files that exist.")] = False,
) -> None:
    """Write a commented jobs file that runs as it is, and two small data files for it."""
    from weft.store.atomic import forget, make_directories, storage_errors, write_file

    data = {file.parent / "data" / f"{name}.jsonl": _rows(name) for name in SKILLS}
    shown = shlex.quote(str(file))
    texts = {**data, file: JOBS_FILE.format(file=shown)}
    with storage_errors(file):
        existing = [path for path in texts if path.exists()]
    if existing and not force:
        raise StorageError("already exists.", where=str(existing[0]), hint="Use --force to replace it.")
    with contextlib.ExitStack() as undo:
        for path, text in texts.items():
            make_directories(path.parent, undo)
            if path not in existing:
                undo.callback(forget, path.unlink)
            write_file(path, text)
        undo.pop_all()
    examples = " and ".join(str(path) for path in data)
    typer.echo(f"wrote {file}, and example data for it: {examples}")
    typer.echo(f"next: weft train {shown}")


def _rows(skill: str) -> str:
    from weft.cli.demo.skills import SKILLS as ALL

    return "".join(json.dumps(row) + "\n" for row in ALL[skill].rows(0, NUM_ROWS))
