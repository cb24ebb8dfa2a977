"""The slots' table: what jobs coming and going change for kernels already captured."""

from __future__ import annotations

import pytest
import torch

from weft.kernels.lora.tables import (
    BARE,
    SPARE_SLOTS,
    Entry,
    Needs,
    RankLaunch,
    SampleRows,
    Site,
    SlotTable,
    TableSizes,
    rank_classes,
    table_arrays,
)

SITE = Site(0, (8,), 16)


def entry(rank: int, dropout: float = 0.0) -> dict[int, Entry]:
    a_PD, b_OP = torch.zeros((rank + 7) // 8 * 8, 16), torch.zeros(8, (rank + 7) // 8 * 8)
    return {0: Entry(rank, a_PD, b_OP, torch.zeros(rank, 16), torch.zeros(8, rank), 1.0, dropout, 1)}


@pytest.mark.parametrize(
    ("ranks", "classes"),
    [((), (16,)), ((8, 16), (16,)), ((32,), (64,)), ((8, 32), (16, 64)), ((64, 128), (64, 128)), ((100, 256), (256,))],
)
def test_rank_classes_when_ranks_are_seen_then_each_has_one_class(ranks, classes):
    """Narrow, middle and wide; a class that no adapter needs is not launched."""
    assert rank_classes(ranks) == classes


def test_launches_when_there_are_several_then_each_rank_belongs_to_exactly_one():
    """Rows without an adapter (width 0) too: they are with the narrowest there is."""
    table = SlotTable([SITE], torch.device("cpu"))
    for rank, launches in (
        (200, (RankLaunch(-1, 256),)),
        (40, (RankLaunch(-1, 64), RankLaunch(64, 256))),
        (4, (RankLaunch(-1, 16), RankLaunch(16, 64), RankLaunch(64, 256))),
    ):
        table.put(entry(rank))
        assert table.launches == launches
        for width in range(0, 201, 8):
            assert sum(launch.above < width <= launch.upto for launch in table.launches) == 1


def test_needs_when_jobs_come_and_go_then_are_those_of_the_jobs_there():
    """A captured graph serves every job of its class; a job that has left costs the others nothing."""
    table = SlotTable([SITE], torch.device("cpu"))
    narrow = Needs(16, (16,), drops=False)
    assert table.needs == narrow
    for rank, dropout, needs in (
        (16, 0.0, narrow),
        (8, 0.1, Needs(16, (16,), drops=True)),
        (64, 0.0, Needs(64, (16, 64), drops=False)),
        (33, 0.0, Needs(64, (16, 64), drops=False)),
        (300, 0.1, Needs(512, (16, 512), drops=True)),
    ):
        stays, leaves = table.put(entry(8)), table.put(entry(rank, dropout))
        assert table.needs == needs
        table.remove(leaves)
        assert table.needs == narrow
        table.remove(stays)
        assert table.needs == narrow
    assert table.version == 0


def test_table_arrays_when_samples_of_a_job_follow_one_another_then_are_one_run_in_every_block_they_touch():
    """Runs cover all rows, each block names exactly the runs that have rows there, also one that begins in its last."""
    spans = [
        SampleRows(0, 100, 1),
        SampleRows(100, 127, 1),
        SampleRows(127, 256, 2),
        SampleRows(256, 300, BARE),
        SampleRows(310, 384, 3),
    ]
    tables = table_arrays(spans, TableSizes(512, 8))
    runs = [tuple(line) for line in tables["runs_G4"][:5].tolist()]
    assert runs == [(0, 127, 1, 0), (127, 256, 2, 0), (256, 310, BARE, 0), (310, 384, 3, 0), (384, 512, BARE, 0)]
    assert not tables["runs_G4"][5:].any()
    assert tables["blocks_B2"].tolist() == [[0, 2], [1, 2], [2, 4], [4, 5]]
    tiles = tables["tiles_N4"]
    assert (tiles[:, 1] - tiles[:, 0]).sum() == 512 and (tiles[:, 1] - tiles[:, 0]).max() == 64


def test_put_when_the_device_has_no_room_then_nothing_has_changed(monkeypatch):
    table = SlotTable([SITE], torch.device("cpu"))
    for _ in range(SPARE_SLOTS - 1):
        table.put(entry(8))

    def end(*_args: object, **_options: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as short:
        short.setattr(torch, "zeros", end)
        with pytest.raises(torch.OutOfMemoryError):
            table.put({})
    assert table.put(entry(8)) == SPARE_SLOTS and table.device_SMF[SPARE_SLOTS, 0, 0] & 0xFFFF == 8
