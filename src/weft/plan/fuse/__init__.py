"""Which tasks run as one batch on a pipeline: MuxTune's fused tasks."""

from weft.plan.fuse.partition import fuse, fuse_by_count
from weft.plan.fuse.tasks import FusedTask, FuseTask, Pipe

__all__ = ["FuseTask", "FusedTask", "Pipe", "fuse", "fuse_by_count"]
