"""Has another process compile the kernels of a run while this one loads its weights.

A first run on a machine would compile them one after another, at their first launches. Here they are known as soon as
the run is: `start` is called before anything is loaded, and the first microbatch waits until they are there. All of it
is about time alone: what is missing in the end, whatever the reason, is compiled at its first launch as ever.
"""

from __future__ import annotations

import atexit
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
from pathlib import Path
from typing import Any

import torch

import weft
from weft.kernels.device import capability, gpu_kind, has_streams
from weft.kernels.launch import has_triton
from weft.kernels.lora.tables import ANY_ORDER
from weft.kernels.tuning import tuning_file
from weft.methods.registry import has_kernels, method_of
from weft.model.ahead.request import READY, KernelRequest
from weft.model.resolve import ResolvedModel
from weft.model.source import Source
from weft.plan.families.registry import why_unsupported
from weft.spec import AdapterSpec

PROGRAM = (sys.executable, "-P", "-W", "ignore", "-m", "weft.model.ahead.child")
LONGEST_WAIT_S = 120.0
"""After that the first microbatch compiles for itself what is missing."""
_SOURCES = ("kernels", "backbone/fused", "backbone/ahead", "backbone/loss.py", "adapters/frozen.py")
"""What decides which kernels there are and what is in them."""
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
"""A process that forks must not have threads."""


class CompileAhead:
    """Kernels that another process compiles."""

    def __init__(self, request: KernelRequest, marker: Path) -> None:
        """`marker` is the file that says that all of them are there."""
        self._process = subprocess.Popen(
            [*PROGRAM, str(marker)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # It has no use for a GPU, and cannot take memory of one that it does not see.
            env={**os.environ, **_ONE_THREAD, "CUDA_VISIBLE_DEVICES": ""},
        )
        self._said = b""
        self._is_ready = False
        assert self._process.stdin is not None
        with suppress(OSError):  # it has ended already
            # Its input stays open: it ends when this process does.
            self._process.stdin.write(request.to_json().encode() + b"\n")
            self._process.stdin.flush()
        atexit.register(self.close)

    @property
    def is_ready(self) -> bool:
        """Whether what the first steps need is there, or will not come."""
        return self._is_ready or self._hear(0.0)

    def wait(self, longest_s: float = LONGEST_WAIT_S) -> bool:
        """Waits until it is ready, but not for ever; says whether it is."""
        end = time.monotonic() + longest_s
        while not self.is_ready and (left := end - time.monotonic()) > 0:
            self._hear(left)
        return self._is_ready

    def close(self) -> None:
        """Ends the process, whatever it is at."""
        atexit.unregister(self.close)
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(OSError):
            self._process.stdin.close()
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()
        self._is_ready = True

    def _hear(self, longest_s: float) -> bool:
        """Whether the process has said within a time that it is ready, or has ended."""
        assert self._process.stdout is not None
        heard, _, _ = select.select([self._process.stdout], [], [], longest_s)
        if heard:
            said = os.read(self._process.stdout.fileno(), 4096)
            self._said += said
            self._is_ready = not said or READY in self._said
        return self._is_ready


def start(
    resolved: ResolvedModel,
    adapters: Sequence[AdapterSpec],
    num_jobs: int,
    *,
    have_any_order: bool = False,
    tensor: int = 1,
) -> CompileAhead | None:
    """Begins to compile what adapters on a backbone will launch; None where there is nothing to do.

    `have_any_order`: some of them have order-independent sums; `tensor`: devices that share every layer.
    """
    request = _request(resolved, adapters, num_jobs, have_any_order=have_any_order, tensor=tensor)
    if request is None:
        return None
    marker = _marker(request)
    if marker.exists():
        return None
    try:
        marker.parent.mkdir(parents=True, exist_ok=True)
        return CompileAhead(request, marker)
    except OSError:  # no place for the cache, or no process to be had
        return None


def _request(
    resolved: ResolvedModel,
    adapters: Sequence[AdapterSpec],
    num_jobs: int,
    *,
    have_any_order: bool = False,
    tensor: int = 1,
) -> KernelRequest | None:
    """None where no Triton kernel is launched, or nobody can say which."""
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
    except Exception:  # whatever is wrong with the model's files, loading says it better
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
    """Groups of parameters that an adapter of its method trains."""
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
    """In Triton's cache, so that it goes where the kernels go."""
    from triton import knobs

    found = hashlib.sha256(request.to_json().encode())
    for name in ("torch", "triton"):
        found.update(f"{name} {importlib.metadata.version(name)} {platform.python_version()}".encode())
    root = Path(weft.__file__).parent
    places = [root / source for source in _SOURCES]
    files = [file for place in places for file in (sorted(place.rglob("*.py")) if place.is_dir() else [place])]
    for file in [*files, tuning_file()]:
        if file.exists():
            found.update(file.read_bytes())
    return Path(knobs.cache.dir) / f"weft-{found.hexdigest()[:24]}.compiled"
