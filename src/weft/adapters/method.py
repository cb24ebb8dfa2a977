"""What a PEFT method is: all that the rest of the house asks of a way to adapt a frozen model.

A method is a folder `methods/<name>/`: `config.py` with its settings and what it can do, `method.py` with a `Method`,
weights and files. `methods/configs.py` lists it. Nothing else knows it: the engine steps, checkpoints and
moves named groups of parameters (`adapters/adapter.py`), the reference path calls the hooks of `SlotWeights` on each
slot's own rows (`adapters/slots.py`), files are written as the method's `PeftFormat` says, and planners count its cost
in ranks. `tests/methods/test_methods.py` runs for every entry of the registry.

An adapter without kernels costs its neighbours nothing: on a fused backbone its job has microbatches of its own, which
run on the reference path over the same weights.

An adapter sits on linears, on the outputs of attention and MLP blocks before these are normed or added to the residual
stream, or on rows in front of every sample (`Attachment`). `target_modules` names the first two by the same rules:
`[q_proj, v_proj]` or `all-linear`, `[self_attn, mlp]` or `all-blocks`. What `auto` means for a method is in its
`config.py`. All places but linears have D outputs and D inputs (`adapters/row_place.py`), so one set of hooks
serves them all.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, runtime_checkable

import torch
from torch import nn

from weft.adapters.place_share import SiteShare
from weft.adapters.routing import Routing, SlotRows
from weft.adapters.sample_sums import AnyOrderSums
from weft.errors import AdapterFileError
from weft.kernels.fixed_words import Words
from weft.kernels.lora.tables import Entry
from weft.kernels.methods.parts import OtherParts
from weft.spec import AdapterSpec, JobSpec

if TYPE_CHECKING:
    from weft.adapters.adapter import Adapter

LinearShape = tuple[int, int]
"""(out, in) of a linear module; of a block's output both are its width."""
ModuleTensors = tuple[torch.Tensor, ...]
"""An adapter's tensors on one module, in the order of its method's groups."""


class Place(Protocol):
    """Somewhere on a backbone where adapters sit: what their methods may ask of it."""

    @property
    def bias_O(self) -> torch.Tensor | None:
        """The frozen bias, if there is one; `SlotWeights.forward` finds it added already."""
        ...

    @property
    def in_features(self) -> int:
        """D, on all devices together."""
        ...

    @property
    def out_features(self) -> int:
        """O, on all devices together."""
        ...

    @property
    def share(self) -> SiteShare:
        """What of it is on this device."""
        ...

    @property
    def weight(self) -> torch.Tensor | None:
        """The frozen weight (O, D) that is here, made dense where it is stored otherwise; a block's output has none."""
        ...

    @property
    def read_original(self) -> Callable[[], torch.Tensor] | None:
        """Reads the weight as it was before it was quantised; None where it is as it was."""
        ...


class Attachment(enum.Enum):
    """What of a backbone an adapter sits on; the value is what errors call one such place."""

    LINEAR = "linear module"
    BLOCK_OUTPUT = "block"
    INPUT = "input"
    KEYS_AND_VALUES = "attention of known sizes"


class SlotWeights(ABC):
    """A method's weights in one place, which a slot holds: views into the adapter's flat buffers.

    On a linear, x is its input and the frozen product is x Wᵀ + b. On a block's output, x is that output and the frozen
    product is x itself: `forward` adds to a copy of it, and `backward` finds dy in dx.

    All hooks get the buffers of the whole microbatch and change the rows of their own slot alone. Rows of others may be
    NaN: they are left out by slicing, never masked by a product.

    Two rules keep an adapter's bits the same beside any neighbours and for any cut into microbatches:
    - A product over rows runs in the windows of `rows.windows`, which have a fixed number of rows, so that libraries
      choose the same algorithm whatever else is there: compute on `window.computed`, use `[window.inside]` of the
      result, and write it to `window.own`. What is computed row by row may use `rows.own`.
    - A sum over tokens, as every gradient is, runs over one sample of `rows.samples` at a time, in their order, and is
      added in fp32 (`sample_sums.add_product`): `sample.buffer` are its rows in the microbatch, `sample.slot` those
      among the slot's own.
    `methods/bottleneck/weights.py` is a short example.
    """

    changes_input: ClassVar[bool] = False
    """Whether the frozen product sees other inputs than x on these rows."""
    changes_gradient: ClassVar[bool] = False
    """Whether the frozen product has another gradient than y on these rows."""
    has_penalty: ClassVar[bool] = False
    """Whether the parameters have a gradient that is not the loss's: `penalty_gradients`."""
    any_order_sums: AnyOrderSums | None = None
    """Takes each sample's gradients over, where their order must not matter; its rows then come sample by sample."""

    def change_input(self, x_TD: torch.Tensor, rows: SlotRows) -> None:
        """Turns a copy of x into what the frozen product sees; asked only of those that say `changes_input`."""
        raise AssertionError("a method that says `changes_input` has this hook")

    @abstractmethod
    def forward(self, x_TD: torch.Tensor, y_TO: torch.Tensor, rows: SlotRows, routing: Routing) -> Any:
        """Changes y, which holds the frozen product; returns what `backward` needs besides x."""

    def change_gradient(self, dy_TO: torch.Tensor, rows: SlotRows) -> None:
        """Turns a copy of dy into the gradient of the frozen product; asked only of those that `changes_gradient`."""
        raise AssertionError("a method that says `changes_gradient` has this hook")

    @abstractmethod
    def backward(
        self, x_TD: torch.Tensor, dy_TO: torch.Tensor, dx_TD: torch.Tensor | None, rows: SlotRows, kept: Any
    ) -> None:
        """Adds to the gradients, and to dx, which holds what came through the frozen product; None: nobody needs dx."""

    def penalty_gradients(self) -> ModuleTensors:
        """What every optimizer step adds to the gradients once; asked only of those that say `has_penalty`."""
        raise AssertionError("a method that says `has_penalty` has this hook")

    def keep_from(self, before: SlotWeights) -> None:  # noqa: B027 (most have nothing)
        """Takes over what the weights in this place had besides their buffers, when the adapter moves to others."""

    def in_files(self, params: ModuleTensors) -> ModuleTensors:
        """What the adapter's files hold of such parameters of this place: most methods' files hold themselves."""
        return params

    def from_files(self, given: ModuleTensors) -> ModuleTensors:
        """The parameters that the tensors of a file mean in this place."""
        return given


