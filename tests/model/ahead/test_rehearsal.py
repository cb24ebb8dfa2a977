"""What is rehearsed from config.json alone is what a run launches.

The interpreter takes the place of the compiler wherever it is on, so the work is done in a process without it: this
file run as a program. There a run is real up to its launches: transformers' own model, the fused path, packed samples,
adapters and their optimizers, all on the meta device, which stands for a GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from covering import chosen

from weft.kernels.device import GpuKind
from weft.model.ahead.compile_ahead import KernelRequest

H200 = GpuKind("NVIDIA H200", (9, 0), 132, 2**37)
LARGE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
"""So large that FP8 and the products with the adapters' part inside them take it."""
CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama_bias": {},
    "llama_odd": {},
    "mistral": {},
    "qwen2_sliding": {},
    "qwen3": {},
    "gemma3_text": {},
    "phi3": {},
    "phi3_partial": {},
    "smollm3": {},
    "olmo3": {},
    "ministral3": {},
    "granite": {},
    "granitemoehybrid": {},
    "ranks": {"model": LARGE, "ranks": (8, 32, 100)},
    "dropout": {"model": LARGE, "ranks": (8, 32), "dropout": 0.1},
    "fp8": {"model": LARGE, "quantize": "fp8"},
    "nf4": {"model": LARGE, "quantize": "nf4"},
    "int8": {"model": LARGE, "quantize": "int8"},
    "mlp again": {"recompute": "mlp"},
    "all again": {"recompute": "full"},
    "any order": {"model": LARGE, "gradient_sum": "any_order"},
    "many jobs": {"ranks": (8,) * 33},
    "bottleneck": {"model": LARGE, "method": "bottleneck", "ranks": (64, 64)},
    "dora": {"model": LARGE, "method": "dora", "ranks": (8, 12)},
    "vera": {"model": LARGE, "method": "vera", "ranks": (16, 32)},
    "shared layers": {"model": LARGE, "ranks": (8, 32), "dropout": 0.1, "tensor": 2},
    "shared layers in fp8": {"model": LARGE, "quantize": "fp8", "tensor": 2},
    "dora on shared layers": {"model": LARGE, "method": "dora", "quantize": "nf4", "tensor": 2},
    "vera on shared layers": {"model": LARGE, "method": "vera", "ranks": (16, 32), "tensor": 2},
}
"""Families by their names; Llama in other ways."""
FIRST = (
    "qwen2_sliding",
    "gemma3_text",
    "phi3_partial",
    "olmo3",
    "ministral3",
    "ranks",
    "dropout",
    "fp8",
    "all again",
    "any order",
)
FIRST += ("bottleneck", "dora on shared layers", "vera on shared layers")
"""What `make test` compares: every setting once."""
every_case = pytest.mark.parametrize("case", chosen(CASES, *(list(CASES).index(name) for name in FIRST)))


