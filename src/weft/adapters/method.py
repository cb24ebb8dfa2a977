"""The interface of PEFT methods.

A method is a folder `methods/<name>/`: `config.py` with its settings and what it can do, `method.py` with a `Method`,
weights and files. `methods/configs.py` lists it. No other code depends on it: the engine steps, checkpoints and moves
named groups of parameters (`adapters/adapter.py`), the reference path calls the hooks of `SlotWeights` on each slot's
own rows (`adapters/slots.py`), the method's `PeftFormat` defines its files, and planners count its cost in ranks.
`tests/methods/test_methods.py` runs for every entry of the registry.

On a fused backbone a job without kernels has microbatches of its own, which run on the reference path over the same
weights, so it does not slow down its neighbours.

An adapter sits on linears, on the outputs of attention and MLP blocks before these are normed or added to the residual
stream, or on rows in front of every sample (`Attachment`). `target_modules` names the first two by the same rules:
`[q_proj, v_proj]` or `all-linear`, `[self_attn, mlp]` or `all-blocks`. What `auto` means for a method is in its
`config.py`. All sites but linears have D outputs and D inputs (`adapters/sites.py`), so one set of hooks serves them
all.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, runtime_checkable

import torch
from torch import nn

from weft.adapters.devices import SiteShare
from weft.adapters.routing import AnyOrderSums, Routing, SlotRows
from weft.errors import AdapterFileError
from weft.kernels.fixed_point import Words
from weft.kernels.lora.tables import Entry
from weft.kernels.methods.parts import OtherParts
from weft.settings import describe
from weft.spec import AdapterSpec, JobSpec

if TYPE_CHECKING:
    from weft.adapters.adapter import Adapter

LinearShape = tuple[int, ...]
"""(out, in) of a linear module; of a block's output both are its width; (experts, out, in) of a product of experts."""
ModuleTensors = tuple[torch.Tensor, ...]
"""An adapter's tensors at one site, in the order of its method's groups."""


class Site(Protocol):
    @property
    def bias_O(self) -> torch.Tensor | None:
        """The frozen bias, if there is one; it is already in the y of `SlotWeights.forward`."""

    @property
    def in_features(self) -> int:
        """D, of all devices together."""

    @property
    def out_features(self) -> int:
        """O, of all devices together."""

    @property
    def shape(self) -> LinearShape: ...

    @property
    def share(self) -> SiteShare: ...

    @property
    def weight(self) -> torch.Tensor | None:
        """The local part of the frozen weight (O, D), dense; None for a block's output."""

    @property
    def read_original(self) -> Callable[[], torch.Tensor] | None:
        """Reads the original weight of a quantised one; None if it is not quantised."""


class Attachment(enum.Enum):
    """The kind of site that a method adapts; the value is its name in errors."""

    LINEAR = "linear module"
    BLOCK_OUTPUT = "block"
    INPUT = "input"
    KEYS_AND_VALUES = "attention of known sizes"


