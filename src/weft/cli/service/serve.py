"""`weft serve`: the fine-tuning service, with its workers as child processes."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli.options import Cluster, GpuType, on_cluster_devices, path_option
from weft.errors import ConfigError, MissingExtraError, counted, install_command
from weft.plan.layout import AUTO, parse_layout
from weft.processes import VISIBLE, check_cpu_processes, choose_gpus, number_or_auto, visible_gpus
from weft.spec.run import EMBEDDED

if TYPE_CHECKING:
    from weft.serve.db.engine import Database
    from weft.serve.settings import Settings
    from weft.serve.supervise import ClusterWorkers, Supervisor

WORKER_GRACE_S = 60.0
CLEAN_UP_EVERY_S = 24 * 3600.0
MOST_SHOWN = 10
"""Adapters that are named at the start."""


def read_secret(text: str) -> str:
    """The option's value; for `@PATH` the contents of that file, since every user of a machine sees command lines."""
    if not text.startswith("@"):
        return text
    try:
        return Path(text[1:]).read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise ConfigError(f"{text[1:]} cannot be read ({reason}).", where="--db") from None


DbUrl = Annotated[
    str,
    typer.Option(
        "--db",
        help="sqlite:///PATH or postgresql://…; @FILE reads it from a file.",
        envvar="WEFT_DB",
        show_default="in --data-dir",
        callback=read_secret,
    ),
]
StoreUrl = Annotated[
    str, typer.Option("--store", help="Directory or fsspec URL of the file store.", envvar="WEFT_STORE")
]
FileSeconds = Annotated[
    float, typer.Option(help="Most seconds that reading one job's files may take.", min=0.001, max=1e6)
]
SamplingShare = Annotated[
    float, typer.Option(help="Time for chats while jobs train, as a share of the time that training takes.")
]
FileMemory = Annotated[float, typer.Option(help="Most GiB that reading one job's files may take.", min=0.001, max=1e6)]
WorkerLayout = Annotated[
    str | None,
    typer.Option(
        metavar="stages:2",
        help="Devices of each worker, and how they share its backbone: stages:N, shards:N, tensor:N, spread:N, "
        "combinations as in `weft train`, or auto.",
    ),
]
DataDir = Annotated[Path, path_option("Home of the database, the files and the workers.")]


