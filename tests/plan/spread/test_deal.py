"""Which replica gets which samples of a step: balanced, by length alone, or even shares."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.plan.check import violations
from weft.plan.cost.fit import MicrobatchLoad
from weft.plan.cost.learned import FEWEST, PASSES
from weft.plan.cost.types import LinearCost
from weft.plan.deploy.deal import PricedReplica, deal
from weft.plan.layout import DispatchRule, ReplicaLayout
from weft.plan.level import PlannedReplicas
from weft.plan.planner import MeasuredPasses
from weft.plan.program import Program
from weft.plan.simulate.interpret import simulate
from weft.plan.spread import SpreadPlanner
from weft.plan.types import Batch, JobQueue, Limits

RULES = list(DispatchRule)
SMALL, LARGE = LinearCost(fixed_s=1.0, token_s=1.0, pair_s=0.02), LinearCost(fixed_s=1.0, token_s=0.4, pair_s=0.005)
HOLDS = PlannedReplicas(holds=(64, 64, 256))
"""Two small replicas and a large one, as unlike as LobRA's."""
LIMITS = Limits(256)


def queue(job: str, *lengths: int, home: int | None = None, groups: tuple[int, ...] = ()) -> JobQueue:
    return JobQueue(job, (Batch(0, 0, lengths, groups),), is_all=True, home=home)


def skewed() -> list[JobQueue]:
    """Mostly short samples, and a few that only the large replica holds."""
    return [queue("a", *[10, 14, 20, 31] * 12, 200), queue("b", *[5, 60] * 6, 120), queue("home", 50, 50, home=0)]


def program_of(rule: DispatchRule, own: list[JobQueue]) -> Program:
    return SpreadPlanner((1, 1, 1), (SMALL, SMALL, LARGE), HOLDS, dispatch=rule)(own, LIMITS)


def step_s(rule: DispatchRule) -> float:
    program = program_of(rule, skewed())
    assert violations(program, skewed(), LIMITS) == []
    return simulate(program, (SMALL, SMALL, LARGE)).makespan_s


def test_step_when_dispatch_is_balanced_then_ends_before_even_shares_and_those_by_length():
    """LobRA's Figure 9: by length the replicas for short samples are late, balanced all end together."""
    balanced, even, by_length = (
        step_s(rule) for rule in (DispatchRule.BALANCED, DispatchRule.EVEN, DispatchRule.LENGTH)
    )
    busy = simulate(program_of(DispatchRule.BALANCED, skewed()), (SMALL, SMALL, LARGE))
    assert balanced < 0.85 * even and balanced < 0.7 * by_length
    assert min(busy.busy_s(replica) for replica in range(3)) > 0.98 * balanced


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 300), min_size=2, max_size=12), min_size=1, max_size=3),
    st.lists(st.sampled_from([16, 64, 200, 300]), min_size=1, max_size=4),
    st.sampled_from(RULES),
    st.booleans(),
)
def test_samples_when_dealt_by_any_rule_then_each_is_there_once_where_it_fits(jobs, holds, rule, in_pairs):
    def groups(lengths: list[int]) -> tuple[int, ...]:
        return (2,) * (len(lengths) // 2) + (1,) * (len(lengths) % 2) if in_pairs else ()

    own = [queue(f"j{n}", *lengths, groups=groups(lengths)) for n, lengths in enumerate(jobs)]
    replicas = [PricedReplica(ReplicaLayout(), most, SMALL) for most in holds]
    dealt = deal([*own, queue("home", 7, home=len(holds) - 1)], replicas, rule)
    for given_queue in own:
        lengths = given_queue.batches[0].lengths
        parts = [each.indices.get((given_queue.job, 0), []) for each in dealt]
        assert sorted(itertools.chain(*parts)) == list(range(len(lengths)))
        for replica, queues in zip(replicas, dealt, strict=True):
            for part in queues.queues:
                assert part.batches[0].longest <= replica.most_tokens or replica.most_tokens == max(holds)
    assert [q.job for q in dealt[-1].queues if q.home is not None] == ["home"]


def test_long_samples_when_attention_is_dear_then_their_replica_gets_fewer_tokens():
    replicas = [PricedReplica(ReplicaLayout(), 256, LinearCost(token_s=1.0, pair_s=0.1))] * 2
    dealt = deal([queue("a", 64, *[8] * 20)], replicas, DispatchRule.BALANCED)
    tokens = [sum(sum(q.batches[0].lengths) for q in each.queues) for each in dealt]
    assert sorted(tokens) == [64, 160]


@pytest.mark.parametrize(("rule", "degrees"), [*((rule, ()) for rule in RULES), (DispatchRule.BALANCED, (1, 2))])
def test_replica_when_measured_slower_than_its_like_then_only_balanced_dispatch_gives_it_less(rule, degrees):
    """And only where it does not matter to any bit who runs a sample."""
    planner, measured = SpreadPlanner((1, 1), (SMALL, SMALL), dispatch=rule, tensor=degrees), MeasuredPasses()
    for name, replica, n in itertools.product(PASSES, range(2), range(FEWEST)):
        load = MicrobatchLoad.of([(0, [8] * (n % 4 + 1))], 0)
        measured.stages.note_pass(name, replica, load, (1.0, 3.0)[replica] * load.rows)
    own = [queue("a", *[8] * 16)]
    program = planner.informed(measured, ())(own, LIMITS)
    tokens = sorted(m.num_tokens for m in program.microbatches)
    assert tokens == ([32, 96] if rule is DispatchRule.BALANCED and not degrees else [64, 64])


def test_samples_when_they_differ_within_a_bucket_then_replicas_get_alike_ones():
    """A few hundred lengths share sixteen buckets; neither replica gets the longer half of one."""
    own = queue("a", *range(100, 500))
    dealt = deal([own], [PricedReplica(ReplicaLayout(), 512, replace(SMALL, fixed_s=0.0))] * 2, DispatchRule.BALANCED)
    tokens = [sum(each.queues[0].batches[0].lengths) for each in dealt]
    assert abs(tokens[0] - tokens[1]) < 0.01 * sum(tokens)
