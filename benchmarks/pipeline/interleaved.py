"""Two microbatches side by side on devices that share every layer, simulated.

interleave_nvlink   time of both one after the other over that of a pair, which takes turns at every all-reduce, so that
                    one computes while the other's results are added up: Llama-3.1-8B on two H100, forward and backward,
                    4 samples of 1,024 tokens in each
interleave_pcie     the same on two L40S, whose link is PCIe
interleave_hidden_nvlink, interleave_hidden_pcie    share of the time of all-reduces that is hidden so
interleave_muxtune_nvlink, interleave_muxtune_pcie  the same as the first two in the order of MuxTune's algorithm 1

Seconds are the hardware table's; links are assumed: what the table says of NVLink and PCIe.
"""

from __future__ import annotations

from weft.plan.cost.analytic import BackboneSetup
from weft.plan.cost.hardware import find_hardware
from weft.plan.cost.operators import layer_graph
from weft.plan.cost.published_shapes import find_shape
from weft.plan.cost.shape import ModelShape
from weft.plan.interleave import between_sums, in_turns, launch_order, one_after_another, segment
from weft.plan.simulate.two_streams import run_order

MODEL, DEGREE, NUM_GROUPS = "llama-3.1-8b", 2, 2
LENGTHS = (1024,) * 4
DEVICES = {"nvlink": "h100", "pcie": "l40s"}


def measure_interleaved() -> dict[str, float]:
    """Keys as in `python -m benchmarks pipeline --json`."""
    shape = ModelShape.from_config(find_shape(MODEL).config().to_dict(), MODEL)
    found = {}
    for link, device in DEVICES.items():
        cost = BackboneSetup(shape).cost(find_hardware(device), tensor_parallel=DEGREE)
        alone_s = paired_s = published_s = reduce_s = 0.0
        for is_forward in (True, False):
            graph = layer_graph(cost, LENGTHS, shape.num_layers, is_forward=is_forward)
            groups = [between_sums(graph, group) for group in range(NUM_GROUPS)]
            cut = [segment(graph, group) for group in range(NUM_GROUPS)]
            alone_s += run_order(one_after_another(groups), groups).makespan_s
            paired_s += run_order(in_turns(groups), groups).makespan_s
            published_s += run_order(launch_order(cut), cut).makespan_s
            reduce_s += sum(own.reduce_s for group in groups for own in group)
        found[f"interleave_{link}"] = alone_s / paired_s
        found[f"interleave_hidden_{link}"] = (alone_s - paired_s) / reduce_s
        found[f"interleave_muxtune_{link}"] = alone_s / published_s
    return found
