"""`weft worker`: trains the jobs of a service; `weft serve` starts one by itself, clusters start them one by one."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli.options import path_option
from weft.cli.service.serve import DbUrl, FileMemory, FileSeconds, SamplingShare, StoreUrl, WorkerLayout, check_home
from weft.errors import ConfigError, MissingExtraError, install_command

if TYPE_CHECKING:
    from weft.cli.layout_options import LayoutOptions
    from weft.serve.worker.worker import Worker
    from weft.spec import BackboneSpec

AT_ONCE = 75
"""Exit code of a worker after a second signal: its jobs go on elsewhere when their leases run out."""
REPEAT_S = 2.0
"""Signals within this time after the first count as the same: supervisor, its end and terminal each send one."""


class StopSignals:
    """SIGTERM and Ctrl-C: the first lets the worker finish its step and give its jobs back, the second ends it. A
    worker whose model is still being loaded has nothing to give back and ends at once."""

    def __init__(self) -> None:
        self._worker: Worker | None = None
        self.is_set = False
        self._at = 0.0
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    @property
    def worker(self) -> Worker | None:
        return self._worker

    @worker.setter
    def worker(self, worker: Worker) -> None:
        self._worker = worker
        if self.is_set:
            # The signal came before, but an exit that is raised inside a destructor is lost.
            worker.stop()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.is_set and time.monotonic() - self._at > REPEAT_S:
            os._exit(AT_ONCE)
        if not self.is_set:
            self.is_set, self._at = True, time.monotonic()
        if self.worker is None:
            raise SystemExit(0)
        self.worker.stop()


def worker(
    data_dir: Annotated[Path, path_option("Directory for the worker's files.")] = Path("weft-data"),
    db: DbUrl = "",
    store: StoreUrl = "",
    base_model: Annotated[
        str, typer.Option(metavar="NAME[=MODEL]", help="Name of the frozen model in the API, and the model.")
    ] = "tiny",
    max_jobs: Annotated[int, typer.Option(help="Most jobs that train at a time; 0: it only answers prompts.")] = 32,
    sampling_share: SamplingShare = 0.25,
    capacity: Annotated[
        str, typer.Option(help="Most tokens of a microbatch; auto: 2048 on a CPU, 8192 on a GPU, less on a small one.")
    ] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    quantize: Annotated[str, typer.Option(help="Bits of the frozen weights: none, fp8, int8 or nf4.")] = "none",
    memory_limit: Annotated[
        str | None, typer.Option(help="Most GPU memory, such as 40GB or 0.5.", show_default=False)
    ] = None,
    layout: WorkerLayout = None,
    check: Annotated[bool, typer.Option("--check", hidden=True)] = False,
    host: Annotated[str, typer.Option(help="Address on which the worker answers prompts of the API.")] = "127.0.0.1",
    lease: Annotated[float, typer.Option(help="Seconds of silence after which others take its jobs.")] = 30.0,
    pulse: Annotated[float, typer.Option(help="Seconds between two signs of life.")] = 0.5,
    grace: Annotated[float, typer.Option(help="Seconds in which a stopped worker gives its jobs back.")] = 30.0,
    file_seconds: FileSeconds = 600.0,
    file_memory: FileMemory = 4.0,
) -> None:
    """Train the jobs of a service and answer its prompts, until stopped."""
    try:
        import sqlalchemy  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        hint = f"Install it: {install_command('serve')}."
        raise MissingExtraError(f"a worker needs {error.name}.", hint=hint) from None
    signals = StopSignals()
    name, equals, model = base_model.partition("=")
    if not name or (equals and not model):
        raise ConfigError(f"got {base_model!r}; write NAME or NAME=MODEL.", where="--base-model")
    from weft.data.prepared.cache import CACHE_VARIABLE
    from weft.serve.api.observe import log_json
    from weft.serve.blobs import Blobs
    from weft.serve.db.engine import migrate, open_database
    from weft.serve.limited_process import FileLimits
    from weft.serve.settings import Settings, WorkerOptions
    from weft.serve.supervise import DISMISSED
    from weft.settings import convert
    from weft.spec import BackboneSpec
    from weft.spec.run import Capacity

    backbone = BackboneSpec(model or name, dtype, device, quantize)
    divided = None if layout is None else _choose_layout(layout, backbone, memory_limit)
    if check:
        typer.echo("" if divided is None else divided.layout or "")
        return
    settings = Settings(data_dir, db, store, {name: model or name})
    options = WorkerOptions(
        settings.data_dir.resolve(),
        name,
        backbone,
        convert(capacity, Capacity, "--capacity"),
        max_jobs,
        sampling_share,
        memory_limit,
        None if divided is None else divided.stages,
        lease_s=lease,
        pulse_s=pulse,
        grace_s=grace,
        file_limits=FileLimits(file_seconds, int(file_memory * 2**30)),
        host=host,
    )
    check_home(data_dir, db)
    # Data prepared from tenants' files stays in the service's directory.
    os.environ.setdefault(CACHE_VARIABLE, str(options.data_dir / "prepared"))
    log_json()
    database = open_database(settings.db_url)
    migrate(database)
    from weft.cli.watch import retry_on_replica_loss
    from weft.serve.worker.worker import LOG, Worker
    from weft.store.wall_clock import WallClock, process_start_s

    def attempt(_: bool, wall: WallClock, num_lessened: int) -> Worker:
        signals.worker = made = Worker(options.again(num_lessened), database, Blobs(settings.store_url), wall)
        made.run()
        return made

    trains = retry_on_replica_loss(attempt, WallClock(process_start_s()), LOG.warning)
    database.close()
    if trains.sync.is_dismissed:
        raise typer.Exit(DISMISSED)


NUM_USUAL_JOBS = 8
"""Jobs for which `--layout auto` chooses."""


def _choose_layout(text: str, backbone: BackboneSpec, memory_limit: str | None) -> LayoutOptions:
    """ConfigError or ModelError for a layout that a worker cannot have, before any weight is read."""
    from weft.cli.layout_options import LayoutOptions
    from weft.engine.execute.memory import USUAL_RANK
    from weft.model.resolve import resolve
    from weft.parallel.auto_layout import machine_here
    from weft.parallel.stages.load_stages import find_parts
    from weft.spec import AdapterSpec, JobSpec, RunSpec

    usual = [
        JobSpec(f"usual-{k}", train_data=("unknown.jsonl",), adapter=AdapterSpec(r=USUAL_RANK))
        for k in range(NUM_USUAL_JOBS)
    ]
    spec = RunSpec(
        backbone.base_model,
        tuple(usual),
        dtype=backbone.dtype,
        device=backbone.device,
        quantize=backbone.quantize,
        memory_limit=memory_limit,
    )
    model = resolve(backbone)

    def check(options: LayoutOptions) -> None:
        options.check(spec, (), model)
        if options.stages is not None:
            for each in zip(options.stages.replica_sizes, options.stages.degrees, strict=True):
                find_parts(model, *each)

    options = LayoutOptions(text)
    if options.is_auto:
        return options.choose(spec, model, Path(), machine_here(spec), check)[0]
    check(options)
    return options
