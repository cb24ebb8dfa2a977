"""The record of the golden runs: SHA-256 of what each job left on disk, without clocks, by kind of machine."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file

FILE = Path(__file__).parent / "digests.json"
CLOCKS = frozenset({"time", "seconds", "eval_runtime", "started_s", "ended_s", "at_s"})
"""Fields with the time of something or how long it took."""
COUNTERS = ("num_tokens", "num_skipped", "skipped_in_a_row", "best_eval", "evals_since_best", "stopped_early", "data")
"""What a checkpoint holds besides tensors that decides how the job goes on; there may be more."""
STANDING = (
    "state",
    "reason",
    "step",
    "num_steps",
    "trained_tokens",
    "skipped_steps",
    "best_eval_loss",
    "early_stopped",
)
"""What status.json has of a job; there may be more."""
ORDERED = frozenset({"rank_pattern", "alpha_pattern"})
"""Mappings whose order means something: the first match wins."""
FEATURES = ("amx_bf16", "avx512_bf16", "avx512_vnni", "avx512_fp16", "avx_vnni")
"""What products may use beyond the level of vectors that torch names."""

Digests = dict[str, dict[str, str]]
"""By job, by part: adapter, optimizer, metrics, status."""


def environment() -> str:
    """What bits on a CPU depend on besides the code and the number of threads, which is one."""
    found = torch.cpu.get_capabilities()
    features = [name for name in FEATURES if found.get(name)]
    caches = [f"{name[:2].upper()} {found[name] // 1024}K" for name in ("l1d_cache_size", "l2_cache_size")]
    level = torch.backends.cpu.get_cpu_capability()
    processor = " ".join([platform.machine(), _vendor(), level, *features, *caches])
    return f"{processor}, torch {torch.__version__}, transformers {transformers.__version__}"


def _vendor() -> str:
    """MKL chooses its kernels by it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("vendor_id")), platform.system())


@dataclass(frozen=True)
class Record:
    """What `record.py` wrote: the digests of each case by kind of machine, and the commit whose code made them."""

    commit: str
    environments: dict[str, dict[str, Digests]]

    @classmethod
    def read(cls) -> Record:
        content = json.loads(FILE.read_text())
        return cls(content["commit"], content["environments"])

    def write(self) -> None:
        FILE.write_text(json.dumps({"commit": self.commit, "environments": self.environments}, indent=1) + "\n")


def digests_of(folders: Mapping[str, Path]) -> Digests:
    """The digests of all jobs of a run."""
    return {name: digest_of(folder) for name, folder in sorted(folders.items())}


def digest_of(folder: Path) -> dict[str, str]:
    """The digests of what one job left in its folder, part by part; parts that are not there have none."""
    parts = {
        "adapter": _adapter(folder / "adapter"),
        "optimizer": _checkpoint(folder / "checkpoints"),
        "metrics": _lines(folder / "metrics.jsonl"),
        "status": _status(folder / "status.json"),
    }
    return {part: hashlib.sha256(content).hexdigest() for part, content in parts.items() if content}


def _adapter(folder: Path) -> bytes:
    """Weights, configuration, and the chat template if there is one; not the page that describes them to people."""
    content = _tensors(folder / "adapter_model.safetensors") + _json(folder / "adapter_config.json")
    template = folder / "chat_template.jinja"
    return content + template.read_bytes() if template.exists() else content


def _checkpoint(folder: Path) -> bytes:
    """Of the newest one: its step, its tensors and its counters."""
    newest = max(folder.iterdir(), default=None) if folder.is_dir() else None
    if newest is None:
        return b""
    content = json.loads((newest / "state.json").read_text())["content"]
    counters = {name: content["state"][name] for name in COUNTERS}
    return _tensors(newest / "tensors.safetensors") + _canonical({"step": content["step"], **counters})


def _status(path: Path) -> bytes:
    if not path.exists():
        return b""
    content = json.loads(path.read_text())
    return _canonical({name: content[name] for name in STANDING})


def _tensors(path: Path) -> bytes:
    if not path.exists():
        return b""
    content = b""
    for name, tensor in sorted(load_file(path).items()):
        content += f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode()
        content += tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return content


def _lines(path: Path) -> bytes:
    lines = path.read_text().splitlines() if path.exists() else []
    return b"".join(_canonical(json.loads(line)) for line in lines)


def _json(path: Path) -> bytes:
    return _canonical(json.loads(path.read_text())) if path.exists() else b""


def _canonical(value: Any) -> bytes:
    """One line of JSON with floats as Python writes them, which distinguishes any two."""
    return json.dumps(_normal(value), sort_keys=True).encode() + b"\n"


def _normal(value: Any) -> Any:
    """Without clocks, and with every mapping whose order means something as a list."""
    if isinstance(value, Mapping):
        kept = {key: _normal(inner) for key, inner in value.items() if key not in CLOCKS}
        return {key: [*inner.items()] if key in ORDERED else inner for key, inner in kept.items()}
    return [_normal(inner) for inner in value] if isinstance(value, list) else value
