"""The operator's settings: where data is kept, which backbones may be trained, and the limits of requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from weft.errors import ConfigError
from weft.serve.limited_process import FileLimits

MIB = 2**20
LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True)
class ServiceLimits:
    """The limits of a single request; the limits of a tenant are in the `tenants` table."""

    file_bytes: int = 512 * MIB
    """The longest file."""
    line_bytes: int = MIB
    """The longest line of a training file."""
    nesting: int = 64
    """The deepest nesting of one line, or of a request's body."""
    min_samples: int = 1
    """The fewest lines of a training file; OpenAI asks for 10."""
    max_samples: int = 1_000_000
    """The most lines of a training file."""
    body_bytes: int = 4 * MIB
    """The longest body of a request that is not an upload."""
    disk_floor_bytes: int = 256 * MIB
    """Uploads are refused when less than this would be left on the disk."""
    max_tokens: int = 4096
    """The longest answer to a prompt."""


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

    def __post_init__(self) -> None:
        if not self.auth and self.host not in LOOPBACK:
            raise ConfigError(
                f"anybody who reaches {self.host} could use the service; it is only for {', '.join(LOOPBACK)}.",
                where="--no-auth",
            )
        if not self.base_models:
            raise ConfigError("name at least one backbone.", where="--base-model")
        for name in self.base_models:
            if not name or ":" in name or len(name) > 200 or not name.isprintable():
                raise ConfigError(f"{name!r} is not a name for a backbone; leave out ':'.", where="--base-model")

    @property
    def db_url(self) -> str:
        """The URL of the database, with the default filled in."""
        return self.db or f"sqlite:///{self.data_dir.resolve() / 'weft.db'}"

    @property
    def store_url(self) -> str:
        """The directory or URL of the file store, with the default filled in."""
        return self.store or str(self.data_dir.resolve() / "blobs")
