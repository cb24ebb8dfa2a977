"""Mixers with a state inside samples: in gated delta nets, short convolutions and Mamba-2 each sample starts from zero.

Their linears run over all rows of the microbatch, as those of attention do. What is between the linears runs sample by
sample on a CPU, so that a sample has the bits it has alone, and over all samples at once on a GPU. It is Weft's own
code in plain torch: transformers would use fla, causal-conv1d or mamba-ssm wherever these happen to be installed, which
would change bits. A family needs a line in `MIXERS`, a tiny model in `tests/tiny_families.py` and its weights in
`plan/weights.py`.

Shape suffixes: T rows of the microbatch, D channels of the convolution, H heads, K key size, V value size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from weft.adapters.routing import Routing
from weft.kernels.device import is_cpu
from weft.model.packing.recurrence import CHUNK, causal_convolution, kept_numbers, linear_attention, recomputed


def prepare_mixers(model: Any) -> None:
    """Makes the mixers of a model keep their states within samples."""
    for module in model.modules():
        if is_mixer(module):
            forward = functools.partial(MIXERS[type(module).__name__], module)
            object.__setattr__(module, "forward", forward)


def restore_mixers(model: Any) -> None:
    """Reverts `prepare_mixers`."""
    for module in model.modules():
        if is_mixer(module):
            object.__delattr__(module, "forward")


def is_mixer(module: Any) -> bool:
    return type(module).__name__ in MIXERS


def workspace_bytes(model: Any, dtype: torch.dtype) -> int:
    """Most memory that a mixer of a model needs for a row on the way back, in whole chunks; mixers run one after the
    other."""
    own = (module for module in model.modules() if is_mixer(module))
    return max((_kept_again(module, dtype) + gradient_bytes(module) for module in own), default=0)


@dataclass(frozen=True)
class _Sizes:
    heads: int
    key: int
    value: int
    channels: int
    """Of the convolution."""
    inner: int
    """Of the output."""
    has_beta: bool


def _sizes(module: Any) -> _Sizes | None:
    """None for a convolution alone."""
    if hasattr(module, "head_v_dim"):
        channels = 2 * module.key_dim + module.value_dim
        return _Sizes(module.num_v_heads, module.head_k_dim, module.head_v_dim, channels, module.value_dim, True)
    if hasattr(module, "ssm_state_size"):
        sizes = module.num_heads, module.ssm_state_size, module.head_dim, module.conv_dim, module.intermediate_size
        return _Sizes(*sizes, has_beta=False)
    return None


def _kept_again(module: Any, dtype: torch.dtype) -> int:
    """Bytes of a row that autograd keeps while a mixer runs again."""
    sizes = _sizes(module)
    if sizes is None:
        # What its result is multiplied with.
        return int(module.out_proj.in_features) * dtype.itemsize
    attended = kept_numbers(sizes.key, sizes.value, has_beta=sizes.has_beta)
    # The convolution's result before and after its activation; the output, normed, and its gate before and after.
    outside = 2 * sizes.channels + 4 * sizes.inner
    return torch.float32.itemsize * (sizes.heads * attended + outside)


def gradient_bytes(module: Any) -> int:
    """Bytes of a row for the gradients that exist at once then: of queries, keys, values and products of a chunk."""
    sizes = _sizes(module)
    return 0 if sizes is None else torch.float32.itemsize * sizes.heads * 2 * (sizes.key + sizes.value + CHUNK)


@dataclass
class Samples:
    """Samples whose rows follow each other, with the states of one layer."""

    lengths: Sequence[int]
    before: list[dict[str, torch.Tensor]] = field(default_factory=list)
    """While generating: what each has left in its cache, which is replaced; empty while training."""

    def convolve(self, x_TD: torch.Tensor, convolution: Any) -> torch.Tensor:
        """A causal convolution; (T, D) in fp32."""
        earlier = [state.get("rows") for state in self.before] or [None] * len(self.lengths)
        y_TD, rows = causal_convolution(x_TD, convolution.weight[:, 0], convolution.bias, self.lengths, earlier)
        for state, left in zip(self.before, rows, strict=False):
            state["rows"] = left
        return y_TD

    def attend(
        self,
        query_THK: torch.Tensor,
        key_THK: torch.Tensor,
        value_THV: torch.Tensor,
        decay_TH: torch.Tensor,
        beta_TH: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Linear attention with decay; (T, H, V) in fp32."""
        given = (query_THK, key_THK, value_THV, decay_TH, beta_TH, self.lengths)
        if not self.before:
            return linear_attention(*given)[0]
        zero_HKV = query_THK.new_zeros(*query_THK.shape[1:], value_THV.shape[2], dtype=torch.float32)
        y_THV, states = linear_attention(*given, torch.stack([s.get("state", zero_HKV) for s in self.before]))
        for state, left in zip(self.before, states, strict=True):
            state["state"] = left
        return y_THV


