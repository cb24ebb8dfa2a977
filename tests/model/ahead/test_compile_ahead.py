"""Another process compiles: its requests, who waits for it, and how it ends."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from weft.data.samples import Sample
from weft.engine.execute.memory import COMPILING, ExpectedJobs, load_within
from weft.kernels.device import GpuKind
from weft.kernels.lora.tables import ANY_ORDER
from weft.model.ahead import compile_ahead
from weft.model.ahead.compile_ahead import CompileAhead, KernelRequest, read_config, start
from weft.model.packed import SlotSample, pack_samples
from weft.model.resolve import resolve
from weft.model.source import find_source
from weft.plan.cost.hardware import DEVICES
from weft.spec import AdapterSpec, BackboneSpec

H200 = GpuKind("NVIDIA H200", (9, 0), 132, 2**37)
CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "vocab_size": 64,
}
REQUEST = KernelRequest(
    config=CONFIG,
    dtype="bfloat16",
    quantize="none",
    recompute="none",
    tensor=1,
    ranks=(8, 32),
    drops=False,
    others=(("outputs", "qkv"),),
    copies=(("lora", 8), ("lora", 32)),
    num_jobs=2,
    lanes=(2,),
    gpu=H200,
)
REPORTS_READY = "print('ready', flush=True); sys.stdin.read()"
IS_SILENT = "sys.stdin.read()"
ENDS = ""
FINISHES = "open(sys.argv[-1], 'w').write(request)"


def use_program(monkeypatch: pytest.MonkeyPatch, lines: str) -> None:
    """Replaces the program that compiles by another, which has read its request."""
    code = f"import sys; request = sys.stdin.readline(); {lines}"
    monkeypatch.setattr(compile_ahead, "PROGRAM", (sys.executable, "-S", "-c", code))


def test_marker_when_it_covers_the_sources_of_kernels_then_all_of_them_exist():
    package = Path(compile_ahead.__file__).parents[2]
    assert [name for name in compile_ahead.SOURCES if not (package / name).exists()] == []


@pytest.mark.parametrize("lines", [REPORTS_READY, ENDS])
def test_wait_when_the_process_is_ready_or_has_ended_then_goes_on(monkeypatch, tmp_path, lines):
    """There is no wait for kernels that exist, or that will never be compiled."""
    use_program(monkeypatch, lines)
    with contextlib.closing(CompileAhead(REQUEST, tmp_path / "marker")) as ahead:
        assert ahead.wait()
        assert ahead.is_ready


def test_wait_when_the_process_takes_too_long_then_goes_on_without_it(monkeypatch, tmp_path):
    """A compiler that hangs holds no run up for ever."""
    use_program(monkeypatch, IS_SILENT)
    with contextlib.closing(CompileAhead(REQUEST, tmp_path / "marker")) as ahead:
        assert not ahead.is_ready
        assert not ahead.wait(0.01)


def children() -> set[str]:
    """The processes that this one has started and that have not ended."""
    found = (task / "children" for task in Path("/proc/self/task").iterdir())
    return {pid for listed in found for pid in listed.read_text().split()}


def test_close_when_the_process_is_at_work_then_it_ends(monkeypatch, tmp_path):
    """Nothing remains."""
    use_program(monkeypatch, IS_SILENT)
    before = children()
    ahead = CompileAhead(REQUEST, tmp_path / "marker")
    assert len(children() - before) == 1
    ahead.close()
    assert children() <= before
    assert ahead.is_ready


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with a GPU, and a compiler that records its request; the directory in which Triton keeps kernels."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compile_ahead, "capability", lambda device: (9, 0))
    monkeypatch.setattr(compile_ahead, "gpu_kind", lambda device: H200)
    use_program(monkeypatch, FINISHES)
    return tmp_path / "cache"


def compile_request(
    cache: Path, spec: BackboneSpec, *adapters: AdapterSpec, have_any_order: bool = False
) -> KernelRequest | None:
    """What another process is requested to compile; None if none is started."""
    before = set(cache.glob("*"))
    ahead = start(resolve(spec, DEVICES["h200"]), adapters, len(adapters), have_any_order=have_any_order)
    if ahead is None:
        return None
    with contextlib.closing(ahead):
        assert ahead.wait()
    (noted,) = set(cache.glob("*")) - before
    return KernelRequest.from_json(noted.read_text())


def test_request_when_jobs_have_ranks_and_dropout_then_names_each_kind_once(gpu):
    """What is compiled follows from the adapters: their widest ranks, and whether any drops."""
    adapters = [AdapterSpec(r=8), AdapterSpec(r=32, lora_dropout=0.1), AdapterSpec(r=8, rank_pattern={"q_proj": 100})]
    request = compile_request(gpu, BackboneSpec("tiny", quantize="fp8"), *adapters, AdapterSpec(method="ia3"))
    assert request is not None
    assert (request.ranks, request.drops, request.num_jobs) == ((8, 32, 100), True, 4)
    assert request.others == (("inputs", "down"), ("outputs", "qkv"))
    assert (request.dtype, request.quantize, request.gpu) == ("bfloat16", "fp8", H200)
    assert request.config["model_type"] == "llama"
    free = compile_request(gpu, BackboneSpec("tiny"), AdapterSpec(r=8), have_any_order=True)
    assert free is not None and free.others == (ANY_ORDER,)


@pytest.mark.parametrize(
    ("spec", "adapter"),
    [
        (BackboneSpec("tiny", kernels="reference"), AdapterSpec()),
        (BackboneSpec("tiny", dtype="float32"), AdapterSpec()),
        (BackboneSpec("tiny"), AdapterSpec(method="dora", lora_dropout=0.1)),
        (BackboneSpec("no/such-model-anywhere"), AdapterSpec()),
    ],
)
def test_request_when_no_kernel_is_launched_or_known_then_is_none(gpu, spec, adapter):
    """Where the fused path does not run, or the model is not known yet, nothing is compiled."""
    assert compile_request(gpu, spec, adapter) is None


def test_start_when_there_is_no_gpu_then_does_nothing():
    assert start(resolve(BackboneSpec("tiny", device="cpu")), [AdapterSpec()], 1) is None


def test_start_when_everything_was_compiled_before_then_does_nothing(gpu):
    """The second run starts no process; one with other needs does."""
    spec = BackboneSpec("tiny")
    assert compile_request(gpu, spec, AdapterSpec(r=8)) is not None
    assert compile_request(gpu, spec, AdapterSpec(r=8)) is None
    assert compile_request(gpu, spec, AdapterSpec(r=128)) is not None


class Compiling(ExpectedJobs):
    """Jobs whose kernels another process compiles."""

    started: CompileAhead

    def compile_ahead(self, spec: BackboneSpec, tensor: int = 1) -> CompileAhead | None:
        return self.started


def test_backbone_when_its_kernels_are_being_compiled_then_reports_it_and_the_first_microbatch_waits(
    monkeypatch, tmp_path
):
    """A user learns why nothing moves, and no kernel is compiled twice."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    use_program(monkeypatch, f"open({str(gate)!r}).read(); import time; time.sleep(0.2); print('ready', flush=True)")
    ahead = CompileAhead(REQUEST, tmp_path / "marker")
    expected = Compiling((), 1)
    object.__setattr__(expected, "started", ahead)
    with contextlib.closing(ahead):
        backbone, notes = load_within(BackboneSpec("tiny", device="cpu"), None, expected)
        assert notes == (COMPILING,) and not ahead.is_ready
        gate.write_text("go on")
        batch = pack_samples(
            [SlotSample(Sample(np.arange(4), np.array([False, True, True, True])))], 4, backbone.device
        )
        backbone.scores(batch, 4)
        assert ahead.is_ready