class SlotWeights(ABC):
    """A method's weights at one site, which a slot holds: views into the adapter's flat buffers.

    On a linear, x is its input and the frozen product is x Wᵀ + b. On a block's output, x is that output and the frozen
    product is x itself: `forward` adds to a copy of it, and `backward` finds dy in dx.

    All hooks get the buffers of the whole microbatch and change the rows of their own slot only. Rows of other slots
    may be NaN: they are left out by slicing, never masked by a product.

    Two rules make an adapter's bits independent of its neighbours and of the cut into microbatches:
    - A product over rows runs in the windows of `rows.windows`, which have a fixed number of rows, so that libraries
      choose the same algorithm in all cases: compute on `window.computed`, use `[window.inside]` of the result, and
      write it to `window.own`. Row-wise operations may use `rows.own`.
    - A sum over tokens, as every gradient is, runs over one sample of `rows.samples` at a time, in their order, and is
      added in fp32 (`routing.add_product`): `sample.buffer` are its rows in the microbatch, `sample.slot` those
      among the slot's own.
    `methods/bottleneck/method.py` is a short example.
    """

    changes_input: ClassVar[bool] = False
    """Whether the frozen product of these rows has another input than x."""
    changes_gradient: ClassVar[bool] = False
    """Whether the frozen product of these rows has another gradient than dy."""
    has_penalty: ClassVar[bool] = False
    """Whether the parameters have a gradient apart from the loss: `penalty_gradients`."""
    any_order_sums: AnyOrderSums | None = None
    """Sums that take over each sample's gradients where order must not matter; rows then come sample by sample."""

    def change_input(self, x_TD: torch.Tensor, rows: SlotRows) -> None:
        """Turns a copy of x into the input of the frozen product; only called if `changes_input`."""
        raise AssertionError("methods with `changes_input` define this")

    @abstractmethod
    def forward(self, x_TD: torch.Tensor, y_TO: torch.Tensor, rows: SlotRows, routing: Routing) -> Any:
        """Changes y, which holds the frozen product; returns what `backward` needs besides x."""

    def change_gradient(self, dy_TO: torch.Tensor, rows: SlotRows) -> None:
        """Turns a copy of dy into the gradient of the frozen product; only called if `changes_gradient`."""
        raise AssertionError("methods with `changes_gradient` define this")

    @abstractmethod
    def backward(
        self, x_TD: torch.Tensor, dy_TO: torch.Tensor, dx_TD: torch.Tensor | None, rows: SlotRows, kept: Any
    ) -> None:
        """Adds to the gradients, and to dx, which holds the gradient through the frozen product, if needed."""

    def penalty_gradients(self) -> ModuleTensors:
        """Gradients that every optimizer step adds once; only called if `has_penalty`."""
        raise AssertionError("methods with `has_penalty` define this")

    def keep_from(self, before: SlotWeights) -> None:  # noqa: B027 (most have nothing)
        """Takes over the state of the previous weights at this site that is not in buffers, when the adapter moves."""

    def in_files(self, params: ModuleTensors) -> ModuleTensors:
        """The tensors of the adapter's file for these parameters; by default the same."""
        return params

    def from_files(self, given: ModuleTensors) -> ModuleTensors:
        return given


class SlotHolder:
    """The slots of a site."""

    slots: dict[int, SlotWeights]

    def put(self, slot: int, weights: SlotWeights) -> None:
        self.slots[slot] = weights

    def free(self, slot: int) -> None:
        self.slots.pop(slot, None)


class KernelCopy:
    """An adapter's weights as the fused path's kernels read them, and the buffers for their gradients."""

    def __init__(self, adapter: Adapter) -> None:
        self.entries: dict[str, Entry] = {}
        self.others: OtherParts[str] = OtherParts()
        self._adapter = adapter
        self._version = -1

    def follow(self) -> None:
        if self._version != self._adapter.version:
            self.copy_weights()
            # Last: if memory ends in between, the next call copies again.
            self._version = self._adapter.version

    def copy_weights(self) -> None:
        """Updates the copy from the masters."""

    def collect(self) -> None:
        """Adds gradients that kernels left in buffers of their own to the adapter's, and empties these buffers."""

    def clear_gradients(self) -> None: ...

    def any_order_words(self) -> Mapping[str, Words]:
        """Order-independent sums of the kernels, by group."""
        return {}


@dataclass(frozen=True)
class CostRanks:
    """The cost of an adapter as the rank of a LoRA that costs at least as much."""

    usual: int
    """Rank on most modules, for times."""
    widest: int
    """Rank on the most expensive module, for memory."""


Change = tuple[str, str]
"""A kind of change in kernels besides LoRA, and the role of the sites that have it."""
Keeps = Literal["", "outputs", "blocks", "sparse"]
"""Tensors that the fused path keeps for a method besides S: none, outputs of linears, outputs of blocks, or those
that sparse products read, for a short time."""
WHOLE_NUMBERS = ("indices", "shape")
"""Ends of the names of integer tensors in files; all others are floats."""


def frozen_weight(site: Site) -> torch.Tensor:
    """The dense frozen weight of a linear."""
    weight_OD = site.weight
    assert weight_OD is not None, "it sits on linears"
    return weight_OD


