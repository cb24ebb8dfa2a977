"""On which of several replicas each job trains, while some of them are under way."""

from __future__ import annotations

from collections.abc import Sequence

from weft.engine.jobs.live_job import LiveJob
from weft.engine.lookahead import LookaheadPlanner
from weft.plan.homes import choose_homes
from weft.plan.spread.planner import HomeLoad
from weft.plan.types import Limits


def find_homes(jobs: Sequence[LiveJob], plans: LookaheadPlanner, limits: Limits) -> set[str]:
    """Says of every job that is not on all of several replicas which one it trains on.

    Jobs of which something is under way stay; those that are to move once nothing is are returned.
    """
    own = {job.name: job for job in jobs if job.home is not None}
    before = {name: job.home for name, job in own.items() if job.has_home_replica and job.home is not None}
    loads = {name: HomeLoad(own[name].step_tokens, own[name].longest) for name in sorted(own)}
    leaving = set[str]()
    for name, home in choose_homes(plans.home_seconds(loads, limits), before).items():
        if own[name].begun_step is None:
            own[name].home, own[name].has_home_replica = home, True
        elif own[name].home != home:
            leaving.add(name)
    return leaving