def _by_samples(module: Any, run: Callable[..., torch.Tensor], *projected: torch.Tensor) -> torch.Tensor:
    """`run(samples, *rows)` for the rows (1, T, ...) of each sample, (1, T, ...); rows after the last one are zero."""
    routing: Routing = module.weft_routing
    given = [x[0] for x in projected]
    lengths = [rows.end - rows.start for rows in routing.segments]
    padding = len(given[0]) - sum(lengths)
    if padding:
        given = [x[:-padding] for x in given]
    caches = [cache.setdefault(f"mixer {module.layer_idx}", {}) for cache in routing.caches]
    if is_cpu(given[0].device):
        parts = zip(*(x.split(lengths) for x in given), strict=True)
        outputs = [
            _run(run, Samples([length], caches[index : index + 1]), part)
            for index, (length, part) in enumerate(zip(lengths, parts, strict=True))
        ]
        y = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    else:
        y = _run(run, Samples(lengths, caches), given)
    return F.pad(y, (0, 0, 0, padding))[None] if padding else y[None]


def _run(run: Callable[..., torch.Tensor], samples: Samples, rows: Sequence[torch.Tensor]) -> torch.Tensor:
    if torch.is_grad_enabled():
        return recomputed(functools.partial(run, samples), *rows)
    return run(samples, *rows)