def weft_keys(peft_type: str, **own: Any) -> dict[str, Any]:
    """The keys and defaults of a config that only Weft reads, in PEFT's order."""
    shared = dict.fromkeys(("base_model_name_or_path", "exclude_modules", "target_modules"))
    return dict(sorted({**shared, "peft_type": peft_type, "task_type": "CAUSAL_LM", **own}.items()))


def peft_keys(peft_type: str, *unset: str, **own: Any) -> dict[str, Any]:
    """The keys and defaults of a config of PEFT's, in its order; `unset` ones are null, as four of every config are."""
    nulls = dict.fromkeys(("auto_mapping", "base_model_name_or_path", "modules_to_save", "revision", *unset))
    keys = {**nulls, "inference_mode": True, "peft_type": peft_type, "task_type": "CAUSAL_LM", **own}
    return dict(sorted(keys.items()))


def refuse_bias(config: Mapping[str, Any], where: str) -> None:
    bias = config.get("bias", "none")
    if bias != "none":
        message = f"bias is {describe(bias)}, which trains biases of the shared backbone; only 'none' can be read."
        raise AdapterFileError(message, where=where)


class PeftFormat(ABC):
    """The files of a method's adapters as PEFT writes and reads them."""

    peft_type: str
    marker: str | None = None
    """The key that is on in this method's files only, where another method has the same peft_type."""
    in_peft: bool = False
    """Whether PEFT has the method; otherwise only Weft reads the files."""
    title: str
    suffixes: Mapping[str, str]
    """PEFT's names of the groups' tensors and how they end: lora_A and `lora_A.weight`; in the groups' order."""
    defaults: Mapping[str, Any]
    """Every key that PEFT writes and its default, except peft_version, which PEFT adds to files without one."""
    refused: Mapping[str, str] = {}
    has_experts: bool = False
    """Whether files may have factors of routed experts."""

    own_settings: tuple[str, ...] = ()
    """The method's settings that its files have under the same names; the first one is required."""

    def config(self, spec: AdapterSpec, target_names: Collection[str], paths: Collection[str]) -> dict[str, Any]:
        """The keys without default values, for an adapter on the modules `paths`."""
        return {name: getattr(spec, name) for name in self.own_settings}

    def check_config(self, config: Mapping[str, Any], where: str) -> None:
        """AdapterFileError for a config with features that are not supported."""
        for name in self.own_settings[:1]:
            if config.get(name) is None:
                raise AdapterFileError(f"{name} is missing.", where=where)

    def settings(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The method's own settings of an AdapterSpec; the config holds no null."""
        return {name: config[name] for name in self.own_settings if name in config}

    @abstractmethod
    def check_tensors(self, spec: AdapterSpec, path: str, tensors: ModuleTensors, where: str) -> None:
        """AdapterFileError if the tensors of a module do not fit the spec."""

    def shared_names(self, config: Mapping[str, Any]) -> Collection[str]:
        """PEFT's names of the tensors that all modules share in the file."""
        return ()

    def check_shared(  # noqa: B027 (optional)
        self, spec: AdapterSpec, shared: Mapping[str, torch.Tensor], where: str
    ) -> None:
        """AdapterFileError if those tensors do not fit the spec; only called if the file has some."""

    def linear_shape(self, tensors: ModuleTensors) -> tuple[int | None, ...]:
        """(out, in) of the module that tensors belong to; None where they do not show it."""
        return None, None

    def what_it_is(self, name: str) -> str:
        return f"which is no tensor of {self.title}"

    @abstractmethod
    def summary(self, spec: AdapterSpec) -> str:
        """The settings that matter, for the model card."""


@runtime_checkable
class JoinedFormat(Protocol):
    """A format whose file does not have separate tensors for each site."""

    def join(self, tensors: Mapping[str, ModuleTensors]) -> dict[str, torch.Tensor]:
        """The tensors of the file, from those by path."""

    def part(
        self, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any], where: str
    ) -> dict[str, ModuleTensors]:
        """The tensors by path, from those of the file; AdapterFileError if there are others."""