def test_read_config_when_a_directory_has_one_then_gives_it_without_transformers(tmp_path):
    assert read_config(find_source("tiny"))["model_type"] == "llama"  # type: ignore[index]
    assert read_config(find_source("no/such-model-anywhere")) is None


def run_here(mode: str, folder: Path) -> subprocess.Popen[bytes]:
    """This file as a program, without Triton's interpreter, with its input open."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", __file__, str(folder / "marker"), mode],
        env=env | {"TRITON_CACHE_DIR": str(folder / "cache"), "TRITON_DEFAULT_FP_FUSION": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None
    process.stdin.write(REQUEST.to_json().encode() + b"\n")
    process.stdin.flush()
    return process


@pytest.mark.slow
def test_child_when_it_has_compiled_then_binaries_are_where_a_launch_looks_for_them(tmp_path):
    """A process that launches the same kernel later compiles nothing."""
    with run_here("compile", tmp_path) as process:
        assert process.stdout is not None
        output = process.stdout.read()
    assert process.returncode == 0
    assert output == b"ready\n"
    assert (tmp_path / "marker").exists()
    made = sorted(path.name for path in tmp_path.rglob("*.cubin"))
    assert made == ["_norms_kernel.cubin", "_squares_kernel.cubin"]
    with run_here("launch", tmp_path) as process:
        process.communicate()
    assert process.returncode == 0
    assert sorted(path.name for path in tmp_path.rglob("*.cubin")) == made


@pytest.mark.slow
def test_child_when_its_parent_is_gone_then_ends_with_its_workers(tmp_path):
    """A run that is killed leaves no compiler at work."""
    with run_here("hang", tmp_path) as process:
        assert process.stdin is not None and process.stdout is not None
        assert int(process.stdout.readline()) != process.pid
        process.stdin.close()
        assert process.wait(60) is not None
        # The worker holds its end of the pipe as long as it lives.
        assert process.stdout.read() == b""


def main(mode: str) -> None:
    """Compiles two kernels as the child does, launches them, or hangs in the first."""
    import time

    from weft.model.ahead import child

    rehearse = child.rehearse

    def two(request: KernelRequest):
        names = {"_squares_kernel", "_norms_kernel"}
        first, _ = rehearse(request)
        found = [launch for launch in first if launch.kernel.__name__ in names]
        return found[:1], found[1:]

    def hang(launch: object) -> None:
        os.write(1, f"{os.getpid()}\n".encode())
        time.sleep(600)

    child.rehearse = two
    if mode == "hang":
        child.compile_launch = hang
    if mode != "launch":
        child.main()
        return
    launch_two()


def launch_two() -> None:
    """Launches the optimizer's kernels as a step does, up to where a GPU would be needed."""
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    from weft.kernels.device import as_gpu
    from weft.kernels.launch import RecordingDriver
    from weft.model.ahead.child import _step_jobs

    driver.set_active(RecordingDriver(H200))
    JITFunction.__getitem__ = lambda self, grid: (
        lambda *args, **kw: self.run(*args, grid=grid, warmup=True, **kw) if self.__name__ != "_update_kernel" else None
    )
    with as_gpu(H200):
        _step_jobs(3, 2)


if __name__ == "__main__":
    main(sys.argv[2])
