"""Every kernel compiles for the GPUs we serve, in bf16, as its public function launches it.

The interpreter takes the place of the compiler wherever it is on, so the work is done in a process without it: this
file run as a program. There launches are recorded instead of run, then compiled; no GPU is needed. The compiler keeps
what it made: a second run of the tests takes seconds.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import weft.kernels
from weft.kernels.tuning import SHARED_BYTES

pytestmark = pytest.mark.slow

FP8 = {"_quantise_rows", "storage._dequantise", "_rounded_gated", "_rounded_gated_grad"}
"""Kernels with 8-bit floats, which 8.0 has not."""
RANKS = {80: (64,), 89: (256,), 90: (64, 256)}
"""A rank of one block of rank space or more takes the most shared memory. The newest GPU gets every form of a kernel,
the older ones those that serve adapters, and one form of the others, each on the oldest GPU that takes it."""
NEWEST = max(RANKS)
WHOLE_VECTORS = {"_shrink", "_shrink_grad", "_expand", "_expand_grad", "_grad_a", "_grad_b", "_gated",
                 "_gated_grad", "_rotate", "_rotate_grad", "_add_norm", "_norm_grad", "_product", "_product_grad",
                 "_rounded_gated", "_rounded_gated_grad", "_norms"}  # fmt: skip


@pytest.fixture(scope="module")
def compiled() -> list[dict[str, Any]]:
    """One record per kernel, target and rank: what the compiler made of it, or its complaint."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, __file__], env=env | {"TRITON_DEFAULT_FP_FUSION": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_kernels_when_compiled_for_each_gpu_then_none_complains(compiled):
    """No kernel fails to compile, and none needs more shared memory than there is."""
    assert not [record for record in compiled if record["error"]]
    assert not [record for record in compiled if record["shared"] > SHARED_BYTES[divmod(record["target"], 10)]]


def test_kernels_when_launched_anywhere_then_are_compiled_here(compiled):
    """A kernel added to the package cannot be forgotten here."""
    names = {(record["module"], record["kernel"]) for record in compiled if record["target"] == 90}
    for path in Path(weft.kernels.__path__[0]).rglob("*.py"):
        text = path.read_text()
        for name in re.findall(r"^ +(\w+)\[.*\]\(", text, re.M):
            assert (path.stem, name) in names or f"def {name}(" not in text, f"{path.name}: {name}"


def test_kernels_when_they_read_activations_then_in_whole_vectors(compiled):
    """Masks and addresses are known to be multiples of a vector; element by element a kernel would be several times
    slower and could not load ahead."""
    slow = {record["kernel"] for record in compiled if record["single_loads"]}
    assert not slow & WHOLE_VECTORS


NUM_ROWS, HIDDEN, INNER = 64, 4096, 14336


def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def launch_adapted(rank: int, *, drops: bool) -> None:
    """Calls every kernel function that serves adapters, at the shapes of an 8B model."""
    from weft.kernels.layers import rotary
    from weft.kernels.lora import expand, product, shrink, weight_grad
    from weft.kernels.lora.tables import ANY_ORDER, Needs, SampleRows, Site, SlotTable, TableSizes, row_tables

    num_rows, hidden = NUM_ROWS, HIDDEN
    heads = rotary.Heads(32, 8, 128)
    qkv = Site(0, heads.sizes, hidden)
    table = SlotTable((qkv,), torch.device("cpu"))
    table.needs = Needs.of([rank], drops=drops)
    rows = row_tables([SampleRows(0, 60, 1)], TableSizes(num_rows, 2), zeros(num_rows, dtype=torch.int32))
    s = zeros(num_rows, 3 * rank)
    x, qkv_TE = zeros(num_rows, hidden), zeros(num_rows, sum(heads.sizes))
    tables = (qkv, rows, table)
    shrink.shrink_kernel(x, s, *tables)
    shrink.shrink_grad_kernel(qkv_TE, s, *tables)
    expand.expand_kernel(qkv_TE, s, *tables)
    expand.expand_grad_kernel(x, s, *tables)
    weight_grad.weight_grad_kernel(x, s, qkv_TE, s, *tables)
    weight = zeros(sum(heads.sizes), hidden)
    product.product_kernel(product.Factors(x, weight), s, *tables)
    product.product_grad_kernel(product.Factors(qkv_TE, weight.t()), s, *tables)
    if drops:
        table.needs = Needs.of([rank], drops=True, others=[ANY_ORDER])
        weight_grad.weight_grad_kernel(x, s, qkv_TE, s, *tables)
        return
    if rank < max(RANKS[NEWEST]):
        # What is left differs from the above in what is added to and in smaller numbers, and takes as long to compile.
        return
    expand.expand_kernel(qkv_TE, s, *tables, adds=False)
    expand.expand_grad_kernel(x, s, *tables, adds=False)
    x8, weight8, dy8 = (tensor.to(torch.float8_e4m3fn) for tensor in (x, weight, qkv_TE))
    scale = zeros(sum(heads.sizes), dtype=torch.float32)
    product.product_kernel(product.Factors(x8, weight8, scale, scale), s, *tables)
    product.product_grad_kernel(product.Factors(dy8, weight8.t().contiguous(), scale), s, *tables)


