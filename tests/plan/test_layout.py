"""What a layout means, and the error for a text that is none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.errors import ConfigError, PlanError
from weft.plan.layout import Layout, ReplicaLayout, parse_layout

NUMBERS = st.integers(1, 5)


@pytest.mark.parametrize(
    ("text", "replicas", "printed"),
    [
        ("stages:1", [ReplicaLayout()], "stages:1"),
        ("spread:1", [ReplicaLayout()], "stages:1"),
        ("stages:2,tensor:2", [ReplicaLayout(tensor=2, stages=2)], "tensor:2,stages:2"),
        ("shards:4", [ReplicaLayout(shards=4)], "shards:4"),
        ("spread:3", [ReplicaLayout()] * 3, "spread:3"),
        ("spread:2,stages:2", [ReplicaLayout(stages=2)] * 2, "spread:2,stages:2"),
        ("stages:1+stages:2", [ReplicaLayout(), ReplicaLayout(stages=2)], "stages:1+stages:2"),
        ("stages:1+stages:1+tensor:2", [ReplicaLayout()] * 2 + [ReplicaLayout(tensor=2)], "spread:2+tensor:2"),
    ],
)
def test_layout_when_written_then_read_and_printed(text, replicas, printed):
    assert parse_layout(text) == Layout(tuple(replicas))
    assert str(parse_layout(text)) == printed


@given(st.lists(st.builds(ReplicaLayout, NUMBERS, NUMBERS, NUMBERS), min_size=1, max_size=5))
def test_layout_when_printed_then_comes_back(replicas):
    layout = Layout(tuple(replicas))
    assert parse_layout(str(layout)) == layout
    assert layout.num_devices == sum(own.tensor * own.shards * own.stages for own in replicas)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "got ''; accepted are tensor:N, shards:N, stages:N, spread:N"),
        ("stages", "Did you mean stages:2?"),
        ("stage:4", "Did you mean stages:4?"),
        ("stages:0", "Did you mean stages:2?"),
        ("stages:-1", "got 'stages:-1'"),
        ("stages:\u0662", "Did you mean stages:2?"),
        ("stages:2,", "in which '' is no part of a layout"),
        ("stages:1+rows:2", "in which 'rows:2' is no part of a layout"),
        ("stages:2,stages:4", "in which stages is given twice for a replica"),
        ("stages:2,stages:4", "Give stages once for a replica."),
        ("stages:1++stages:2", "in which '' is no part"),
        ("shards:1025", "got 'shards:1025'; a layout has at most 1,024 devices."),
        ("tensor:32,stages:64", "a layout has at most 1,024 devices."),
        ("spread:1000000000", "a layout has at most 1,024 devices."),
        ("stages:1000+stages:25", "a layout has at most 1,024 devices."),
        pytest.param(f"stages:{'9' * 5000}", "a layout has at most 1,024 devices.", id="5000 digits"),
    ],
)
def test_layout_when_a_text_is_none_then_refused_with_what_was_meant(text, message):
    with pytest.raises(ConfigError) as found:
        parse_layout(text, where="--layout")
    assert message in str(found.value) and str(found.value).startswith("--layout: got ")


def test_replica_when_a_number_is_none_then_refused():
    with pytest.raises(PlanError, match="0 × 1 × 2 devices are no layout"):
        ReplicaLayout(tensor=0, stages=2)


def test_layout_when_the_caller_accepts_auto_then_a_refusal_names_it():
    with pytest.raises(ConfigError, match=r"\(stages:1\+stages:2\), or auto\. Did you mean auto\?"):
        parse_layout("aut", or_auto=True)
    with pytest.raises(ConfigError, match=r"\(stages:1\+stages:2\)\.$"):
        parse_layout("aut")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("stages:2", ["stage 0", "stage 1"]),
        ("spread:2", ["replica 0", "replica 1"]),
        ("stages:1+stages:2", ["replica 0", "replica 1, stage 0", "replica 1, stage 1"]),
        ("shards:2", ["shard 0", "shard 1"]),
        ("tensor:2,stages:2", ["stage 0", "stage 1"]),
        ("shards:2+stages:1", ["replica 0, shard 0", "replica 0, shard 1", "replica 1"]),
        ("shards:2,stages:2", [f"shard {shard}, stage {stage}" for shard in range(2) for stage in range(2)]),
    ],
)
def test_stages_when_named_then_by_the_word_that_the_layout_has_for_them(text, names):
    assert parse_layout(text).stage_names == names
