import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import random_sample

from weft.kernels.dropout import row_keys
from weft.model.packed import SlotSample, pack_samples

CPU = torch.device("cpu")


@given(
    st.lists(st.tuples(st.integers(1, 90), st.sampled_from([None, 0, 1])), min_size=1, max_size=8),
    st.sampled_from([None, 128]),
)
def test_pack_samples_when_any_then_rows_targets_and_weights_belong_together(drawn, tile):
    rng = np.random.default_rng(len(drawn))
    slot_samples = [
        SlotSample(random_sample(rng, length), slot, weight=0.5 + i, dropout_key=100 + i, position=3 * i)
        for i, (length, slot) in enumerate(drawn)
    ]
    batch = pack_samples(slot_samples, tile, CPU)
    assert batch.num_tokens == sum(length for length, _ in drawn)
    assert len(batch.input_ids_T) == batch.num_tokens if tile is None else len(batch.input_ids_T) % tile == 0
    assert sum(batch.counts) == len(batch.supervised_N) == len(batch.targets_N) == len(batch.weights_N)
    done = 0
    for item, rows, count in zip(slot_samples, batch.segments, batch.counts, strict=True):
        own = slice(rows.start, rows.end)
        assert batch.input_ids_T[own].tolist() == item.sample.tokens.tolist()
        assert batch.positions_T[own].tolist() == list(range(item.position, item.position + item.sample.length))
        assert batch.dropout_keys_T[own].tolist() == row_keys(item.dropout_key, item.sample.length).tolist()
        predicted = np.flatnonzero(item.sample.supervised).tolist()
        assert count == len(predicted)
        assert batch.supervised_N[done : done + count].tolist() == [rows.start + i - 1 for i in predicted]
        assert batch.targets_N[done : done + count].tolist() == item.sample.tokens[predicted].tolist()
        assert set(batch.weights_N[done : done + count].tolist()) <= {item.weight}
        done += count


@given(
    st.lists(st.tuples(st.integers(1, 150), st.sampled_from([None, 0, 1])), min_size=1, max_size=8),
    st.sampled_from([None, 128]),
)
def test_windows_when_any_then_they_cover_each_slots_rows_once_and_have_one_size(drawn, tile):
    rng = np.random.default_rng(0)
    batch = pack_samples([SlotSample(random_sample(rng, length), slot) for length, slot in drawn], tile, CPU)
    covered: dict[int, list[int]] = {}
    sizes: set[int] = set()
    for run in batch.slots:
        for window in run.windows:
            buffer = list(range(len(batch.input_ids_T)))
            covered.setdefault(run.slot, []).extend(buffer[window.own])
            assert buffer[window.computed][window.inside] == buffer[window.own]
            sizes.add(len(buffer[window.computed]))
    assert tile is None or len(sizes) <= 1
    for slot in (0, 1):
        pairs = zip(drawn, batch.segments, strict=True)
        expected = [row for (_, own), s in pairs if own == slot for row in range(s.start, s.end)]
        assert covered.get(slot, []) == expected


def test_pack_samples_when_nothing_drops_out_then_there_are_no_keys():
    sample = random_sample(np.random.default_rng(0), 4)
    assert pack_samples([SlotSample(sample, 0)], None, CPU).dropout_keys_T is None
