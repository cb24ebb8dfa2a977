"""A program that compiles the kernels of a run into Triton's cache, on several cores, without a GPU.

It reads a `KernelRequest` from one line of standard input; its argument is the file to create when everything is
compiled. It writes `ready` once the kernels of the first steps are compiled, and ends when its input is closed. One
process rehearses; its forks, which import nothing again, share the kernels.

A rehearsal runs the code of training, that is the fused step, the loss and the optimizer, on a model that has shapes
but no numbers, made from config.json alone. On the meta device they cost next to
nothing, and every launch is recorded instead of made (`kernels/launch.py`). First what the first steps and evaluations
of all jobs need, then what is needed when some of the jobs have ended. The model has no biases: no kernel of ours sees
them."""

from __future__ import annotations

import os
import select
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, combinations, product
from pathlib import Path
from typing import Any, NoReturn

import torch

from weft.adapters.frozen import FrozenWeight, join, quantise
from weft.kernels.adamw import ParameterLane, Update, adamw
from weft.kernels.fixed_point import Words, collect
from weft.kernels.launch import RecordedLaunch, build_driver, compile_launch, recorded_launches
from weft.kernels.layers.rms_norm import RmsNorm
from weft.kernels.layers.rotary import HeadNorms, Heads
from weft.kernels.lora.tables import ANY_ORDER, Needs, Site, rank_classes
from weft.methods.registry import METHODS
from weft.model.ahead.compile_ahead import READY, KernelRequest
from weft.model.fused.inputs import MIN_LONGEST, MIN_SPANS, Inputs, InputShape
from weft.model.fused.model import ROLES, SIDES, FusedLayer, FusedModel, LayerSites, Product, RotaryTable
from weft.model.fused.step import run_backward, run_forward
from weft.model.load import fp8_copies
from weft.model.loss import BlockedLoss, Head
from weft.model.packing.attention import needs_bounds
from weft.model.path import Memory
from weft.plan.cost.memory import LOSS_ROWS
from weft.plan.cost.shape import GPU_ROW_TILE
from weft.plan.decoder import Decoder, Rotary, moved_names
from weft.plan.families import describe
from weft.processes import end_with_parent, num_cores

META = torch.device("meta")


