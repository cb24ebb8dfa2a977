"""Adapters from directories on one backbone: read, named, checked against the model and put on slots."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import torch

from weft.adapters.adapter import Adapter
from weft.adapters.method import LinearShape, ModuleTensors
from weft.adapters.parts import HEAD, HeadShape
from weft.adapters.targets import is_target
from weft.data.chat_template import Tokenizer
from weft.data.render import check_template
from weft.errors import AdapterFileError, ConfigError, ModelError
from weft.methods.registry import method_of
from weft.model.backbone import Backbone
from weft.model.load import load_backbone
from weft.objectives.heads import HeadObjective
from weft.settings import is_expert_path
from weft.spec import AdapterSpec, BackboneSpec
from weft.store.peft_files import CONFIG_FILE, PARTS, TEMPLATE_FILE, read_adapter, read_chat_template, read_head
from weft.store.row_files import ROWS

T = TypeVar("T")
BASE = "base"


@dataclass(frozen=True, eq=False)
class StoredAdapter:
    name: str
    path: Path
    spec: AdapterSpec
    tensors: dict[str, ModuleTensors]
    base_model: str | None
    chat_template: str | None = None
    """Chat template it was trained with instead of the base model's."""
    head: HeadObjective | None = None


@dataclass(frozen=True, eq=False)
class Attached:
    backbone: Backbone
    slots: dict[str, int | None]
    """Slot by name, in the given order; None is the bare backbone."""
    chat_templates: dict[str, str | None] = field(default_factory=dict)
    """Template by name, instead of the tokenizer's."""
    notes: tuple[str, ...] = ()
    heads: dict[str, HeadObjective] = field(default_factory=dict)

    def tokenizer(self, name: str) -> Tokenizer:
        return self.backbone.tokenizer_of(self.slots[name])

    def as_each_reads(self, read: Callable[[Tokenizer, str | None], T]) -> dict[str, T]:
        """Results of `read` by name, for each adapter's tokenizer and chat template, so that each reads data as it was
        trained to."""
        found: dict[str, T] = {}
        made: dict[tuple[int, str | None], T] = {}
        for name, template in self.chat_templates.items():
            tokenizer = self.tokenizer(name)
            key = (id(tokenizer), template)
            if key not in made:
                made[key] = read(tokenizer, template)
            found[name] = made[key]
        return found


def adapter_dir(path: Path) -> Path:
    """The adapter directory; a job's directory stands for the `adapter` in it."""
    if (path / CONFIG_FILE).exists():
        return path
    if (path / "adapter" / CONFIG_FILE).exists():
        return path / "adapter"
    if (path / "run.json").exists():
        jobs = sorted(found.parent.parent.name for found in path.glob(f"*/adapter/{CONFIG_FILE}"))
        hint = f"Name the directory of one of its jobs: {', '.join(jobs)}." if jobs else "None of its jobs is done yet."
        raise AdapterFileError("holds a whole run.", where=str(path), hint=hint)
    if (path / "job.json").exists():
        raise AdapterFileError("the job has no adapter yet; it is written when the job ends.", where=str(path))
    return path


def read_named(text: str) -> StoredAdapter:
    """The adapter that a user named as `DIR` or `NAME=DIR`; default name: of its job or directory."""
    name, equals, rest = text.partition("=")
    if Path(text).exists() or not equals:
        name, rest = "", text
    return read_stored(Path(rest).expanduser(), name)


def read_stored(path: Path, name: str = "") -> StoredAdapter:
    """The adapter in its directory, or in a job's; default name: of its job or directory."""
    path = adapter_dir(path)
    spec, tensors, config = read_adapter(path)
    whole = path.resolve()
    name = name or (whole.parent.name if whole.name == "adapter" else whole.name)
    base_model = config.get("base_model_name_or_path")
    stated = base_model if isinstance(base_model, str) else None
    head = read_head(path, config, tensors)
    return StoredAdapter(name, path, spec, tensors, stated, read_chat_template(path), head)


def check_fit(stored: StoredAdapter, shapes: Mapping[str, LinearShape], base_model: str) -> None:
    """AdapterFileError if an adapter does not fit a model whose modules for its method have these shapes, by path."""
    where, method = str(stored.path), method_of(stored.spec)
    for path, tensors in stored.tensors.items():
        if path in PARTS:
            continue
        if path not in shapes:
            kind = method.attachment.value
            raise AdapterFileError(f"{path} is not a {kind} of base_model {base_model}.", where=where)
        given = method.files.linear_shape(tensors)
        if any(size not in (None, real) for size, real in zip(given, shapes[path], strict=True)):
            found = " x ".join("any" if size is None else str(size) for size in given)
            raise AdapterFileError(
                f"{path} is for a module of {found}; in base_model {base_model} it is "
                f"{' x '.join(map(str, shapes[path]))}.",
                where=where,
            )
    for path in shapes:
        # A config names experts by suffixes, in all layers or in some.
        is_named = not is_expert_path(path) and is_target(stored.spec, method.attachment, path)
        if path not in stored.tensors and is_named:
            raise AdapterFileError(
                f"has no weights for {path} of base_model {base_model}, which its config targets.", where=where
            )


def own_part(backbone: Backbone, stored: StoredAdapter) -> StoredAdapter | None:
    """The tensors of an adapter that belong to this part of a model or fit nowhere; None if there are none."""
    if backbone.part is None:
        return stored
    method = method_of(stored.spec)
    rows = backbone.embeddings.shapes_here(stored.spec).keys()
    elsewhere = {*backbone.sites.paths_for(method), *ROWS} - backbone.sites.shapes_for(method).keys() - rows
    tensors = {path: own for path, own in stored.tensors.items() if path not in elsewhere}
    if rows and tensors.keys() <= rows:
        found = "its rows of tokens are on a stage where it has no module; use fewer stages."
        raise AdapterFileError(found, where=str(stored.path))
    return replace(stored, tensors=tensors) if tensors else None


