"""Which tasks run as one batch on a pipeline, and in which order: MuxTune's fused tasks, buckets and template."""

from weft.plan.fuse.planner import plan_fusion
from weft.plan.fuse.tasks import FusedTask, FuseTask, Pipe, fuse, fuse_by_count
from weft.plan.fuse.template import Template, build_template

__all__ = ["FuseTask", "FusedTask", "Pipe", "Template", "build_template", "fuse", "fuse_by_count", "plan_fusion"]
