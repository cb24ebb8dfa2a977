"""Compiles the kernels of a run in another process while this one loads the weights.

The first run on a machine would compile them one after another, at their first launches. `start` is called before
anything is loaded, and the first microbatch waits for the kernels. This only saves time: missing kernels are compiled
at their first launch as usual. A `KernelRequest` determines the kernels of a run, as plain data for that process.
"""

from __future__ import annotations

import atexit
import dataclasses
import hashlib
import importlib.metadata
import json
import os
import platform
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import weft
from weft.kernels.device import GpuKind, capability, gpu_kind, has_streams
from weft.kernels.launch import has_triton
from weft.kernels.lora.tables import ANY_ORDER
from weft.kernels.tuning import tuning_file
from weft.methods.registry import has_kernels, method_of
from weft.model.resolve import ResolvedModel
from weft.model.source import Source
from weft.plan.families import why_unsupported
from weft.spec import AdapterSpec

READY = b"ready\n"


@dataclass(frozen=True)
class KernelRequest:
    config: Mapping[str, Any]
    dtype: str
    quantize: str
    recompute: str
    tensor: int
    ranks: tuple[int, ...]
    """Largest rank of each adapter, without repetitions."""
    drops: bool
    others: tuple[tuple[str, str], ...]
    """Changes of methods other than LoRA, with their sites, in order."""
    copies: tuple[tuple[str, int], ...]
    """Pairs of a PEFT method and a rank of its kernels, for which kernels that copy adapters are compiled; in order."""
    num_jobs: int
    """Maximum number of jobs that step at a time."""
    lanes: tuple[int, ...]
    """Numbers of parameter groups that adapters train; LoRA: 2."""
    gpu: GpuKind

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @staticmethod
    def from_json(text: str) -> KernelRequest:
        fields = json.loads(text)
        gpu = fields.pop("gpu")
        gpu = GpuKind(**{**gpu, "capability": tuple(gpu["capability"])})
        pairs = {name: tuple((first, second) for first, second in fields[name]) for name in ("others", "copies")}
        return KernelRequest(**{**fields, **_tuples(fields, "ranks", "lanes"), **pairs, "gpu": gpu})


def _tuples(fields: Mapping[str, Any], *names: str) -> dict[str, tuple[int, ...]]:
    return {name: tuple(fields[name]) for name in names}


PROGRAM = (sys.executable, "-P", "-W", "ignore", "-m", "weft.model.ahead.child")
LONGEST_WAIT_S = 120.0
"""Longest wait; after it the first microbatch compiles missing kernels itself."""
SOURCES = (
    *("kernels", "model/fused", "model/ahead", "model/loss.py", "adapters/frozen.py"),
    *("methods", "plan/decoder.py", "plan/families.py"),
)
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
"""Environment of one thread: a process that forks must not have threads."""


class CompileAhead:
    def __init__(self, request: KernelRequest, marker: Path) -> None:
        self._process = subprocess.Popen(
            [*PROGRAM, str(marker)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # It has no use for a GPU, and cannot take memory of one that it does not see.
            env={**os.environ, **_ONE_THREAD, "CUDA_VISIBLE_DEVICES": ""},
        )
        self._output = b""
        self._is_ready = False
        assert self._process.stdin is not None
        with suppress(OSError):  # it has ended already
            # Its input stays open: it ends when this process does.
            self._process.stdin.write(request.to_json().encode() + b"\n")
            self._process.stdin.flush()
        atexit.register(self.close)

    @property
    def is_ready(self) -> bool:
        """Whether the kernels of the first steps are ready, or will never be."""
        return self._is_ready or self._read_ready(0.0)

    def wait(self, longest_s: float = LONGEST_WAIT_S) -> bool:
        end = time.monotonic() + longest_s
        while not self.is_ready and (left := end - time.monotonic()) > 0:
            self._read_ready(left)
        return self._is_ready

    def close(self) -> None:
        atexit.unregister(self.close)
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(OSError):
            self._process.stdin.close()
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()
        self._is_ready = True

    def _read_ready(self, longest_s: float) -> bool:
        """Whether the process has reported within a time that it is ready, or has ended."""
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], longest_s)
        if readable:
            text = os.read(self._process.stdout.fileno(), 4096)
            self._output += text
            self._is_ready = not text or READY in self._output
        return self._is_ready


