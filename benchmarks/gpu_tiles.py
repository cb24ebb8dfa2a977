"""What rows cost on a GPU by how many a microbatch has, and by the tiles that its frozen products are computed in.

    python -m benchmarks gpu-tiles

Prints the milliseconds of 512 rows, forward and back through two layers of the 70B shape with four jobs of rank 16, out
of microbatches of 512 to 4,096 rows (medians). A microbatch is filled up to whole tiles, so its rows are those.
"""

from __future__ import annotations

import numpy as np
import torch

from benchmarks.pipeline.one_gpu import OneDevice
from weft.data.samples import Sample
from weft.kernels.device_event import median_s
from weft.model.model_part import ModelPart
from weft.model.packed import PackedBatch, SlotSample, pack_samples
from weft.parallel.stages.stage_runner import stage_runner
from weft.plan.cost.shape import find_shape
from weft.spec import AdapterSpec

NUM_JOBS, RANK = 4, 16
ROWS, TILES = (512, 1024, 2048, 4096), (512, 1024, 2048)
SHAPE = find_shape("llama-3.1-70b")


def gpu_tiles() -> None:
    """Rows on a GPU by the size of the microbatch and of its tiles."""
    device = torch.device("cuda", 0)
    bench = OneDevice(SHAPE, torch.bfloat16, device, max(ROWS))
    stage = bench.backbone(ModelPart(39, 41, SHAPE.layers))
    adapters = [stage.new_adapter(AdapterSpec(r=RANK, lora_dropout=0.0), job) for job in range(NUM_JOBS)]
    slots = [stage.attach(adapter) for adapter in adapters]
    runner = stage_runner(stage)
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}; ms of 512 rows")
    for rows in ROWS:
        tokens = np.zeros(rows // NUM_JOBS, dtype=np.int32)
        sample = Sample(tokens, np.ones(len(tokens), dtype=np.bool_))
        on_slots = [SlotSample(sample, slot, 1 / rows, dropout_key=slot) for slot in slots]
        times = []
        for tile in (tile for tile in TILES if tile <= rows):
            batch = pack_samples(on_slots, tile, device)
            assert batch.num_rows == rows
            crossing_TD = torch.randn(rows, SHAPE.hidden, dtype=torch.bfloat16, device=device)

            def there_and_back(
                batch: PackedBatch = batch, tile: int = tile, crossing_TD: torch.Tensor = crossing_TD
            ) -> None:
                runner.forward(0, batch, tile, crossing_TD)
                runner.backward(0, crossing_TD)

            taken = median_s(there_and_back, device, warmups=3, repeats=9, in_a_row_s=0.1)
            times.append(f"{tile}: {1000 * taken * 512 / rows:.2f}")
        print(f"  of {rows:>5} in tiles of " + "   ".join(times), flush=True)