class Method(ABC):
    """A PEFT method. Hooks that are not abstract have a default, which most methods keep."""

    attachment: Attachment = Attachment.LINEAR
    groups: tuple[str, ...]
    """Names of its groups of parameters, also in checkpoints. An adapter may have only the first few."""
    files: PeftFormat
    kernel_keeps: Keeps = ""
    kernel_changes: tuple[Change, ...] = ()
    """All changes in kernels that its adapters may need besides LoRA's."""
    has_any_order_kernels: bool = False
    """Whether kernels can sum its gradients independently of the order of samples."""
    workspace_bytes: int = 0
    """Upper bound of the temporary memory of one site on the reference path."""

    @abstractmethod
    def shapes(self, spec: AdapterSpec, path: str, linear: LinearShape) -> Sequence[tuple[int, ...]]:
        """Shapes of the tensors on one module, one for each group of the adapter."""

    @abstractmethod
    def initial(self, spec: AdapterSpec, path: str, site: Site, generator: torch.Generator) -> ModuleTensors:
        """PEFT's initial values at one site, for all devices together."""

    @abstractmethod
    def weights(
        self, spec: AdapterSpec, path: str, site: Site, params: ModuleTensors, grads: ModuleTensors
    ) -> SlotWeights:
        """The weights of a slot at one site; views of the flat buffers, cut to the site's share. After `params` come
        the shared tensors, whole. The gradient of a frozen group is an empty tensor."""

    def cost_ranks(self, spec: AdapterSpec) -> CostRanks:
        """Ranks of a LoRA that costs at least as much as this adapter; by default rank 1."""
        return CostRanks(1, 1)

    def check(self, spec: AdapterSpec, modules: Mapping[str, LinearShape]) -> None:  # noqa: B027 (optional)
        """ConfigError if an adapter cannot be on these modules."""

    def frozen(self, spec: AdapterSpec) -> tuple[str, ...]:
        """The groups that are not trained: they have no gradients and no moments."""
        return ()

    def shared(
        self, spec: AdapterSpec, modules: Mapping[str, LinearShape], device: torch.device
    ) -> Mapping[str, torch.Tensor]:
        """Frozen tensors that all modules of an adapter read, by PEFT's names; they follow from the settings alone."""
        return {}

    def rate_factors(self, job: JobSpec) -> Sequence[float]:
        """Factors on the job's learning rate, for each trained group."""
        return (1.0,) * (len(self.groups) - len(self.frozen(job.adapter)))

    def saved_width(self, spec: AdapterSpec, path: str, linear: LinearShape) -> int:
        """Numbers that `SlotWeights.forward` keeps per row and site, without dropout masks."""
        return 0

    def merge(self, spec: AdapterSpec, path: str, tensors: ModuleTensors, linear: nn.Linear) -> None:
        """Merges an adapter into one linear. After the module's `tensors` come the shared ones. Not every method has
        this."""
        raise AdapterFileError(f"a {self.files.title} adapter cannot be merged into its base model; keep it apart.")

    def exported(
        self, spec: AdapterSpec, tensors: Mapping[str, ModuleTensors]
    ) -> tuple[AdapterSpec, Mapping[str, ModuleTensors]]:
        """The adapter to write for one with these tensors; by default the same."""
        return spec, tensors

    def has_kernels(self, spec: AdapterSpec) -> bool:
        """Whether the fused path can run such an adapter; by default if its method has a `kernel_copy`."""
        return type(self).kernel_copy is not Method.kernel_copy

    def kernel_copy(self, adapter: Adapter, dtype: torch.dtype) -> KernelCopy:
        raise AssertionError("only methods with kernels have a copy for them")

    def kernel_rank(self, spec: AdapterSpec) -> int:
        """The largest rank of its low-rank products in kernels; 0 if it has none."""
        return 0

    def kernel_bytes(self, spec: AdapterSpec, modules: Mapping[str, LinearShape], each: int) -> int:
        """Bytes that kernels need for such an adapter besides a copy of its parameters in elements of `each` bytes."""
        return 0

    def compile_copy(  # noqa: B027 (optional)
        self, rank: int, linears: Sequence[LinearShape], like: torch.Tensor
    ) -> None:
        """Launches the kernels that a copy of rank `rank` needs on linears of these shapes, besides torch's own
        operations. `like`: a tensor of the activations' type and device."""