def start(
    resolved: ResolvedModel,
    adapters: Sequence[AdapterSpec],
    num_jobs: int,
    *,
    have_any_order: bool = False,
    tensor: int = 1,
) -> CompileAhead | None:
    """Starts to compile the kernels of adapters on a backbone; None if there are none. `have_any_order`: some adapters
    have order-independent sums; `tensor`: number of devices that share every layer."""
    request = _request(resolved, adapters, num_jobs, have_any_order=have_any_order, tensor=tensor)
    if request is None:
        return None
    marker = _marker(request)
    if marker.exists():
        return None
    try:
        marker.parent.mkdir(parents=True, exist_ok=True)
        return CompileAhead(request, marker)
    except OSError:  # no directory for the cache, or no process
        return None


def _request(
    resolved: ResolvedModel,
    adapters: Sequence[AdapterSpec],
    num_jobs: int,
    *,
    have_any_order: bool = False,
    tensor: int = 1,
) -> KernelRequest | None:
    """None if no Triton kernel is launched, or the kernels are unknown."""
    spec, device, dtype = resolved.spec, resolved.device, resolved.dtype
    fused = [adapter for adapter in adapters if has_kernels(adapter)]
    if not (has_streams(device) and has_triton() and fused) or os.environ.get("TRITON_INTERPRET") == "1":
        return None
    if spec.kernels == "reference" or dtype == torch.float32 or capability(device) < (8, 0):
        return None
    try:
        config = read_config(resolved.source)
        if config is None or why_unsupported(config):
            return None
    except Exception:  # loading reports errors in the model's files better
        return None
    others = {change for adapter in fused for change in method_of(adapter).kernel_changes}
    return KernelRequest(
        config=config,
        dtype=str(dtype).removeprefix("torch."),
        quantize=spec.quantize,
        recompute=spec.recompute,
        tensor=tensor,
        ranks=tuple(sorted({method_of(adapter).kernel_rank(adapter) for adapter in fused} - {0})),
        drops=any(adapter.lora_dropout > 0 for adapter in fused),
        others=tuple(sorted(others | ({ANY_ORDER} if have_any_order else set()))),
        copies=tuple(sorted({(adapter.method, method_of(adapter).kernel_rank(adapter)) for adapter in fused})),
        num_jobs=num_jobs,
        lanes=tuple(sorted({_num_trained(adapter) for adapter in fused})),
        gpu=gpu_kind(device),
    )


def _num_trained(adapter: AdapterSpec) -> int:
    method = method_of(adapter)
    return len(method.groups) - len(method.frozen(adapter))


def read_config(source: Source) -> Mapping[str, Any] | None:
    """A model's config.json without transformers, which takes seconds to import; None if it is not on this machine."""
    path: Any = Path(source.path) / "config.json"
    try:
        if not os.path.isdir(source.path):
            from huggingface_hub import try_to_load_from_cache

            path = try_to_load_from_cache(source.path, "config.json")
        config = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return None
    return config if isinstance(config, dict) else None


def _marker(request: KernelRequest) -> Path:
    """A file in Triton's cache, so that it is deleted with the kernels."""
    from triton import knobs

    found = hashlib.sha256(request.to_json().encode())
    for name in ("torch", "triton"):
        found.update(f"{name} {importlib.metadata.version(name)} {platform.python_version()}".encode())
    root = Path(weft.__file__).parent
    sources = [root / source for source in SOURCES]
    files = [file for source in sources for file in (sorted(source.rglob("*.py")) if source.is_dir() else [source])]
    for file in [*files, tuning_file()]:
        if file.exists():
            found.update(file.read_bytes())
    return Path(knobs.cache.dir) / f"weft-{found.hexdigest()[:24]}.compiled"