def launch_decoding(rank: int) -> None:
    """Calls the kernel functions that a decoding step launches otherwise than training, for each of their blocks."""
    from weft.kernels.layers import paged_attention
    from weft.kernels.lora.product import Factors
    from weft.kernels.lora.step import step_product_kernel
    from weft.kernels.lora.tables import Needs, SampleRows, Site, SlotTable, TableSizes, row_tables

    for num_rows in (64, 512):
        x = zeros(num_rows, HIDDEN)
        keys = zeros(num_rows, dtype=torch.int32)
        rows = row_tables([SampleRows(0, 60, 1)], TableSizes(num_rows, 2), keys)
        for sizes in ((HIDDEN,), (2048,), (INNER, INNER)):
            site = Site(0, sizes, HIDDEN)
            table = SlotTable((site,), torch.device("cpu"))
            table.needs = Needs.of([rank], drops=False)
            factors = Factors(x, zeros(sum(sizes), HIDDEN))
            step_product_kernel(x, factors, site, rows, table)
            x8, weight8 = (tensor.to(torch.float8_e4m3fn) for tensor in (x, factors.w_NK))
            scales = zeros(num_rows, dtype=torch.float32), zeros(sum(sizes), dtype=torch.float32)
            step_product_kernel(x, Factors(x8, weight8, *scales), site, rows, table)
    keys = paged_attention.KeyTable(zeros(9, 4).int(), zeros(64).int(), zeros(64).int())
    for heads, size, window in (((32, 8, 8), 128, None), ((8, 4, 4), 256, 1024), ((14, 2, 2), 64, None)):
        qkv = [zeros(64, number, size) for number in heads]
        paged_attention.attend_pages_kernel(*qkv, keys, 0.1, window)


def launch_others() -> None:
    """Calls every kernel function that serves other methods than LoRA."""
    from weft.kernels.lora.tables import OUTPUTS, Needs, SampleRows, Site, SlotTable, TableSizes, row_tables
    from weft.kernels.methods import columns, inner, leading_rows, row_norms, sparse, two_scales

    gate_up, end = Site(0, (INNER, INNER), HIDDEN), Site(2, (HIDDEN,), HIDDEN)
    table = SlotTable((gate_up, end), torch.device("cpu"))
    table.needs = Needs.of([64], drops=False)
    rows = row_tables([SampleRows(0, 60, 1)], TableSizes(NUM_ROWS, 2), zeros(NUM_ROWS, dtype=torch.int32))
    x, gu, s = zeros(NUM_ROWS, HIDDEN), zeros(NUM_ROWS, 2 * INNER), zeros(NUM_ROWS, 64)
    columns.change_columns_kernel(gu, gu, gate_up, rows, table, OUTPUTS)
    columns.change_columns_kernel(gu, gu, gate_up, rows, table, OUTPUTS, kept_TN=torch.empty_like(gu))
    columns.change_columns_kernel(x, torch.empty_like(x), end, rows, table, OUTPUTS, shifts=False)
    columns.owned_copy_kernel(gu, gate_up, rows, table, OUTPUTS)
    for divides in (False, True):
        columns.column_sums_kernel(gu, gu, gate_up, rows, table, OUTPUTS, divides)
    inner.activate_kernel(s, s, end, rows, table)
    inner.activate_grad_kernel(s, s, end, rows, table)
    inner.bias_sums_kernel(s, end, rows, table)
    leading_rows.put_rows_kernel(x, 3, rows, table)
    leading_rows.rows_grad_kernel(x, 0, HIDDEN, 3, rows, table, True)
    for width in (16, 256):
        module = row_norms.NormedRows(zeros(64, HIDDEN), zeros(width, HIDDEN), zeros(64, width), zeros(64).float())
        row_norms.RowNorms([module]).launch()
    shared, vectors = zeros(HIDDEN, 256).float(), (zeros(2, HIDDEN).float(), zeros(2, 256).float())
    two_scales.scale_kernel(shared, *vectors, zeros(2, HIDDEN, 256))
    two_scales.scales_grad_kernel(zeros(2, HIDDEN, 256).float(), shared, *vectors)
    sparse.sparse_kernel(x, gu, gate_up, rows, table)
    sparse.sparse_input_kernel(gu, x, gate_up, rows, table)
    sparse.sparse_grad_kernel(x, gu, gate_up, rows, table)