def serve(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 is any free one.", min=0, max=65535)] = 8000,
    data_dir: DataDir = Path("weft-data"),
    base_model: Annotated[
        list[str] | None,
        typer.Option(metavar="[NAME=]PATH", help="A backbone that may be trained; repeat for several.  [tiny]"),
    ] = None,
    adapters: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Serve the adapters in a directory or at a URL too, to all tenants."),
    ] = None,
    no_training: Annotated[bool, typer.Option("--no-training", help="Answer prompts only.")] = False,
    sampler: Annotated[
        str | None, typer.Option(metavar="URL", help="A vLLM or SGLang server that answers prompts, with adapters.")
    ] = None,
    db: DbUrl = "",
    store: StoreUrl = "",
    no_auth: Annotated[bool, typer.Option("--no-auth", help="All clients are one tenant; on loopback only.")] = False,
    workers: Annotated[
        str, typer.Option(metavar="N", help="Worker processes for each backbone; auto: one on every GPU.")
    ] = "1",
    devices: Annotated[
        str | None, typer.Option(metavar="LIST", help="The GPUs of the workers, in turn, such as 0,2.  [all]")
    ] = None,
    layout: WorkerLayout = None,
    cluster: Cluster = None,
    gpu_type: GpuType = None,
    api_processes: Annotated[int, typer.Option(help="Processes that answer requests.", min=1, max=256)] = 1,
    sampling_share: SamplingShare = 0.25,
    min_samples: Annotated[int, typer.Option(help="Fewest lines of a training file.", min=1)] = 1,
    file_seconds: FileSeconds = 600.0,
    file_memory: FileMemory = 4.0,
    migrate_only: Annotated[
        bool, typer.Option("--migrate-only", help="Bring the database up to date, and end.")
    ] = False,
    api_fd: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Serve fine-tuning to many tenants with OpenAI's API."""
    need_serve()
    from weft.serve.db.engine import migrate
    from weft.serve.limited_process import FileLimits
    from weft.serve.settings import ServiceLimits, Settings

    if adapters is not None:
        adapters = _adapters_root(adapters)
    settings = Settings(
        data_dir=data_dir,
        db=db,
        store=store,
        base_models=_models(base_model, adapters, sampler),
        host=host,
        port=port,
        auth=not no_auth,
        api_processes=api_processes,
        limits=ServiceLimits(min_samples=min_samples),
        file_limits=FileLimits(file_seconds, int(file_memory * 2**30)),
        sampling_share=sampling_share,
        training=not no_training,
        adapters=adapters,
        sampler=None if sampler is None else sampler.rstrip("/").removesuffix("/v1"),
    )
    if cluster is not None and devices is not None:
        raise on_cluster_devices("--workers")
    if cluster is None and gpu_type is not None:
        raise ConfigError("is for a cluster; give --cluster, or use --devices.", where="--gpu-type")
    if cluster is not None and layout is not None:
        raise ConfigError("is for workers of this machine; those of a cluster have one device each.", where="--layout")
    if no_training and sampler is not None:
        workers = "0"
    num_models = len(settings.base_models)
    environments = [] if cluster is not None else worker_environments(workers, devices, num_models, layout)
    database = open_home(settings)
    if migrate_only:
        typer.echo(f"the database is at revision {migrate(database)}")
        return
    if api_fd is not None:
        _run_api(settings, database, socket.socket(fileno=api_fd))
        return
    from weft.serve.api.app import listen
    from weft.serve.blobs import Blobs
    from weft.serve.db.tenants import first_key

    # All checks come before the first key is made, since it is shown only once.
    Blobs(settings.store_url)
    if environments or cluster:
        _check_models(settings.base_models)
    layouts = {}
    if layout is not None and environments:
        each = len(environments) // num_models
        names = enumerate(settings.base_models)
        layouts = {name: _checked_layout(layout, settings, name, environments[k * each]) for k, name in names}
    on_cluster = None if cluster is None else _on_cluster(cluster, gpu_type, workers, settings)
    with listen(host, port) as sock:
        migrate(database)
        _greet(settings, sock, first_key(database, auth=settings.auth))
        clean = _run(settings, database, sock, environments, layouts, on_cluster)
    raise typer.Exit(0 if clean else 1)


def need_serve() -> None:
    """MissingExtraError if a package of the service is not installed."""
    try:
        import alembic  # noqa: F401
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import python_multipart  # noqa: F401
        import sqlalchemy  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        hint = f"Install it: {install_command('serve')}."
        raise MissingExtraError(f"the service needs {error.name}.", hint=hint) from None


