"""Which tasks run as one batch on a pipeline, and in which order: MuxTune's fused tasks, buckets and template."""

from weft.plan.fuse.planner import Template, build_template, plan_fusion
from weft.plan.fuse.tasks import FusedTask, FuseTask, Pipe, fuse, fuse_by_count

__all__ = ["FuseTask", "FusedTask", "Pipe", "Template", "build_template", "fuse", "fuse_by_count", "plan_fusion"]