class KernelCopy:
    """An adapter's weights as the fused path's kernels read them, and where these leave gradients."""

    def __init__(self, adapter: Adapter) -> None:
        self.entries: dict[str, Entry] = {}
        """What it has of products of a low rank, by path."""
        self.others: OtherParts[str] = OtherParts()
        """What it changes besides, by path."""
        self._adapter = adapter
        self._version = -1

    def follow(self) -> None:
        """Copies the weights if they have changed."""
        if self._version != self._adapter.version:
            self.copy_weights()
            # Last: if memory ends in between, the next call copies again.
            self._version = self._adapter.version

    def copy_weights(self) -> None:
        """Brings what kernels read in line with the masters."""

    def collect(self) -> None:
        """Adds gradients that kernels left in buffers of their own to the adapter's, and empties these buffers."""

    def clear_gradients(self) -> None:
        """Empties those buffers."""

    def any_order_words(self) -> Mapping[str, Words]:
        """The words in which kernels have added gradients in any order, by group."""
        return {}


@dataclass(frozen=True)
class CostRanks:
    """What an adapter costs in the unit of the cost models: the rank of a LoRA that costs no less."""

    usual: int
    """Of most modules, for times."""
    widest: int
    """Of the most expensive module, for memory."""


Change = tuple[str, str]
"""What a method other than LoRA may change for kernels, and the role of the sites where it does."""
Keeps = Literal["", "outputs", "blocks", "sparse"]
"""What the fused path keeps for a method besides S: nothing, outputs of linears, those of blocks, or what sparse
products read, for a moment."""
WHOLE_NUMBERS = ("indices", "shape")
"""How names of tensors in files end that hold whole numbers; all others are floats."""


class PeftFormat(ABC):
    """The files of a method's adapters as PEFT writes and reads them."""

    peft_type: str
    """What adapter_config.json calls the method."""
    marker: str | None = None
    """The key that is on in its files alone, where another method has the same peft_type."""
    in_peft: bool = False
    """Whether PEFT has the method; where it has not, only Weft reads the files."""
    title: str
    """What people call it."""
    suffixes: Mapping[str, str]
    """What PEFT calls a group's tensors, and how their names end: lora_A and `lora_A.weight`; in the groups' order."""
    defaults: Mapping[str, Any]
    """Every key PEFT writes and its default, except peft_version, which PEFT fills in where a file has none."""
    refused: Mapping[str, str] = {}
    """Keys that must be off, and why."""

    def config(self, spec: AdapterSpec, target_names: Collection[str], paths: Collection[str]) -> dict[str, Any]:
        """The keys that are not as by default for an adapter on the modules `paths`."""
        return {}

    def check_config(self, config: Mapping[str, Any], where: str) -> None:  # noqa: B027 (optional)
        """AdapterFileError if the config asks for what we do not implement."""

    def settings(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The method's own settings of an AdapterSpec; the config holds no null."""
        return {}

    @abstractmethod
    def check_tensors(self, spec: AdapterSpec, path: str, tensors: ModuleTensors, where: str) -> None:
        """AdapterFileError if the tensors of a module are not those of the spec."""

    def shared_names(self, config: Mapping[str, Any]) -> Collection[str]:
        """What PEFT calls the tensors that the file has for all modules together."""
        return ()

    def check_shared(  # noqa: B027 (optional)
        self, spec: AdapterSpec, shared: Mapping[str, torch.Tensor], where: str
    ) -> None:
        """AdapterFileError if those tensors are not those of the spec; called only where the file has some."""

    def linear_shape(self, tensors: ModuleTensors) -> tuple[int | None, int | None]:
        """(out, in) of the module that tensors are for; None where they do not show it."""
        return None, None

    def what_it_is(self, name: str) -> str:
        """Why a tensor that is none of the method's cannot be read."""
        return f"which is no tensor of {self.title}"

    @abstractmethod
    def summary(self, spec: AdapterSpec) -> str:
        """The settings that matter, for the model card."""


@runtime_checkable
class JoinedFormat(Protocol):
    """A format whose file does not have its tensors place by place."""

    def join(self, tensors: Mapping[str, ModuleTensors]) -> dict[str, torch.Tensor]:
        """The tensors of the file, out of those by path."""
        ...

    def part(
        self, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any], where: str
    ) -> dict[str, ModuleTensors]:
        """The tensors by path, out of those of the file; AdapterFileError if it holds others."""
        ...