def launch_bare() -> None:
    """Calls every kernel function of the frozen model, the optimizer and the weights."""
    from weft.kernels import adamw, adamw_8bit, fixed_point, storage
    from weft.kernels.layers import attention, attention_grad, cross_entropy, draw, gated, rms_norm, rotary

    heads = rotary.Heads(32, 8, 128)
    x, qkv_TE, gu, act = (zeros(NUM_ROWS, n) for n in (HIDDEN, sum(heads.sizes), 2 * INNER, INNER))
    weight, half, head = zeros(HIDDEN), zeros(NUM_ROWS, 64, dtype=torch.float32), zeros(128)
    norm, exact = rms_norm.RmsNorm(weight, 1e-5), rms_norm.RmsNorm(weight.float(), 1e-6, rounds_first=False)
    rms_norm.add_norm_kernel(x, x, norm, None)
    rms_norm.add_norm_kernel(x, None, norm, None)
    rms_norm.add_norm_kernel(x, x, exact, exact)
    rms_norm.add_norm_kernel(x, x, None, exact)
    rms_norm.norm_grad_kernel(x, norm, x, x, True, None)
    rms_norm.norm_grad_kernel(x, exact, x, x, True, (x, exact))
    rms_norm.norm_grad_kernel(x, None, x, x, True, (x, exact))
    head_norms = rotary.HeadNorms(head, head, 1e-6), rotary.HeadNorms(head.float(), head.float(), 1e-6, False)
    at_once = rotary.HeadNorms(zeros(4096), zeros(1024), 1e-6, False, True)
    parts = [part.unflatten(1, (-1, 128)) for part in qkv_TE.split(heads.sizes, dim=1)]
    whole, partly = rotary.Turns(half, half), rotary.Turns(half[:, :48], half[:, :48])
    stretched = rotary.Turns(half, half, zeros(NUM_ROWS, dtype=torch.float32))
    forms = [(whole, None), *((whole, norms) for norms in (*head_norms, at_once)), (partly, None), (stretched, None)]
    for turns, norms in forms:
        rotary.rotate_kernel(qkv_TE, turns, heads, norms)
        rotary.rotate_grad_kernel(*parts, turns, heads, norms, qkv_TE)
    gemma, angles, norms = rotary.Heads(8, 4, 256), zeros(NUM_ROWS, 128, dtype=torch.float32), zeros(256).float()
    turns = rotary.Turns(angles, angles)
    exact_heads = rotary.HeadNorms(norms, norms, 1e-6, False)
    wide_TE, wide = zeros(NUM_ROWS, 16 * 256), [zeros(NUM_ROWS, number, 256) for number in (8, 4, 4)]
    rotary.rotate_kernel(wide_TE, turns, gemma, exact_heads)
    rotary.rotate_grad_kernel(*wide, turns, gemma, exact_heads, wide_TE)
    for activation in ("silu", "gelu_tanh"):
        gated.gated_kernel(gu, activation)
        gated.rounded_gated_kernel(gu, activation)
        for want_act in (False, True) if activation == "silu" else (True,):
            gated.gated_grad_kernel(gu, act, want_act, activation)
            columns = zeros(2 * INNER, dtype=torch.float32)
            gated.rounded_gated_grad_kernel(gu, act, want_act, columns, activation)
    logits, targets = zeros(2, 128256), zeros(2, dtype=torch.int64)
    cross_entropy.cross_entropy_rows_kernel(logits, targets, zeros(2, dtype=torch.float32), None)
    cross_entropy.cross_entropy_rows_kernel(logits, targets, None, 30.0)
    ids, exact_rows = zeros(2, dtype=torch.int64), zeros(2, dtype=torch.float64)
    settings = draw.DrawSettings(zeros(2, dtype=torch.float32), exact_rows, ids, exact_rows, ids, ids)
    for is_ranked in (False, True):
        draw.draw_kernel(zeros(2, 128256, dtype=torch.float32), ids, settings, is_ranked)
    q_TK, scale_T = storage.quantise_rows_kernel(x)
    storage.quantise_rows_kernel(zeros(2, 32768), zeros(32768, dtype=torch.float32))
    storage.dequantise_kernel(q_TK, scale_T, torch.bfloat16)
    storage.dequantise_nf4_kernel(storage.quantise_nf4(zeros(2, HIDDEN)), torch.bfloat16)
    # Of Gemma 3, then of Llama.
    for window, qkv in ((1024, wide), (None, parts)):
        blocks = attention.AttentionBlocks(zeros(4, 4, dtype=torch.int32), ())
        out_THC, lse_HT = attention.attend_kernel(*qkv, blocks, 0.1, window)
        attention_grad.attend_grad_kernel(out_THC, *qkv, out_THC, lse_HT, blocks, 0.1, window)
    lane = adamw.ParameterLane(*(zeros(64, dtype=torch.float32) for _ in range(4)), 1e-3)
    updates = [adamw.Update((lane, lane), 1, (0.9, 0.999), 1e-8, 0.0, 1.0, True)]
    adamw.adamw_kernel(updates, zeros(1, dtype=torch.float32))
    adamw.adamw_kernel(updates, zeros(1, dtype=torch.float32), zeros(1, dtype=torch.float32))
    codes, scales = (zeros(64, dtype=torch.int8), zeros(64, dtype=torch.uint8)), zeros(1, dtype=torch.float32)
    lean = adamw_8bit.QuantisedLane(lane.params_P, lane.grad_P, *codes, 1e-3, scales, scales)
    fixed_point.collect_kernel(fixed_point.Words.of_nothing(lane.grad_P), lane.grad_P)
    adamw_8bit.adamw_8bit_kernel([replace(updates[0], lanes=(lean, lean))], zeros(1, dtype=torch.float32))


