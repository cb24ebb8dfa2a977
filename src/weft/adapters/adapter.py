"""One job's adapter: fp32 masters and gradients in one flat buffer per group, viewed module by module.

A method has one or more groups of parameters (LoRA: all A, all B), so that one optimizer call steps a whole group, and
each group can have a learning rate of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from weft.adapters.devices import Devices
from weft.adapters.experts import ExpertSite
from weft.adapters.method import KernelCopy, Method, ModuleTensors, Site, SlotWeights
from weft.adapters.parts import HEAD, INPUT_ROWS, HeadWeights, PartShape, RowsShape, TokenRows
from weft.adapters.routing import AnyOrderSums
from weft.errors import AdapterFileError
from weft.kernels.dropout import mix, module_key
from weft.kernels.fixed_point import SumWords, added_up, total_of_ends
from weft.spec import AdapterSpec, JobSpec


@dataclass
class ParameterGroup:
    params: torch.Tensor
    grad: torch.Tensor


class Adapter:
    def __init__(
        self,
        spec: AdapterSpec,
        method: Method,
        sites: Mapping[str, Site],
        seed: int | None,
        device: torch.device,
        parts: Mapping[str, PartShape] | None = None,
        *,
        has_any_order_sums: bool = False,
        devices: Devices | None = None,
    ) -> None:
        """`sites`: by path, in the backbone's order. `seed`: None for an adapter that does not train: its weights are
        loaded, and its gradients are empty. Each part is one more group of parameters. `has_any_order_sums`: the order
        of samples does not change a bit of the gradients once `complete_gradients` is done. `devices`: those that
        divide the layers; each has a part of the moments."""
        self.devices = devices
        self.spec = spec
        self.method = method
        shapes = {path: site.shape for path, site in sites.items()}
        self.method.check(spec, shapes)
        self._sites = sites
        self._linears = shapes
        self._shapes = {path: tuple(self.method.shapes(spec, path, shape)) for path, shape in shapes.items()}
        self.shared: Mapping[str, torch.Tensor] = {}
        """Frozen tensors that all modules read and that follow from the settings."""
        self.groups: dict[str, ParameterGroup] = {}
        self.frozen: dict[str, torch.Tensor] = {}
        self.modules: dict[str, SlotWeights] = {}
        self._parts = dict(parts or {})
        self.head: HeadWeights | None = None
        self.token_rows: dict[str, TokenRows] = {}
        self._tied_grad: torch.Tensor | None = None
        """Gradient of tied rows from the output head, until the global batch is complete."""
        self.has_any_order_sums = has_any_order_sums
        self._any_order_sums: list[AnyOrderSums] = []
        self._views: dict[str, ModuleTensors] = {}
        self.kernel_copy: KernelCopy | None = None
        """Copy of the weights for kernels, while it has a slot of the fused path; may hold kernels' gradients."""
        self._penalised_at: int | None = None
        """Version of the weights whose penalty is already in the gradients."""
        names = self.method.groups[: len(next(iter(self._shapes.values())))]
        sizes = {name: sum(self._sizes(i)) for i, name in enumerate(names)}
        sizes |= {name: sum(part.sizes) for name, part in self._parts.items()}
        self._trains = seed is not None
        self._take({name: torch.zeros(size, device=device) for name, size in sizes.items()})
        self.version = 0
        """Number of changes of the weights so far, for copies of them."""
        if seed is not None:
            self._initialise(seed)

    def changed(self) -> None:
        """Must be called after the weights were written to."""
        self.version += 1

    @property
    def device(self) -> torch.device:
        return next(iter(self.groups.values())).params.device

    @property
    def parts(self) -> Collection[str]:
        return self._parts.keys()

    @property
    def has_gates_in_turns(self) -> bool:
        """Whether outputs of experts' gate and up take turns in the backbone's weights."""
        return any(isinstance(site, ExpertSite) and site.columns.step == 2 for site in self._sites.values())

    @property
    def num_parameters(self) -> int:
        return sum(group.params.numel() for group in self.groups.values())

    def zero_grad(self) -> None:
        for group in self.groups.values():
            group.grad.zero_()
        self._forget_sums()
        if self.kernel_copy is not None:
            self.kernel_copy.clear_gradients()
        self._penalised_at = None

    def _forget_sums(self) -> None:
        """Clears sums outside the gradients' buffers: a step on a GPU empties only the buffers."""
        for sums in self._any_order_sums:
            sums.forget()
        if self._tied_grad is not None:
            self._tied_grad.zero_()

    def add_up_gradients(self, devices: Devices) -> None:
        """Completes the gradients of a global batch over devices that divide the layers; all get the sum. Gradients
        that all devices compute alike are taken from the first device."""
        if self.has_any_order_sums:
            sums = self.any_order_sums(devices)
            self.write_gradients(
                {name: total_of_ends([own], self.groups[name].grad.numel()) for name, own in sums.items()}
            )
            return
        self.complete_gradients()
        if devices.index > 0:
            for path, own in self._split_grads().items():
                if path in self._parts or self._sites[path].share.devices is None:
                    for grad in own:
                        grad.zero_()
        for group in self.groups.values():
            group.grad.copy_(devices.add_up(group.grad))

    def complete_gradients(self) -> None:
        """Adds penalties and gradients that kernels left elsewhere to the gradients of a complete global batch,
        once."""
        if self.kernel_copy is not None:
            self.kernel_copy.collect()
        if self._penalised_at == self.version:
            return
        for sums in self._any_order_sums:
            sums.give()
        self._add_penalties()
        if self._tied_grad is not None:
            self.token_rows[INPUT_ROWS].grad_KD.add_(self._tied_grad)
        self._forget_sums()
        self._penalised_at = self.version

    def any_order_sums(self, devices: Devices | None = None) -> dict[str, SumWords]:
        """The order-independent sums of its samples so far, by group in the order of its buffer; with those of all
        devices that divide the layers."""
        found: dict[str, list[SumWords]] = {name: [] for name in self.groups}
        for sums in self._any_order_sums:
            for group, words in sums.words():
                found[group].append(words)
        joined = {group: SumWords.joined(own) for group, own in found.items()}
        kernels = {} if self.kernel_copy is None else self.kernel_copy.any_order_words()
        for group, made in kernels.items():
            joined[group] = joined[group].with_words(made.fine_P, made.coarse_P)
        if devices is None or all(site.share.devices is None for site in self._sites.values()):
            return joined
        # All devices compute the same for parts, and for sites that are not divided.
        return {group: own if group in self._parts else added_up(own, devices.add_up) for group, own in joined.items()}

    def penalties(self) -> dict[str, torch.Tensor] | None:
        """Gradients apart from the loss to add to order-independent sums, by group; None if there are none."""
        if not any(weights.has_penalty for weights in self.modules.values()):
            return None
        self._add_penalties()
        found = {name: group.grad.clone() for name, group in self.groups.items()}
        for group in self.groups.values():
            group.grad.zero_()
        return found

    def write_gradients(self, flat: Mapping[str, torch.Tensor]) -> None:
        """Replaces the gradients by those of a complete global batch, by group; its own sums are in them already."""
        for name, grad in flat.items():
            self.groups[name].grad.copy_(grad)
        self._forget_sums()
        if self.kernel_copy is not None:
            self.kernel_copy.clear_gradients()
        self._penalised_at = self.version

    def _add_penalties(self) -> None:
        # All of them first: without the memory for the last, none has been added.
        found = {path: weights.penalty_gradients() for path, weights in self.modules.items() if weights.has_penalty}
        grads = self._split_grads() if found else {}
        for path, own in found.items():
            for grad, penalty in zip(grads[path], own, strict=True):
                grad.add_(penalty)

    def flat(self) -> dict[str, torch.Tensor]:
        found = {**self.frozen, **self.trained()}
        return {name: found[name] for name in (*self.method.groups, *self._parts) if name in found}

    def trained(self) -> dict[str, torch.Tensor]:
        return {name: group.params for name, group in self.groups.items()}

    def put(self, flat: Mapping[str, torch.Tensor]) -> None:
        own = self.flat()
        for name, params in flat.items():
            own[name].copy_(params)
        self.changed()

    def tensors(self) -> dict[str, ModuleTensors]:
        """Copies of the weights on the CPU by module path, as in files."""
        return self.in_files({path: tuple(view.cpu().clone() for view in own) for path, own in self._views.items()})

    def in_files(self, tensors: Mapping[str, ModuleTensors]) -> dict[str, ModuleTensors]:
        return {path: own if path in self._parts else self.modules[path].in_files(own) for path, own in tensors.items()}

    def load(self, tensors: Mapping[str, ModuleTensors], where: str) -> None:
        """Loads the weights of all modules, as in files; modules and shapes must be this adapter's."""
        if (HEAD in tensors) != (self.head is not None):
            side = "holds a head for labels, and the job" if HEAD in tensors else "holds no head, and the job"
            raise AdapterFileError(f"{side} {'has none' if HEAD in tensors else 'needs one'}.", where=where)
        for path in sorted(self._views.keys() ^ tensors.keys()):
            side = "is not in the file" if path in self.modules else "is not a module of this adapter"
            raise AdapterFileError(f"{path} {side}; target_modules must be those it was trained with.", where=where)
        for path, stored in tensors.items():
            mine = self._views[path]
            given = stored if path in self._parts else self.modules[path].from_files(stored)
            if [x.shape for x in given] != [view.shape for view in mine]:
                names = ["WEIGHT", "BIAS"] if path in self._parts else [name.upper() for name in self.method.groups]
                found = " and ".join(f"{name} {tuple(x.shape)}" for name, x in zip(names, given, strict=False))
                expected = " and ".join(str(tuple(view.shape)) for view in mine)
                raise AdapterFileError(f"{path} has {found}; expected {expected}.", where=where)
            for view, x in zip(mine, given, strict=True):
                view.copy_(x)
        self.changed()

    def take(self, flat: Mapping[str, torch.Tensor]) -> None:
        """Makes these buffers the weights, on any device, and clears the gradients; no slot may hold the adapter. If
        memory for new gradients is missing, nothing changes."""
        self._take(flat)
        self.changed()

    def _take(self, flat: Mapping[str, torch.Tensor]) -> None:
        frozen = self.method.frozen(self.spec)
        trained = {name: params for name, params in flat.items() if name not in frozen}
        self.groups = {
            name: ParameterGroup(params, torch.zeros_like(params) if self._trains else params.new_empty(0))
            for name, params in trained.items()
        }
        self.frozen = {name: flat[name] for name in frozen}
        self.shared = self.method.shared(self.spec, self._linears, self.device)
        self._views = self.split(self.flat())
        grads = self._split_grads()
        self._any_order_sums = []
        self._take_parts(grads)
        for path, site in self._sites.items():
            params = (*self._own(path, self._views[path]), *self.shared.values())
            weights = self.method.weights(self.spec, path, site, params, self._own(path, grads[path]))
            if path in self.modules:
                weights.keep_from(self.modules[path])
            weights.any_order_sums = self._sums_of(self.method.groups[: len(grads[path])], grads[path])
            self.modules[path] = weights

    def _own(self, path: str, tensors: ModuleTensors) -> ModuleTensors:
        """Views of a module's tensors, cut to the module's share on this device."""
        share = self._sites[path].share
        if share.devices is None:
            return tensors
        shapes = self.method.shapes(self.spec, path, share.shape)
        return tuple(share.view(x, shape) if x.numel() else x for x, shape in zip(tensors, shapes, strict=False))

    def own_views(self, group: str, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """Views of a buffer of one group by module path, cut to this device's share."""
        index, found = self.method.groups.index(group), dict[str, torch.Tensor]()
        for path, (whole,) in self.split({group: buffer}).items():
            share = self._sites[path].share
            is_whole = share.devices is None
            shapes = () if is_whole else self.method.shapes(self.spec, path, share.shape)
            found[path] = whole if is_whole else share.view(whole, shapes[index])
        return found

    def _take_parts(self, grads: Mapping[str, ModuleTensors]) -> None:
        self.head = None
        if HEAD in self._parts:
            self.head = HeadWeights(
                self._views[HEAD], grads[HEAD], self._sums_of([HEAD] * len(grads[HEAD]), grads[HEAD])
            )
        for name, shape in self._parts.items():
            if isinstance(shape, RowsShape):
                ((rows_KD,), (grad_KD,)) = self._views[name], grads[name]
                first, *tied = shape.ends
                self.token_rows[first] = TokenRows(shape.ids, rows_KD, grad_KD, self._sums_of([name], [grad_KD]))
                for end in tied:
                    self._tied_grad = torch.zeros_like(grad_KD)
                    sums = self._sums_of([name], [self._tied_grad])
                    self.token_rows[end] = TokenRows(shape.ids, rows_KD, self._tied_grad, sums)

    def _sums_of(self, groups: Sequence[str], grads: Sequence[torch.Tensor]) -> AnyOrderSums | None:
        """The sums that take over the gradients of a site if their order must not matter."""
        if not self.has_any_order_sums:
            return None
        self._any_order_sums.append(AnyOrderSums(groups, grads))
        return self._any_order_sums[-1]

    def split(self, buffers: Mapping[str, torch.Tensor]) -> dict[str, ModuleTensors]:
        """Views of flat buffers by module path, from buffers of some groups by name; a part counts as a module."""
        found: dict[str, list[torch.Tensor]] = {path: [] for path in self._shapes}
        for name, buffer in buffers.items():
            if name in self._parts:
                found[name] = list(self._parts[name].split(buffer))
                continue
            group = self.method.groups.index(name)
            for (path, shapes), piece in zip(self._shapes.items(), buffer.split(self._sizes(group)), strict=True):
                found[path].append(piece.view(shapes[group]))
        return {path: tuple(views) for path, views in found.items()}

    def _split_grads(self) -> dict[str, ModuleTensors]:
        if not self._trains:
            return {path: tuple(view.new_empty(0) for view in views) for path, views in self._views.items()}
        trained = self.split({name: group.grad for name, group in self.groups.items()})
        if not self.frozen:
            return trained
        nothing = torch.empty(0, device=self.device)
        own = {path: dict(zip(self.groups_of(path), trained[path], strict=True)) for path in self._shapes}
        grads = {path: tuple(views.get(name, nothing) for name in self.method.groups) for path, views in own.items()}
        return {**grads, **{name: trained[name] for name in self._parts}}

    def groups_of(self, path: str) -> tuple[str, ...]:
        if path in self._parts:
            return (path,) * len(self._views[path])
        return tuple(name for name in self.groups if name not in self._parts)

    def rate_factors(self, job: JobSpec) -> list[float]:
        return [*self.method.rate_factors(job), *(1.0 for _ in self._parts)]

    def _sizes(self, group: int) -> list[int]:
        return [torch.Size(shapes[group]).numel() for shapes in self._shapes.values()]

    def _initialise(self, seed: int) -> None:
        """Draws initial values per module from the job's seed: no module's values depend on the others."""
        for path, views in self._views.items():
            generator = torch.Generator().manual_seed(mix(seed, module_key(path), 0x1417))
            if path in self._parts:
                values = self._parts[path].initial(generator)
            else:
                values = self.method.initial(self.spec, path, self._sites[path], generator)
            for view, value in zip(views, values, strict=True):
                view.copy_(value)