def _gated_delta_net(module: Any, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
    """Qwen3.5's linear attention."""
    qkv, z = module.in_proj_qkv(hidden_states), module.in_proj_z(hidden_states)
    b, a = module.in_proj_b(hidden_states), module.in_proj_a(hidden_states)
    y = _by_samples(module, functools.partial(_delta_rule, module), qkv, z, b, a)
    return module.out_proj(y)  # type: ignore[no-any-return]


def _joined_gated_delta_net(module: Any, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
    """Qwen3-Next's, whose projections are joined for each key head."""
    qkvz, ba = module.in_proj_qkvz(hidden_states), module.in_proj_ba(hidden_states)
    *qkv, z, b, a = module.fix_query_key_value_ordering(qkvz, ba)
    joined = torch.cat([x.flatten(2) for x in qkv], dim=2)
    y = _by_samples(module, functools.partial(_delta_rule, module), joined, z.flatten(2), b, a)
    return module.out_proj(y)  # type: ignore[no-any-return]


def _delta_rule(
    module: Any,
    samples: Samples,
    qkv_TD: torch.Tensor,
    z_TD: torch.Tensor,
    b_TH: torch.Tensor,
    a_TH: torch.Tensor,
) -> torch.Tensor:
    """What a gated delta net computes between its linears."""
    convolved_TD = F.silu(samples.convolve(qkv_TD, module.conv1d))
    sizes = [module.key_dim, module.key_dim, module.value_dim]
    query, key, value = convolved_TD.split(sizes, dim=1)
    # A key head serves neighbouring value heads.
    repeats = module.num_v_heads // module.num_k_heads
    query, key = (
        _unit(x.unflatten(1, (-1, module.head_k_dim))).repeat_interleave(repeats, dim=1) for x in (query, key)
    )
    decay_TH = -module.A_log.float().exp() * F.softplus(a_TH.float() + module.dt_bias.float())
    value_THV = value.unflatten(1, (-1, module.head_v_dim))
    y_THV = samples.attend(query * module.head_k_dim**-0.5, key, value_THV, decay_TH, b_TH.float().sigmoid())
    normed_THV = module.norm.weight * _rms_normed(y_THV, module.layer_norm_epsilon).to(qkv_TD.dtype)
    gated_TD: torch.Tensor = normed_THV.flatten(1) * F.silu(z_TD.float())
    return gated_TD.to(qkv_TD.dtype)


def _unit(x_THK: torch.Tensor) -> torch.Tensor:
    return x_THK * torch.rsqrt(x_THK.square().sum(-1, keepdim=True) + 1e-6)


def _rms_normed(x: torch.Tensor, epsilon: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon)


def _short_convolution(module: Any, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
    """LFM2's convolution between two gates."""

    def run(samples: Samples, projected_TD: torch.Tensor) -> torch.Tensor:
        before, after, x = projected_TD.chunk(3, dim=1)
        return after * samples.convolve(before * x, module.conv).to(x.dtype)

    return module.out_proj(_by_samples(module, run, module.in_proj(hidden_states)))  # type: ignore[no-any-return]


def _mamba2(module: Any, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """Mamba-2's selective scan."""
    projected = module.in_proj(hidden_states)
    return module.out_proj(_by_samples(module, functools.partial(_scan, module), projected))  # type: ignore[no-any-return]


def _falcon_mamba2(module: Any, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
    """Falcon-H1's, with a factor for each part of the projection."""
    projected = module.in_proj(hidden_states * module.ssm_in_multiplier) * module.mup_vector
    return module.out_proj(_by_samples(module, functools.partial(_scan, module), projected))  # type: ignore[no-any-return]


def _scan(module: Any, samples: Samples, projected_TD: torch.Tensor) -> torch.Tensor:
    """What Mamba-2 computes between its linears."""
    width, groups, size = module.intermediate_size, module.n_groups, module.ssm_state_size
    gate, mixed, step = projected_TD.split([width, module.conv_dim, module.num_heads], dim=1)
    x, key, query = F.silu(samples.convolve(mixed, module.conv1d)).split([width, groups * size, groups * size], dim=1)
    repeats = module.num_heads // groups
    query, key = (each.unflatten(1, (groups, size)).repeat_interleave(repeats, dim=1) for each in (query, key))
    x_THV = x.unflatten(1, (-1, module.head_dim))
    step_TH = F.softplus(step.float() + module.dt_bias.float()).clamp(*module.time_step_limit)
    decay_TH = -module.A_log.float().exp() * step_TH
    y_THV = samples.attend(query, key, x_THV * step_TH[..., None], decay_TH)
    y_TD = (y_THV + x_THV * module.D.float()[:, None]).flatten(1)
    return _gated_norm(module.norm, y_TD, gate.float()).to(projected_TD.dtype)


def _gated_norm(norm: Any, y_TD: torch.Tensor, gate_TD: torch.Tensor) -> torch.Tensor:
    """Mamba-2's norm of gated rows. Some families norm groups of channels; Falcon-H1 norms before the gate, or not."""
    gates_after = getattr(norm, "norm_before_gate", False)
    if not gates_after:
        y_TD = y_TD * F.silu(gate_TD)
    if hasattr(norm, "weight"):
        width = y_TD.shape[1]
        size = getattr(norm, "group_size", width // getattr(norm, "n_groups", 1))
        grouped = y_TD.unflatten(1, (-1, size))
        y_TD = norm.weight * _rms_normed(grouped, norm.variance_epsilon).flatten(1)
    return y_TD * F.silu(gate_TD) if gates_after else y_TD


MIXERS: dict[str, Callable[..., torch.Tensor]] = {
    "Qwen3_5GatedDeltaNet": _gated_delta_net,
    "Qwen3_5MoeGatedDeltaNet": _gated_delta_net,
    "Qwen3NextGatedDeltaNet": _joined_gated_delta_net,
    "Lfm2ShortConv": _short_convolution,
    "Lfm2MoeShortConv": _short_convolution,
    "GraniteMoeHybridMambaLayer": _mamba2,
    "NemotronHMamba2Mixer": _mamba2,
    "BambaMixer": _mamba2,
    "Mamba2Mixer": _mamba2,
    "FalconH1Mixer": _falcon_mamba2,
}
"""By the class of the module: what replaces its forward."""