def worker_environments(
    workers: str, devices: str | None, num_models: int, layout: str | None = None
) -> list[dict[str, str]]:
    """Environment variables of each worker, backbone by backbone: GPUs are given out in turn, to each worker as many as
    its layout has."""
    gpus = choose_gpus(devices, visible_gpus())
    number = number_or_auto(workers, "--workers", 0)
    if layout == AUTO:
        each = max(1, len(gpus) // max(1, (number or 1) * num_models))
    else:
        each = 1 if layout is None else parse_layout(layout, where="--layout", or_auto=True).num_devices
    if number is None:
        number = max(1, len(gpus) // each)
    check_cpu_processes(number * num_models, "--workers")
    if 0 < len(gpus) < each:
        raise ConfigError(f"{layout} has {each} devices, and there are {counted(len(gpus), 'GPU')}.", where="--layout")
    own = [[gpus[(i * each + k) % len(gpus)] for k in range(each)] if gpus else [] for i in range(number * num_models)]
    return [{VISIBLE: ",".join(mine)} if mine else {} for mine in own]


def _on_cluster(cluster: str, gpu_type: str | None, workers: str, settings: Settings) -> ClusterWorkers:
    number = number_or_auto(workers, "--workers", 1)
    from weft.serve.supervise import find_workers

    return find_workers(cluster, number, len(settings.base_models), db_url=settings.db_url, gpu_type=gpu_type)


def _adapters_root(given: str) -> str:
    """The URL, or the directory, which must be there."""
    if "://" in given:
        return given.rstrip("/")
    if not Path(given).is_dir():
        raise ConfigError(f"there is no directory {given}.", where="--adapters")
    return str(Path(given).resolve())


def _models(given: list[str] | None, adapters: str | None, sampler: str | None) -> dict[str, str]:
    """The backbones by name; by default that of the adapters to serve, or the tiny one."""
    if not given and adapters is None and sampler is not None:
        raise ConfigError("name the model that this server has by --base-model.", where="--sampler")
    if given or adapters is None:
        return parse_models(given or ["tiny"])
    from weft.serve.adapter_folders import common_base

    return parse_models([common_base(adapters)])


def parse_models(texts: list[str]) -> dict[str, str]:
    """Models by name, from `name=path`; the name of a directory alone is its last component."""
    models: dict[str, str] = {}
    for text in texts:
        name, equals, path = text.partition("=")
        if not equals:
            name, path = (Path(text).resolve().name if Path(text).is_dir() else text), text
        if not name or not path:
            raise ConfigError(f"{text!r} is not NAME=PATH.", where="--base-model")
        if name in models:
            raise ConfigError(f"two backbones are called {name!r}.", where="--base-model")
        models[name] = path
    return models


def _check_models(models: Mapping[str, str]) -> None:
    """ConfigError for a model that is neither a Hub name nor a directory, before workers are started for it."""
    for name, path in models.items():
        is_hub_name = path.count("/") == 1 and not path.startswith((".", "/", "~"))
        if path not in EMBEDDED and not is_hub_name and not Path(path).expanduser().exists():
            hint = f"Accepted are {', '.join(EMBEDDED)}, a directory with config.json, or a Hub name (owner/name)."
            raise ConfigError(f"{name}: there is no directory {path}.", where="--base-model", hint=hint)


def check_home(data_dir: Path, db: str) -> None:
    """ConfigError if the database would be a new one in a directory that no service has made."""
    if not db and not data_dir.is_dir():
        raise ConfigError("there is no such directory; name the one of `weft serve`.", where=f"--data-dir {data_dir}")


def open_home(settings: Settings) -> Database:
    from weft.serve.db.engine import open_database
    from weft.store.atomic import storage_errors

    with storage_errors(settings.data_dir):
        settings.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    return open_database(settings.db_url)


def _greet(settings: Settings, sock: socket.socket, key: str | None) -> None:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    address = f"http://{host}:{sock.getsockname()[1]}"
    typer.echo(f"serving   {address}/v1")
    typer.echo(f"dashboard {address}/")
    typer.echo(f"models    {', '.join(settings.base_models)}")
    if settings.sampler is not None:
        typer.echo(f"sampler   {settings.sampler}")
    if settings.adapters is not None:
        _greet_adapters(settings)
    typer.echo(f"data      {settings.data_dir.resolve()}")
    if key is not None:
        typer.echo(f"key       {key}")
        typer.echo("          shown this once; `weft keys create` makes more")
    elif not settings.auth:
        typer.echo("key       none needed: all who reach this address may do everything")


def _greet_adapters(settings: Settings) -> None:
    """Shows the adapters that are there, and what is wrong with the others."""
    from weft.serve.adapter_folders import adapters_below, row_of

    found = adapters_below(str(settings.adapters))
    errors = {name: row_of(own, settings.base_models)["error"] for name, own in found.items()}
    names = [name for name, error in errors.items() if error is None]
    shown = ", ".join(names[:MOST_SHOWN]) + (f" and {len(names) - MOST_SHOWN} more" if names[MOST_SHOWN:] else "")
    typer.echo(f"adapters  {shown or 'none yet'}")
    for name, error in [each for each in errors.items() if each[1] is not None][:MOST_SHOWN]:
        typer.echo(f"          not {name}: {error}")


def _run(
    settings: Settings,
    database: Database,
    sock: socket.socket,
    environments: Sequence[Mapping[str, str]],
    layouts: Mapping[str, str],
    on_cluster: ClusterWorkers | None,
) -> bool:
    """Serves with a worker per environment, or on a cluster, until a signal; True if all processes ended well."""
    from weft.serve.api.observe import log_json
    from weft.serve.folder_scan import FolderScan
    from weft.serve.supervise import Child, Supervisor

    log_json()
    num_workers = (len(environments) if on_cluster is None else on_cluster.number) // len(settings.base_models)
    names = [(name, path, i) for name, path in settings.base_models.items() for i in range(num_workers)]
    workers = {
        f"worker-{name}-{i}": _worker_arguments(settings, name, path, layouts.get(name, "")) for name, path, i in names
    }
    children = []
    if on_cluster is None:
        children = [Child(*worker, variables=at) for worker, at in zip(workers.items(), environments, strict=True)]
    if settings.api_processes > 1:
        sock.set_inheritable(True)
        arguments = _api_arguments(settings, sock.fileno(), num_workers)
        children += [Child(f"api-{i}", arguments, (sock.fileno(),)) for i in range(settings.api_processes)]
    supervisor = Supervisor(children)
    supervisor.start()
    if on_cluster is not None:
        on_cluster.start(workers)
    threading.Thread(target=_clean_up_daily, args=(settings, database), name="clean-up", daemon=True).start()
    if settings.adapters is not None:
        FolderScan(settings, database).start()
    try:
        if settings.api_processes > 1:
            _wait_for_signal()
        else:
            _run_api(settings, database, sock, supervisor)
    finally:
        supervisor.request_stop()
        clean = on_cluster is None or on_cluster.stop(WORKER_GRACE_S)
        clean &= supervisor.stop(WORKER_GRACE_S)
    return clean


def _run_api(settings: Settings, database: Database, sock: socket.socket, supervisor: Supervisor | None = None) -> None:
    """Answers requests until a signal. Unlike the workers of this machine, the process keeps its priority."""
    from weft.serve.api.app import make_app, run_app
    from weft.serve.api.observe import log_json
    from weft.serve.blobs import Blobs

    log_json()
    app = make_app(settings, database, Blobs(settings.store_url))
    run_app(app, sock, supervisor.request_stop if supervisor else lambda: None)
    database.close()


def _clean_up_daily(settings: Settings, database: Database) -> None:
    from weft.errors import WeftError
    from weft.serve.blobs import Blobs
    from weft.serve.db.files import delete_unnamed_blobs
    from weft.serve.db.usage import fold_usage
    from weft.serve.db.workers import forget_lost_workers

    while True:
        with contextlib.suppress(WeftError), database.begin() as tx:
            forget_lost_workers(tx)
        with contextlib.suppress(WeftError):
            fold_usage(database)
        with contextlib.suppress(WeftError, OSError):
            delete_unnamed_blobs(database, Blobs(settings.store_url))
        time.sleep(CLEAN_UP_EVERY_S)


def _wait_for_signal() -> None:
    received = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: received.set())
    while not received.wait(0.5):
        pass


def _checked_layout(layout: str, settings: Settings, name: str, variables: Mapping[str, str]) -> str:
    """The layout of a backbone's workers, chosen if it is auto; empty for one device. A worker checks it, as this
    process has no torch, and its sentence ends the command."""
    arguments = ["worker", "--base-model", f"{name}={settings.base_models[name]}", "--layout", layout, "--check"]
    command = [sys.executable, "-m", "weft", *arguments]
    checked = subprocess.run(command, env={**os.environ, **variables}, stdout=subprocess.PIPE, text=True, check=False)
    if checked.returncode:
        raise typer.Exit(checked.returncode)
    return checked.stdout.strip()


def _worker_arguments(settings: Settings, name: str, path: str, layout: str) -> list[str]:
    reading = settings.file_limits
    limits = ["--file-seconds", str(reading.seconds), "--file-memory", str(reading.memory_bytes / 2**30)]
    share = ["--sampling-share", str(settings.sampling_share), *([] if settings.training else ["--max-jobs", "0"])]
    divided = ["--layout", layout] if layout else []
    return ["worker", *_home_arguments(settings), "--base-model", f"{name}={path}", *limits, *share, *divided]


def _home_arguments(settings: Settings) -> list[str]:
    return ["--data-dir", str(settings.data_dir), "--db", settings.db_url, "--store", settings.store_url]


def _api_arguments(settings: Settings, fd: int, num_workers: int) -> list[str]:
    models = [part for name, path in settings.base_models.items() for part in ("--base-model", f"{name}={path}")]
    rest = ["--host", settings.host, "--api-processes", str(settings.api_processes), "--api-fd", str(fd)]
    limits = ["--min-samples", str(settings.limits.min_samples), *([] if settings.auth else ["--no-auth"])]
    limits += [] if settings.training else ["--no-training"]
    limits += [] if settings.adapters is None else ["--adapters", settings.adapters]
    limits += [] if settings.sampler is None else ["--sampler", settings.sampler]
    return ["serve", *_home_arguments(settings), *models, *rest, *limits, "--workers", str(num_workers)]
