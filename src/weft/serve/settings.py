"""The operator's settings: of the service as a whole, of a single request, and of one worker."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from weft.errors import ConfigError
from weft.serve.db.leases import LEASE_S
from weft.serve.limited_process import FileLimits
from weft.spec import BackboneSpec
from weft.spec.run import Capacity

if TYPE_CHECKING:
    from weft.parallel.stages.load_stages import StageLayout

MIB = 2**20
LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True)
class ServiceLimits:
    """The limits of a single request; the limits of a tenant are in the `tenants` table."""

    file_bytes: int = 512 * MIB
    line_bytes: int = MIB
    nesting: int = 64
    """The deepest nesting of one line, or of a request's body."""
    min_samples: int = 1
    max_samples: int = 1_000_000
    body_bytes: int = 4 * MIB
    disk_floor_bytes: int = 256 * MIB
    """Uploads are refused when less than this would be left on the disk."""
    max_tokens: int = 4096


@dataclass(frozen=True)
class Settings:
    """The settings of one service. Everything that must survive is in its database and its file store."""

    data_dir: Path = Path("weft-data")
    """The directory of the default database and file store, and of the workers' directories."""
    db: str = ""
    """The database URL. Default: SQLite in data_dir."""
    store: str = ""
    """The directory or fsspec URL of the file store. Default: `blobs` in data_dir."""
    base_models: Mapping[str, str] = field(default_factory=lambda: {"tiny": "tiny"})
    """The backbones that may be trained: their names in the API, and what `base_model` is in a jobs file."""
    host: str = "127.0.0.1"
    port: int = 8000
    auth: bool = True
    """Without authentication everybody is the tenant `default`; that is allowed only on a loopback address."""
    api_processes: int = 1
    limits: ServiceLimits = ServiceLimits()
    file_limits: FileLimits = FileLimits()
    """What reading the files of one job may take; a worker reads them, in a process of its own."""
    sampling_share: float = 0.25
    """As in `WorkerOptions`."""
    training: bool = True
    """False: new jobs are refused."""
    adapters: str | None = None
    """A directory or URL whose adapters every tenant may use."""
    sampler: str | None = None
    """URL of a vLLM or SGLang server that answers prompts instead of the workers."""

    def __post_init__(self) -> None:
        if not self.auth and self.host not in LOOPBACK:
            raise ConfigError(
                f"anybody who reaches {self.host} could use the service; it is only for {', '.join(LOOPBACK)}.",
                where="--no-auth",
            )
        _check_share(self.sampling_share)
        if self.sampler is not None and not re.fullmatch(r"https?://[^/@?#]+(/[^@?#]*)?", self.sampler):
            raise ConfigError(f"got {self.sampler!r}; write http://HOST:PORT.", where="--sampler")
        if not self.base_models:
            raise ConfigError("name at least one backbone.", where="--base-model")
        for name in self.base_models:
            if not name or ":" in name or len(name) > 200 or not name.isprintable():
                raise ConfigError(f"{name!r} is not a name for a backbone; leave out ':'.", where="--base-model")

    @property
    def db_url(self) -> str:
        return self.db or f"sqlite:///{self.data_dir.resolve() / 'weft.db'}"

    @property
    def store_url(self) -> str:
        return self.store or str(self.data_dir.resolve() / "blobs")


def _new_id() -> str:
    return f"worker-{secrets.token_hex(8)}"


@dataclass(frozen=True)
class WorkerOptions:
    """The options of one worker: its backbone, how much it takes on, and where it keeps its files."""

    data_dir: Path
    """The worker's own directory is `work/<id>` in it; there it also finds the checkpoints of workers that are gone."""
    base_model: str = "tiny"
    """The name of the backbone in the API; the worker claims jobs for it."""
    backbone: BackboneSpec = field(default_factory=lambda: BackboneSpec("tiny"))
    capacity: Capacity = "auto"
    """The most tokens of one microbatch, over all jobs; `auto` is what suits the device."""
    max_jobs: int = 32
    """The most jobs that train at a time; 0 for a worker that only answers prompts."""
    sampling_share: float = 0.25
    """Time for prompts while there are any, as a share of the time that training takes."""
    memory_limit: float | str | None = None
    """The most GPU memory to take, such as 40GB or 0.5."""
    layout: StageLayout | None = None
    """How the backbone is divided over devices, or copied; None: one device has it."""
    job_memory: int | None = None
    """The most bytes that the adapters and optimizers of all jobs may take together."""
    lease_s: float = LEASE_S
    """How long the worker may be silent before others take its jobs."""
    pulse_s: float = 0.5
    """The time between two writes to the database."""
    stuck_s: float = 1800.0
    """How long one microbatch, evaluation or checkpoint may take before training is taken to hang."""
    grace_s: float = 30.0
    """How long the worker may take to leave once it is to stop."""
    file_limits: FileLimits = FileLimits()
    host: str = "127.0.0.1"
    """The address on which it listens for prompts; every prompt must bring its token."""
    id: str = field(default_factory=_new_id)
    """The id is new for every process, so that no other process ever writes to its directory."""

    def again(self, num_lessened: int) -> WorkerOptions:
        """The options of a worker in the place of this one, whose stages have run out of memory so many times."""
        layout = self.layout and replace(self.layout, num_lessened=num_lessened)
        return replace(self, layout=layout, id=_new_id())

    def __post_init__(self) -> None:
        for name, value, least in (("--max-jobs", self.max_jobs, 0), ("--capacity", self.capacity, 2)):
            if value != "auto" and value < least:
                raise ConfigError(f"must be at least {least}, got {value}.", where=name)
        _check_share(self.sampling_share)
        if self.file_limits.seconds <= 0 or self.file_limits.memory_bytes <= 0:
            raise ConfigError("the limits of reading a file must be above 0.", where="--file-seconds, --file-memory")
        if not 0 < self.pulse_s * 2 < self.lease_s:
            raise ConfigError(
                f"is {self.lease_s:g} s; it must be more than twice the pulse of {self.pulse_s:g} s.", where="--lease"
            )


def _check_share(share: float) -> None:
    if not 0 < share <= 100:
        raise ConfigError(f"got {share:g}; accepted is a number above 0, up to 100.", where="--sampling-share")
