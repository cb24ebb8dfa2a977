"""`python -m benchmarks wall`: which whole runs are timed, and what is read from them.

| regime | run | figures |
|---|---|---|
| tiny | TinyLlama shape, 6 jobs of 40 steps | wall_tiny_cold_s, wall_tiny_warm_s, wall_tiny_vs_trainer, …_vs_trl |
| 8b | Llama-3.1-8B shape, 8 jobs of 20 steps | wall_8b_cold_s, wall_8b_warm_s, wall_8b_vs_trainer, …_vs_trl |
| share | as tiny, 8 jobs of 200 steps, 16 rows evaluated every 50, saved every 25 | wall_share, write_stall_share |
| cpu | the embedded model on the CPU, 2 jobs, 7,473 rows | first_step_cpu_s, …_unprepared_s, …_again_s, …_imports_s |
| prepare | no run: a million rows on 2 cores | prepare_vs_datasets, prepare_1m_s, prepare_again_s, prepare_peak_gb |

*Cold* is a first run on a machine: nothing compiled, not even Python's modules, nothing prepared. *Warm* is the same
command again. *Unprepared* is in between: no data is prepared, but modules are compiled, as `pip install` leaves them.
*Imports* is what torch and transformers' module of the model take alone, compiled; the command imports less of it.
"""

from __future__ import annotations

import importlib.util
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks.figures import Figure, Kind
from benchmarks.processes import timed
from benchmarks.report import (
    JsonFile,
    check_files,
    conclude,
    show,
    write_json,
)
from benchmarks.wall.inputs import WallJobs, WallTime, caches, time_train, write_jobs, write_model, write_problems
from benchmarks.wall.prepare import PrepareTime, time_prepare
from weft.cli.options import user_path
from weft.data.prepared.cache import CACHE_VARIABLE
from weft.data.prepared.key import STABLE_S
from weft.errors import ConfigError, WeftError
from weft.kernels.device import default_device, has_gpu
from weft.plan.cost.shape import find_shape

Show = Callable[[str], None]
EVAL_ROWS = 64
"""Rows held out of each job's data, evaluated at its end, or as often as a case sets."""
PEER_ROWS, PEER_TURNS = 100_000, 3
"""Rows that both prepare, in turn and so often: for the peer, a million would take minutes."""
MILLION = 1_000_000
MODEL_MODULE = "transformers.models.llama.modeling_llama"
"""What the embedded model is made of; it imports torch."""
WRITING = ("checkpoint", "adapter")
"""Spans in which training waits for files."""


@dataclass(frozen=True)
class WallCase:
    """One run to time."""

    shape: str
    jobs: WallJobs
    needs_gpu: bool = True


PREPARE = "prepare"
CASES = {
    "tiny": WallCase("tinyllama-1.1b", WallJobs(6, 40, {"eval_data": EVAL_ROWS})),
    "8b": WallCase("llama-3.1-8b", WallJobs(8, 20, {"eval_data": EVAL_ROWS})),
    "share": WallCase("tinyllama-1.1b", WallJobs(8, 200, {"eval_data": 16, "eval_steps": 50, "save_steps": 25})),
    "cpu": WallCase("tiny", WallJobs(2, 4), needs_gpu=False),
}


def choose_cases(names: Sequence[str], *, has_gpu: bool) -> list[str]:
    """The cases of those names; all that this machine can run if there are none."""
    for name in names:
        if name not in (*CASES, PREPARE):
            raise ConfigError(f"got {name!r}; accepted are {', '.join((*CASES, PREPARE))}.", where="--regime")
        if needs_gpu(name) and not has_gpu:
            raise ConfigError(f"{name} needs a CUDA GPU and torch sees none; cpu runs anywhere.", where="--regime")
    return list(names) or [*(name for name, case in CASES.items() if has_gpu or not case.needs_gpu), PREPARE]


def needs_gpu(name: str) -> bool:
    """Whether a case is measured on a GPU."""
    return name != PREPARE and CASES[name].needs_gpu


