"""Replays weeks of job arrivals on a cluster in seconds: many jobs on one backbone against other ways."""

from benchmarks.planning.replay.instance import PEFT, Instance
from benchmarks.planning.replay.policy import POLICIES
from benchmarks.planning.replay.replay import ReplayReport, replay
from benchmarks.planning.replay.trace import TraceJob, generate_trace, read_trace, write_trace

__all__ = [
    "PEFT",
    "POLICIES",
    "Instance",
    "ReplayReport",
    "TraceJob",
    "generate_trace",
    "read_trace",
    "replay",
    "write_trace",
]
