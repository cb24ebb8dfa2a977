"""Replays weeks of job arrivals on a cluster in seconds: many jobs on one backbone against one job on each."""

from weft.simulate.cluster.instance import Instance
from weft.simulate.cluster.policy import POLICIES
from weft.simulate.cluster.replay import ReplayReport, replay
from weft.simulate.cluster.trace import TraceJob, generate_trace, read_trace, write_trace

__all__ = [
    "POLICIES",
    "Instance",
    "ReplayReport",
    "TraceJob",
    "generate_trace",
    "read_trace",
    "replay",
    "write_trace",
]