class WallSession:
    """Times whole runs in a folder of its own, which goes when all is done."""

    def __init__(
        self, folder: Path, device: torch.device, *, data: Path | None, num_rows: int, peers: bool, show: Show
    ) -> None:
        self.folder = folder
        self.device = device
        self.peers = peers
        self.show = show
        self._data, self._num_rows = data, num_rows
        self._num_runs = 0

    @classmethod
    @contextmanager
    def open(
        cls, device: torch.device, *, data: Path | None, num_rows: int, peers: bool, show: Show
    ) -> Iterator[WallSession]:
        """A session whose files are deleted at its end."""
        with tempfile.TemporaryDirectory(prefix="weft-wall-") as folder:
            yield cls(Path(folder), device, data=data, num_rows=num_rows, peers=peers, show=show)

    @cached_property
    def data(self) -> Path:
        """The data file of all jobs."""
        if self._data is not None:
            return self._data.resolve()
        path = self.folder / "problems.jsonl"
        write_problems(path)
        return path

    def measure(self, name: str) -> list[Figure]:
        """The figures of one case."""
        if name == PREPARE:
            return self._measure_preparing()
        case = CASES[name]
        jobs_file = self._inputs(name, case)
        kept = self.folder / f"{case.shape}-caches"
        if name == "share" and kept.exists():
            # Only its warm run counts, and the same kernels have been compiled.
            warm = self.train(f"{name}, warm", jobs_file, kept)
            return figures(name, warm, warm)
        shutil.rmtree(kept, ignore_errors=True)
        first = self.train(f"{name}, cold", jobs_file, kept)
        found = self._measure_unprepared(name, jobs_file, kept) if name == "cpu" else []
        warm = self.train(f"{name}, warm", jobs_file, kept)
        found += figures(name, first, warm)
        if name == "cpu":
            found.append(self._measure_imports(kept))
        if self.peers and name in ("tiny", "8b"):
            found.append(self._peer(name, jobs_file, warm, "trainer", "Trainer with PEFT"))
            if importlib.util.find_spec("trl") is not None:
                found.append(self._peer(name, jobs_file, warm, "trl", "TRL's SFTTrainer"))
        return found

    def train(self, title: str, jobs_file: Path, kept: Path) -> WallTime:
        """One `weft train`, with whatever earlier ones kept in that folder."""
        self._num_runs += 1
        out = self.folder / f"run-{self._num_runs}"
        found = time_train(jobs_file, out, caches(kept))
        self.show(f"{title}: {found.line}")
        shutil.rmtree(out)
        return found

    def _measure_unprepared(self, name: str, jobs_file: Path, kept: Path) -> list[Figure]:
        """The same command where only data is prepared again."""
        shutil.rmtree(caches(kept)[CACHE_VARIABLE])
        found = self.train(f"{name}, unprepared", jobs_file, kept)
        return [Figure("first_step_cpu_unprepared_s", found.before_first_s, Kind.SECONDS)]

    def _measure_imports(self, kept: Path) -> Figure:
        """The libraries alone, in a process that does nothing else."""
        seconds = timed([MODEL_MODULE], caches(kept), self.folder / "imports.log")
        self.show(f"importing {MODEL_MODULE} alone: {seconds:.1f} s")
        return Figure("first_step_cpu_imports_s", seconds, Kind.SECONDS)

    def _measure_preparing(self) -> list[Figure]:
        """Rows prepared for the first time and again; some of them beside `datasets.map` where that is installed."""
        file = self._rows_file(self._num_rows)
        kept = {CACHE_VARIABLE: str(self.folder / "prepared")}
        first, again = self._prepare("weft", file, kept), self._prepare("weft", file, kept)
        pairs = []
        if self.peers and importlib.util.find_spec("datasets") is None:
            self.show("datasets is not installed, so nothing is timed beside")
        elif self.peers:
            some = self._rows_file(min(PEER_ROWS, self._num_rows))
            pairs = [self._prepare_both(some, self.folder / f"turn-{turn}") for turn in range(PEER_TURNS)]
        return prepare_figures(first, again, pairs)

    def _rows_file(self, num_rows: int) -> Path:
        file = self.folder / f"{num_rows}.jsonl"
        write_problems(file, num_rows)
        # The digest of a file that has only just been written is not remembered.
        time.sleep(STABLE_S)
        return file

    def _prepare_both(self, file: Path, kept: Path) -> tuple[PrepareTime, PrepareTime]:
        """Ours and the peer's, each for the first time."""
        ours = self._prepare("weft", file, {CACHE_VARIABLE: str(kept / "weft")})
        peer = self._prepare("datasets", file, {"HF_DATASETS_CACHE": str(kept / "datasets")})
        shutil.rmtree(kept)
        return ours, peer

    def _prepare(self, program: str, file: Path, variables: dict[str, str]) -> PrepareTime:
        found = time_prepare(program, file, variables)
        self.show(f"{program}: {found.line}")
        return found

    def _inputs(self, name: str, case: WallCase) -> Path:
        model: Path | str = "tiny"
        if case.shape != "tiny":
            model = self.folder / case.shape
            if not model.exists():
                write_model(model, find_shape(case.shape), self.device)
        jobs_file = self.folder / f"{name}.yaml"
        write_jobs(jobs_file, model, case.jobs, self.data)
        return jobs_file

    def _peer(self, name: str, jobs_file: Path, ours: WallTime, peer: str, called: str) -> Figure:
        """The same jobs one after another with a peer, and PEFT."""
        out = self.folder / f"{name}-{peer}"
        seconds = timed(["benchmarks.wall.trainer", str(jobs_file), str(out), peer], {}, out.with_suffix(".log"))
        self.show(f"{name}, {called}: {seconds:.1f} s")
        return Figure(f"wall_{name}_vs_{peer}", seconds / ours.wall_s, Kind.SPEEDUP, detail=f"{called} {seconds:.1f} s")