def attach_adapter(backbone: Backbone, stored: StoredAdapter, *, with_head: bool = False) -> int:
    """Puts an adapter for inference on a free slot and returns the slot; AdapterFileError if it does not fit the
    backbone, or has a head without `with_head`."""
    return backbone.attach(adapter_on(backbone, stored, with_head=with_head))


def adapter_on(
    backbone: Backbone, stored: StoredAdapter, *, with_head: bool = False, device: torch.device | None = None
) -> Adapter:
    """An adapter as `attach_adapter` puts it on a slot, without one; on the backbone's device unless another is
    given."""
    _refuse_head(stored, with_head=with_head)
    shapes = backbone.sites.shapes_for(method_of(stored.spec))
    check_fit(stored, shapes, backbone.name)
    head = stored.tensors.get(HEAD)
    head_shape = None if head is None else HeadShape(head[0].shape[0], head[0].shape[1], has_bias=len(head) > 1)
    if head_shape is not None and head_shape.width != backbone.head.weight_VD.shape[1]:
        found = f"{HEAD} is for a width of {head_shape.width}; base_model {backbone.name} has"
        raise AdapterFileError(f"{found} {backbone.head.weight_VD.shape[1]}.", where=str(stored.path))
    # Jobs that train beside it need no kernels for its dropout.
    spec = replace(stored.spec, lora_dropout=0.0)
    try:
        adapter = backbone.stored_adapter(
            spec, [path for path in stored.tensors if path not in PARTS], head_shape, device
        )
    except ConfigError as error:
        raise AdapterFileError(error.message, where=str(stored.path)) from None
    adapter.load(stored.tensors, str(stored.path))
    return adapter


def _refuse_head(stored: StoredAdapter, *, with_head: bool) -> None:
    if HEAD in stored.tensors and not with_head:
        raise AdapterFileError("has a head for labels: it classifies and does not write.", where=str(stored.path))


def load_with_adapters(
    given: Sequence[str],
    *,
    base_model: str | None,
    device: str = "auto",
    dtype: str = "auto",
    with_base: bool = False,
    with_heads: bool = False,
) -> Attached:
    """The backbone with every given adapter attached; adapters are read before the model, which takes longer.

    Each is written `DIR`, `NAME=DIR` or `base` for the bare backbone, which `with_base` puts in front. Without adapters
    there is only the bare backbone; without a `base_model` it is the one the adapters were trained on. Adapters with a
    head are refused, unless `with_heads`.
    """
    stored: dict[str, StoredAdapter | None] = {BASE: None} if with_base or not given else {}
    for text in given:
        if text == BASE:
            stored[BASE] = None
            continue
        adapter = read_named(text)
        if adapter.name == BASE:
            raise ConfigError(f"{BASE} means the bare model; give another name: NAME={adapter.path}.", where=text)
        if adapter.name in stored:
            raise ConfigError(f"there are two adapters {adapter.name!r}; name them: NAME=DIR.", where=text)
        stored[adapter.name] = adapter
    adapters = [adapter for adapter in stored.values() if adapter is not None]
    for adapter in adapters:
        _refuse_head(adapter, with_head=with_heads)
    backbone = _load(BackboneSpec(base_model or common_base(adapters), dtype, device), stated=base_model is not None)
    slots = {
        name: attach_adapter(backbone, adapter, with_head=with_heads) if adapter else None
        for name, adapter in stored.items()
    }
    notes = tuple(
        f"{adapter.name} was trained on {adapter.base_model}, not on {backbone.name}."
        for adapter in adapters
        if adapter.base_model not in (None, backbone.name)
    )
    heads = {adapter.name: adapter.head for adapter in adapters if adapter.head is not None}
    return Attached(backbone, slots, _chat_templates(stored, backbone), notes, heads)


def common_base(adapters: Sequence[StoredAdapter]) -> str:
    named = {adapter.base_model: adapter for adapter in adapters if adapter.base_model}
    if len(named) > 1:
        found = " and ".join(f"{adapter.name} on {base}" for base, adapter in named.items())
        raise ConfigError(
            f"the adapters were trained on different base models ({found}); run them one by one, or choose with "
            "--base-model."
        )
    if not named:
        found = "the adapter's config names no base model" if adapters else "there is neither an adapter nor a model"
        raise ConfigError(f"{found}; give --base-model.")
    return next(iter(named))


def _chat_templates(stored: Mapping[str, StoredAdapter | None], backbone: Backbone) -> dict[str, str | None]:
    """Templates by name; AdapterFileError for one that is not Jinja."""
    templates: dict[str, str | None] = {}
    for name, adapter in stored.items():
        templates[name] = adapter.chat_template if adapter else None
        if adapter is None or adapter.chat_template is None:
            continue
        try:
            check_template(adapter.chat_template, backbone.tokenizer)
        except ConfigError as error:
            raise AdapterFileError(error.message, where=str(adapter.path / TEMPLATE_FILE)) from None
    if BASE in templates and not backbone.tokenizer.chat_template:
        # A base model without a template uses the adapters': the comparison is about the weights.
        templates[BASE] = next((template for template in templates.values() if template is not None), None)
    return templates


def _load(spec: BackboneSpec, *, stated: bool) -> Backbone:
    try:
        return load_backbone(spec)
    except ModelError as error:
        if stated or error.where == "device":
            raise
        hint = "It is the base the adapter names; if it is elsewhere now, give --base-model."
        raise ModelError(error.message, where=error.where, hint=hint) from error