@pytest.fixture(scope="module")
def compared(request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    """By case: how many kernels a run launches, which of them were not rehearsed, and which were in vain."""
    here = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    names = {item.callspec.params["case"] for item in here}
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, *sorted(names)],
        env=env | {"PYTHONPATH": os.pathsep.join([str(root), env.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return found


@every_case
def test_rehearsal_when_a_run_is_like_it_then_every_launch_was_known(compared, case):
    """A first run finds every kernel compiled, whatever its model, ranks, dropout and storage."""
    assert compared[case]["number"] > 15
    assert compared[case]["missing"] == []


@every_case
def test_rehearsal_when_a_run_is_like_it_then_the_run_waits_for_no_kernel_in_vain(compared, case):
    """What the first microbatch waits for is what the run needs, and nothing else."""
    assert compared[case]["vain"] == []


def test_rehearsal_when_some_jobs_have_ended_then_what_the_others_launch_was_known(compared):
    """A job that is left alone with its class of ranks finds its kernels, and only then needs these."""
    assert compared["left alone"]["number"] > 15
    assert compared["left alone"]["missing"] == []
    assert compared["left alone"]["vain"]


def real_run(model: Any, jobs: tuple[tuple[int, float], ...], case: dict[str, Any]) -> None:
    """Loads a model, trains a microbatch of all jobs, evaluates it, and steps all of them."""
    from thread_devices import EchoDevices

    from weft.adapters.adapter import Adapter
    from weft.data.samples import Sample
    from weft.engine.execute.optimizers.adamw import AdamW
    from weft.engine.execute.optimizers.optimizer import step_together
    from weft.model.backbone import Backbone
    from weft.model.load import _store_linears
    from weft.model.packed import SlotSample, pack_samples
    from weft.model.path import Memory
    from weft.spec import JobSpec

    meta = torch.device("meta")
    backbone = Backbone(model, None, "tiny")  # type: ignore[arg-type]
    quantize, count = case.get("quantize", "none"), case.get("tensor", 1)
    if quantize != "none" or count > 1:
        _store_linears(backbone, quantize, meta, EchoDevices(count) if count > 1 else None)
    # With `offload` nothing is captured, and there is nothing to move either; nor is what no graph can hold.
    backbone.use_kernels("fused", Memory(case.get("recompute", "none"), offload=count == 1))
    sample = Sample(np.arange(5), np.array([False, True, True, True, True]))
    optimizers, trained, evaluated_samples = [], [], []
    method = case.get("method", "lora")
    for rank, dropout in jobs:
        spec = adapter_spec(method, rank, dropout)
        with patch.object(Adapter, "_initialise"):  # of weights without numbers there is nothing to begin with
            adapter = backbone.new_adapter(
                spec, 0, torch.device("cpu"), gradient_sum=case.get("gradient_sum", "in_order")
            )
        adapter._take({name: group.params.to(meta) for name, group in adapter.groups.items()})
        slot = backbone.attach(adapter)
        optimizers.append(AdamW(adapter, JobSpec(name="a", train_data="a.jsonl", adapter=spec)))
        trained.append(SlotSample(sample, slot, dropout_key=1))
        evaluated_samples.append(SlotSample(sample, slot))
    tile = backbone.path.row_tile(sample.length * len(jobs))
    running = backbone.launch(pack_samples(trained, tile, meta), tile)
    finite_J = running.finite(range(len(jobs)), len(jobs))
    evaluated = pack_samples(evaluated_samples, tile, meta)
    backbone.path.look(evaluated, tile)
    # A captured graph includes the backward pass, whether or not it is run.
    backbone.launch(evaluated, tile)
    for optimizer in optimizers:
        optimizer.adapter.complete_gradients()
    for number in (1, len(jobs)):
        step_together(optimizers[:number], [True] * number, finite_J[:number].clone())


def adapter_spec(method: str, rank: int, dropout: float = 0.0) -> Any:
    """A method's settings with a given rank or width."""
    from weft.spec import AdapterSpec

    names = {"bottleneck": "bottleneck_size", "vera": "vera_rank"}
    return AdapterSpec(method=method, lora_dropout=dropout, **{names.get(method, "r"): rank})


def meta_model(family: str, changes: dict[str, Any]) -> Any:
    """Transformers' model of a tiny family, without numbers."""
    import transformers
    from tiny_families import FAMILIES

    kind, settings = FAMILIES[family]
    config = getattr(transformers, f"{kind}Config")(**{**settings, **changes})
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def names_of(launches: set[Any]) -> list[str]:
    """What a kernel is called, and how it is compiled."""
    return sorted(f"{launch.kernel.__name__} {launch.specialization}" for launch in launches)


def compare(name: str, case: dict[str, Any]) -> dict[str, Any]:
    """What a run launches beside what was rehearsed for it."""
    from tiny_families import FAMILIES

    from weft.kernels.launch import recorded_launches
    from weft.kernels.lora.tables import ANY_ORDER
    from weft.methods.registry import method_of
    from weft.model.ahead.child import rehearse

    model = meta_model(name if name in FAMILIES else "llama", case.get("model", {}))
    ranks, dropout = case.get("ranks", (8, 12)), case.get("dropout", 0.0)
    specs = [adapter_spec(case.get("method", "lora"), rank) for rank in ranks]
    method = method_of(specs[0])
    free = {ANY_ORDER} if case.get("gradient_sum") == "any_order" else set()
    request = KernelRequest(
        # As in the model's directory.
        config=json.loads(model.config.to_json_string()),
        dtype="bfloat16",
        quantize=case.get("quantize", "none"),
        recompute=case.get("recompute", "none"),
        tensor=case.get("tensor", 1),
        ranks=tuple(sorted(set(ranks))),
        drops=dropout > 0,
        others=tuple(sorted({*method.kernel_changes, *free})),
        copies=tuple(sorted({(spec.method, method.kernel_rank(spec)) for spec in specs})),
        num_jobs=len(ranks),
        lanes=(len(method.groups),),
        gpu=H200,
    )
    first, later = rehearse(KernelRequest.from_json(request.to_json()))
    stay = case.get("stay", ranks)
    real = set(recorded_launches(H200, lambda: real_run(model, tuple((rank, dropout) for rank in stay), case)))
    return {
        "number": len(real),
        "missing": names_of(real - {*first, *later}),
        "vain": names_of({*first} - real),
    }


if __name__ == "__main__":
    cases = {name: CASES[name] for name in sys.argv[1:]}
    cases |= {"left alone": {"model": LARGE, "ranks": (8, 32), "stay": (32,)}}
    print(json.dumps({name: compare(name, case) for name, case in cases.items()}))