def prepare_figures(
    first: PrepareTime, again: PrepareTime, pairs: Sequence[tuple[PrepareTime, PrepareTime]]
) -> list[Figure]:
    """Times of preparing the same rows twice, and turns of fewer rows beside the peer."""
    scaled = "" if first.num_samples == MILLION else f"scaled from {first.num_samples:,} rows"
    found = [
        Figure("prepare_1m_s", first.seconds * MILLION / first.num_samples, Kind.SECONDS, detail=scaled),
        Figure("prepare_again_s", again.seconds, Kind.SECONDS, 2.0),
        Figure("prepare_peak_gb", first.peak_bytes / 1e9, Kind.PEAK_GB, 1.0),
    ]
    if not pairs:
        return found
    for ours, peer in pairs:
        if (peer.num_samples, peer.num_tokens) != (ours.num_samples, ours.num_tokens):
            raise WeftError(f"datasets made {peer.num_tokens:,} tokens, weft {ours.num_tokens:,}.", where="prepare")
    ratio = statistics.median(peer.seconds / ours.seconds for ours, peer in pairs)
    processors = statistics.median(peer.cpu_s / ours.cpu_s for ours, peer in pairs)
    return [
        Figure("prepare_vs_datasets", ratio, Kind.SPEEDUP, 2.0, detail=f"median of {len(pairs)} turns"),
        Figure("prepare_vs_datasets_cpu", processors, Kind.SPEEDUP, detail="the same in processor time"),
        *found,
    ]


def figures(name: str, cold: WallTime, warm: WallTime) -> list[Figure]:
    """Results of two runs of a case."""
    if name == "cpu":
        return [
            Figure("first_step_cpu_s", cold.before_first_s, Kind.SECONDS, 8.0),
            Figure("first_step_cpu_again_s", warm.before_first_s, Kind.SECONDS, 5.0),
        ]
    if name == "share":
        computing = warm.spans.get("forward_backward", 0.0) + warm.spans.get("step", 0.0)
        waiting = sum(warm.spans.get(kind, 0.0) for kind in WRITING)
        return [
            Figure("wall_share", computing / warm.training_s, Kind.SHARE, 0.95),
            Figure("write_stall_share", waiting / warm.training_s, Kind.WASTE, 0.01),
        ]
    targets = {"wall_tiny_cold_s": 45.0, "wall_tiny_warm_s": 25.0, "wall_8b_warm_s": 75.0}
    seconds = {f"wall_{name}_cold_s": cold.wall_s, f"wall_{name}_warm_s": warm.wall_s}
    return [Figure(key, value, Kind.SECONDS, targets.get(key)) for key, value in seconds.items()]


def wall(
    regime: Annotated[list[str] | None, typer.Option(help="tiny, 8b, share, cpu or prepare; may be repeated.")] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            parser=user_path,
            metavar="PATH",
            help="Data file of the jobs. Default: made-up problems as long as GSM8K's.",
        ),
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="Rows that regime prepare makes and prepares.")] = 1_000_000,
    peers: Annotated[
        bool, typer.Option(help="Also time transformers' Trainer with PEFT, and datasets.map, on the same data.")
    ] = True,
    json: JsonFile = None,
) -> None:
    """Whole runs of `weft train` from the command to the last adapter, cold and warm; and preparing many rows."""
    names = choose_cases(regime or [], has_gpu=has_gpu())
    check_files(json, None)
    if data is not None and not data.is_file():
        raise ConfigError("there is no such file.", where=f"--data {data}")
    device = default_device()
    found_figures: list[Figure] = []
    with WallSession.open(device, data=data, num_rows=rows, peers=peers, show=show) as session:
        for name in names:
            found = session.measure(name)
            found_figures += found
            for figure in found:
                show(f"  {figure.line}")
            if json is not None:
                values = {figure.key: figure.value for figure in found}
                if needs_gpu(name):
                    write_json(json, values, device)
                else:
                    write_json(json, values, torch.device("cpu"), key="machine_cpu")
    raise typer.Exit(conclude(found_figures, [], device, None))