class Method(ABC):
    """One PEFT method. What is not abstract has a default, which most methods keep."""

    attachment: Attachment
    groups: tuple[str, ...]
    """Names of its groups of parameters; checkpoints know them by these. An adapter may have only the first of them."""
    files: PeftFormat
    kernel_keeps: Keeps = ""
    kernel_changes: tuple[Change, ...] = ()
    """All that its adapters may ask of kernels besides LoRA's."""
    has_any_order_kernels: bool = False
    """Whether kernels can add its gradients so that no order of samples matters."""
    workspace_bytes: int = 0
    """What one place needs on the reference path besides what is kept, at most; it is given back at once."""

    @abstractmethod
    def shapes(self, spec: AdapterSpec, path: str, linear: LinearShape) -> Sequence[tuple[int, ...]]:
        """Shapes of the tensors on one module, one for each group that the adapter has."""

    @abstractmethod
    def initial(self, spec: AdapterSpec, path: str, place: Place, generator: torch.Generator) -> ModuleTensors:
        """PEFT's starting values in one place, of all devices together."""

    @abstractmethod
    def weights(
        self, spec: AdapterSpec, path: str, place: Place, params: ModuleTensors, grads: ModuleTensors
    ) -> SlotWeights:
        """What a slot of one place holds; views of the flat buffers, as far as they belong to the place's share.

        After `params` come the shared tensors, whole. The gradient of a frozen group is an empty tensor.
        """

    @abstractmethod
    def cost_ranks(self, spec: AdapterSpec) -> CostRanks:
        """What such an adapter costs."""

    def check(self, spec: AdapterSpec, modules: Mapping[str, LinearShape]) -> None:  # noqa: B027 (optional)
        """ConfigError if an adapter cannot sit on these modules."""

    def frozen(self, spec: AdapterSpec) -> tuple[str, ...]:
        """Those of its groups that are not trained: they have no gradients, and no moments."""
        return ()

    def shared(
        self, spec: AdapterSpec, modules: Mapping[str, LinearShape], device: torch.device
    ) -> Mapping[str, torch.Tensor]:
        """Frozen tensors that all modules of an adapter read, by PEFT's names; they follow from the settings alone."""
        return {}

    def rate_factors(self, job: JobSpec) -> Sequence[float]:
        """Factors on the job's learning rate, for each group that is trained."""
        return (1.0,) * (len(self.groups) - len(self.frozen(job.adapter)))

    def saved_width(self, spec: AdapterSpec, path: str, linear: LinearShape) -> int:
        """Numbers that `SlotWeights.forward` keeps of a row in one place, dropout masks apart."""
        return 0

    def merge(self, spec: AdapterSpec, path: str, tensors: ModuleTensors, linear: nn.Linear) -> None:
        """Puts an adapter's effect on one linear into the linear itself.

        After the module's `tensors` come the shared ones. A method without this is refused when it is to be merged.
        """
        raise AdapterFileError(f"a {self.files.title} adapter cannot be merged into its base model; keep it apart.")

    def exported(
        self, spec: AdapterSpec, tensors: Mapping[str, ModuleTensors]
    ) -> tuple[AdapterSpec, Mapping[str, ModuleTensors]]:
        """The adapter that is written for one with these tensors, where it is not the same."""
        return spec, tensors

    def has_kernels(self, spec: AdapterSpec) -> bool:
        """Whether the fused path can run such an adapter."""
        return False

    def kernel_copy(self, adapter: Adapter, dtype: torch.dtype) -> KernelCopy:
        """What the fused path's kernels read; needed by methods that have kernels."""
        raise AssertionError(f"{type(self).__name__} claims kernels, so it must say what they read")

    def kernel_rank(self, spec: AdapterSpec) -> int:
        """The widest rank that its kernels see; 0 where it has no product of a low rank."""
        return 0

    def kernel_bytes(self, spec: AdapterSpec, modules: Mapping[str, LinearShape], each: int) -> int:
        """What kernels read and leave of such an adapter beside a copy of its parameters, whose numbers have `each`
        bytes."""
        return 0

    def compile_copy(  # noqa: B027 (optional)
        self, rank: int, linears: Sequence[LinearShape], like: torch.Tensor
    ) -> None:
        """Launches what such a copy of rank `rank` will, on linears of these shapes, besides torch's own operations.

        `like`: a tensor of the activations' type and device.
        """