def recorded() -> Iterator[tuple[int, Any, dict[str, Any], dict[str, Any]]]:
    """(target, kernel, arguments by name, launch options) of every launch; nothing runs."""
    from triton.runtime.jit import JITFunction

    from weft.kernels import tuning

    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    JITFunction.run = lambda self, *args, grid, warmup, **kw: calls.append((self, args, kw))
    known: set[Any] = set()
    for target, ranks in RANKS.items():
        calls.clear()
        tuning.shared_limit = lambda device, target=target: tuning.SHARED_BYTES[divmod(target, 10)]
        for rank in ranks:
            launch_adapted(rank, drops=False)
        if target == NEWEST:
            launch_adapted(ranks[0], drops=True)
            launch_decoding(ranks[0])
        num_adapted = len(calls)
        launch_others()
        launch_bare()
        for index, (kernel, args, kw) in enumerate(calls):
            if not is_compiled(kernel, target) or (target < NEWEST and index >= num_adapted and kernel in known):
                continue
            known.add(kernel)
            given = dict(zip(kernel.arg_names, args, strict=False)) | kw
            options = {name: given.pop(name) for name in kw if name not in kernel.arg_names}
            yield target, kernel, given, options


def is_compiled(kernel: Any, target: int) -> bool:
    """Whether a kernel is for a target: 8.0 has no 8-bit floats; attention and products are libraries' before 9.0."""
    name, module = kernel.__name__, kernel.fn.__module__.rsplit(".", 1)[1]
    if target < 89 and {name, f"{module}.{name}"} & FP8:
        return False
    return target >= 90 or not module.startswith(("attention", "paged_attention", "product"))


def compile_one(kernel: Any, given: dict[str, Any], options: dict[str, Any], target: int) -> Any:
    """What a launch with these arguments would run, specialised as Triton does."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.tools.tensor_descriptor import TensorDescriptor

    types = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.int32: "i32", torch.int64: "i64",
             torch.float64: "fp64",
             torch.uint8: "u8", torch.float8_e4m3fn: "fp8e4nv"}  # fmt: skip
    signature, constants, hints = {}, {}, {}
    for i, param in enumerate(kernel.params):
        value = given[param.name]
        if param.is_constexpr or (isinstance(value, int) and value == 1 and not param.do_not_specialize):
            signature[param.name], constants[i,] = "constexpr", value
            continue
        if isinstance(value, torch.Tensor):
            signature[param.name] = f"*{types[value.dtype]}"
        elif isinstance(value, TensorDescriptor):
            signature[param.name] = f"tensordesc<{types[value.base.dtype]}{list(value.block_shape)}>"
            continue
        else:
            signature[param.name] = "fp32" if isinstance(value, float) else "i32"
        if not isinstance(value, float) and (torch.is_tensor(value) or value % 16 == 0) and not param.do_not_specialize:
            hints[i,] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, hints)
    return triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)


def main() -> None:
    """Prints one record per line."""
    for target, kernel, given, options in recorded():
        name, module = kernel.__name__, kernel.fn.__module__.rsplit(".", 1)[1]
        record = {"kernel": name, "module": module, "target": target, "error": "", "shared": 0}
        record |= {"single_loads": 0}
        try:
            made = compile_one(kernel, given, options, target)
        except Exception as error:  # whatever the compiler reports is the finding
            record["error"] = repr(error)[-2000:]
        else:
            record["shared"] = made.metadata.shared
            record["single_loads"] = len(re.findall(r"ld\.global\.b16", made.asm["ptx"]))
        print(json.dumps(record))


if __name__ == "__main__":
    main()