def skeleton(config: Mapping[str, Any], dtype: torch.dtype, quantize: str, tensor: int = 1) -> FusedModel:
    """The model of a configuration, with one layer of each kind instead of all. `tensor`: number of devices that share
    every layer; the parts are those of one of them."""
    decoder = describe(with_rotary(config))
    sizes = decoder.sizes
    assert sizes.form.activation is not None
    maker = _Maker(decoder, dtype, quantize, tensor)
    kinds = _distinct_layers(decoder)
    layers = tuple(maker.layer(position, index, len(kinds)) for position, index in enumerate(kinds))
    return FusedModel(
        device=META,
        dtype=dtype,
        hidden=sizes.hidden,
        embedding_VD=maker.empty(sizes.vocabulary, sizes.hidden),
        embedding_scale=decoder.embedding_scale,
        input_scale=decoder.input_scale,
        residual_scale=decoder.residual_scale,
        layers=layers,
        norm=maker.norm(sizes.hidden),
        post=maker.norm_if(sizes.form.norms.after_mlp),
        heads=Heads(sizes.num_heads // tensor, sizes.num_kv_heads // tensor, sizes.head_size),
        rotaries=tuple(maker.rotary(rotary) for rotary in decoder.rotaries),
        attention_scale=decoder.attention_scale,
        activation=sizes.form.activation,
        moved=moved_names(sizes),
    )


def skeleton_head(config: Mapping[str, Any], dtype: torch.dtype) -> Head:
    sizes = describe(config).sizes
    weight_VD = torch.empty(sizes.vocabulary, sizes.hidden, dtype=dtype, device=META)
    return Head(weight_VD, softcap=config.get("final_logit_softcapping"))


def with_rotary(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A configuration with the rotary share of heads where transformers 5 keeps it."""
    if config.get("rope_parameters") or "partial_rotary_factor" not in config:
        return config
    return {**config, "rope_parameters": {"partial_rotary_factor": config["partial_rotary_factor"]}}


def _distinct_layers(decoder: Decoder) -> list[int]:
    """The first layer and the second, whose predecessors differ, and the first of each other kind."""
    first = {decoder.layers[index]: index for index in reversed(range(1, len(decoder.layers)))}
    return sorted({0, *first.values()})


class _Maker:
    def __init__(self, decoder: Decoder, dtype: torch.dtype, quantize: str, tensor: int) -> None:
        self._decoder, self._tensor = decoder, tensor
        self._dtype = dtype
        self._quantize = quantize
        linears = decoder.sizes.linears.values()
        self._copies = fp8_copies(decoder.sizes.num_layers * sum(out * size for out, size in linears), META)

    def empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self._dtype, device=META)

    def norm(self, size: int) -> RmsNorm:
        """A norm as `fuse` makes it; its epsilon is not part of a kernel."""
        kind = self._decoder.sizes.form.norm_weight
        if kind == "one_plus":
            return RmsNorm(self.empty(size).float(), 1e-6, rounds_first=False)
        return RmsNorm(self.empty(size), 1e-6, rounds_first=kind == "factor")

    def norm_if(self, name: str | None) -> RmsNorm | None:
        return None if name is None else self.norm(self._decoder.sizes.hidden)

    def rotary(self, rotary: Rotary) -> RotaryTable:
        number = int(self._decoder.sizes.head_size * rotary.share) // 2
        return RotaryTable(torch.empty(number, device=META), 1.0, rotary.stretch)

    def layer(self, position: int, index: int, number: int) -> FusedLayer:
        """Layer `position` of the `number` layers that are made."""
        sizes, kind = self._decoder.sizes, self._decoder.layers[index]
        names, module = sizes.form.norms, position * len(sizes.linears)
        products = []
        for role, site in zip(ROLES, sizes.sites, strict=True):
            products.append(self._product(role, module, [sizes.linears[name] for name in site]))
            module += len(site)
        qkv, out, gate_up, down = products
        head_norms = None
        if sizes.form.has_head_norms:
            is_wide = sizes.form.head_norm == "all"
            nums = (sizes.num_heads, sizes.num_kv_heads) if is_wide else (1, 1)
            q_norm, k_norm = (self.norm(num * sizes.head_size) for num in nums)
            head_norms = HeadNorms(q_norm.weight_D, *k_norm, is_wide=is_wide)
        return FusedLayer(
            qkv=qkv,
            out=out,
            gate_up=gate_up,
            down=down,
            norm_in=self.norm_if(names.before_attention),
            norm_mid=self.norm_if(names.before_mlp),
            post_in=self.norm_if(names.after_mlp if index else None),
            post_mid=self.norm_if(names.after_attention),
            head_norms=head_norms,
            sites=LayerSites.of(position, number, number * len(sizes.linears), sizes.hidden),
            window=kind.window,
            rotary=kind.rotary,
        )

    def _product(self, role: str, module: int, linears: list[tuple[int, int]]) -> Product:
        weights = [self._weight(role, *shape) for shape in linears]
        site = Site(module, tuple(weight.shape[0] for weight in weights), weights[0].shape[1], role)
        return Product(site, weights[0] if len(weights) == 1 else join(weights), None)

    def _weight(self, role: str, num_out: int, num_in: int) -> FrozenWeight:
        """A weight stored as a loader stores it: first as a whole."""
        whole = quantise(self.empty(num_out, num_in), self._quantize, copies=self._copies)
        if SIDES[role] == "outputs":
            num_out //= self._tensor
        else:
            num_in //= self._tensor
        return whole.cut(slice(0, num_out), slice(0, num_in))


def rehearse(request: KernelRequest) -> tuple[list[RecordedLaunch], list[RecordedLaunch]]:
    whole = Needs.of(request.ranks, drops=request.drops, others=request.others)
    first = recorded_launches(request.gpu, lambda: _run(request, [whole]))
    later = recorded_launches(request.gpu, lambda: _run(request, all_needs(request.ranks, drops=request.drops)))
    known = set(first)
    return first, [launch for launch in later if launch not in known]


def all_needs(ranks: Sequence[int], *, drops: bool) -> list[Needs]:
    # The widest rank of a class represents the class.
    kinds = sorted({rank_classes([rank])[-1] for rank in ranks})
    groups = chain.from_iterable(combinations(kinds, number) for number in range(1, len(kinds) + 1))
    found = [Needs.of(group, drops=dropped) for group in groups for dropped in {False, drops}]
    return list(dict.fromkeys(found))


def _run(request: KernelRequest, needs: Sequence[Needs]) -> None:
    dtype = getattr(torch, request.dtype)
    model = skeleton(request.config, dtype, request.quantize, request.tensor)
    for each in needs:
        for shape in _shapes(each):
            _step(model, shape, each, Memory(request.recompute))  # type: ignore[arg-type]
    linears = [(size, site.num_in) for site in model.sites for size in site.sizes if site.role in ROLES]
    for method, rank in request.copies:
        METHODS[method].compile_copy(rank, linears, torch.empty(0, dtype=dtype, device=META))
    loss = BlockedLoss(skeleton_head(request.config, dtype))
    hidden_ND = torch.empty(LOSS_ROWS, model.hidden, dtype=dtype, device=META)
    targets_N, weights_N = torch.empty(LOSS_ROWS, dtype=torch.int64, device=META), torch.empty(LOSS_ROWS, device=META)
    loss(hidden_ND, targets_N, weights_N)
    loss(hidden_ND, targets_N)
    for number, num_lanes in product(_numbers_of_jobs(request.num_jobs), request.lanes):
        _step_jobs(number, num_lanes)
    if ANY_ORDER in request.others:
        sums_P = torch.empty(16, device=META)
        collect(Words.of_nothing(sums_P), sums_P)


def _shapes(needs: Needs) -> Iterator[InputShape]:
    """Shapes of a training microbatch and, if its kernels differ, of an evaluation's, without dropout."""
    longest = MIN_LONGEST if needs_bounds(META) else 0
    for drops in {True, not needs.drops}:
        yield InputShape(GPU_ROW_TILE, 2 * MIN_SPANS, longest, is_adapted=True, drops=drops)


def _step(model: FusedModel, shape: InputShape, needs: Needs, memory: Memory) -> None:
    table = model.table()
    table.needs = needs
    inputs = Inputs(shape, torch.empty(shape.layout["end"][0], dtype=torch.int32, device=META))
    passed = run_forward(model, inputs, table, None, memory, needs_grad=True)
    run_backward(passed, torch.empty_like(passed.left_TD))


def _numbers_of_jobs(most: int) -> list[int]:
    return [1, *(2**power for power in range(6, most.bit_length() + 1) if 2 ** (power - 1) < most)]


def _step_jobs(number: int, num_lanes: int) -> None:
    buffer_P = torch.empty(64, device=META)
    lane = ParameterLane(buffer_P, buffer_P, buffer_P, buffer_P, 1e-3)
    adamw([Update((lane,) * num_lanes, 1, (0.9, 0.999), 1e-8, 0.0, 1.0, True)] * number)


MOST_WORKERS = 12
"""Number of workers; more would wait for each other's longest kernel."""
SLOWEST = ("_product_grad", "_grad_keys", "_product", "_grad_a", "_grad_queries", "_grad_b", "_attend")
"""Kernels that take longest to compile, about ten times as long as others: they go first."""
NICENESS = 10
"""Niceness of workers, so that loading weights has priority."""
_NUMBER = struct.Struct("<i")
_STDIN, _STDOUT = 0, 1
"""Constant of Linux; Triton runs nowhere else."""


def main() -> None:
    os.nice(NICENESS)
    line = sys.stdin.readline()
    if not line:
        return
    first, later = (sorted(part, key=_rank) for part in rehearse(KernelRequest.from_json(line)))
    if _compile_all([*first, *later], len(first), min(MOST_WORKERS, max(1, num_cores() - 1))):
        Path(sys.argv[1]).touch()


def _rank(launch: RecordedLaunch) -> int:
    name = launch.kernel.__name__
    return SLOWEST.index(name) if name in SLOWEST else len(SLOWEST)


def _compile_all(launches: Sequence[RecordedLaunch], num_first: int, num_workers: int) -> bool:
    queue, put = os.pipe()
    finished, report = os.pipe()
    # Small enough for a pipe to hold, so no one has to feed it.
    os.write(put, b"".join(_NUMBER.pack(index) for index in range(len(launches))))
    os.close(put)
    parent = os.getpid()
    for _ in range(num_workers):
        if os.fork() == 0:
            end_with_parent(parent)
            _work(launches, queue, report)
    os.close(report)
    build_driver()
    done: set[int] = set()
    while not _is_orphaned(finished):
        number = os.read(finished, _NUMBER.size)
        if not number:
            break
        index = _NUMBER.unpack(number)[0]
        done.add(index)
        if index < num_first and done.issuperset(range(num_first)):
            os.write(_STDOUT, READY)
    return len(done) == len(launches)


def _work(launches: Sequence[RecordedLaunch], queue: int, report: int) -> NoReturn:
    """Takes kernels from the queue until it is empty; never returns."""
    while number := os.read(queue, _NUMBER.size):
        try:
            compile_launch(launches[_NUMBER.unpack(number)[0]])
        except BaseException:  # the run compiles it itself, with a clearer error
            continue
        os.write(report, number)
    os._exit(0)


def _is_orphaned(finished: int) -> bool:
    """Waits for the next kernel; returns whether the parent has ended instead."""
    ready, _, _ = select.select([_STDIN, finished], [], [])
    return _STDIN in ready


if __name__ == "__main__":
    main()
