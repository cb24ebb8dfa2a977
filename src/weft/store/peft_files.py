"""PEFT adapter directories: those of Weft load in PEFT and servers, those of PEFT can be trained here.

    adapter_config.json         PEFT's config of the method, see peft_config
    adapter_model.safetensors   base_model.model.<module path>.lora_A.weight (r, in) and the like, by method
    chat_template.jinja         the job's own chat template, if it had one
    tokenizer.json, …           the tokenizer of an adapter with new tokens
    labels.json                 the objective and the labels of an adapter with a head
    README.md                   a short model card

Files are not trusted: safetensors only, a bounded header, exact names, shapes that fit the config, finite numbers.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from weft.adapters.method import WHOLE_NUMBERS, JoinedFormat, ModuleTensors, PeftFormat
from weft.adapters.parts import HEAD
from weft.adapters.targets import is_target
from weft.errors import AdapterFileError
from weft.methods.registry import METHODS, method_of
from weft.objectives.heads import Classification, HeadObjective, Reward, TokenClassification
from weft.settings import is_expert_path
from weft.spec import AdapterSpec
from weft.spec.run import EMBEDDED
from weft.store import json_text
from weft.store.atomic import staged_directory, write_unsynced
from weft.store.checkpoint import file_pieces
from weft.store.expert_files import files_for, fused_files, is_expert_name, read_experts
from weft.store.peft_config import config_of, long_name, method_named, renamed_config, renamed_tensors, spec_of
from weft.store.row_files import (
    ROWS,
    check_rows,
    names_in_file,
    read_new_tokens,
    resizing,
    rows_in_file,
    write_tokenizer,
)

CONFIG_FILE = "adapter_config.json"
TENSORS_FILE = "adapter_model.safetensors"
PICKLE_FILE = "adapter_model.bin"
CARD_FILE = "README.md"
TEMPLATE_FILE = "chat_template.jinja"
"""The name in transformers; a tokenizer loaded from the directory uses it as its own."""
MAX_HEADER_BYTES = 1 << 20
"""Maximum size of a safetensors header, config and template. A LoRA on all linears of 80 layers takes 150 KB."""

LABELS_FILE = "labels.json"

PARTS = (HEAD, *ROWS)
"""Names of an adapter's tensors besides those of its method."""
_PREFIX = "base_model.model."
_SHARED_PREFIX = "base_model."
TASKS = {
    "SEQ_CLS": ("text-classification", "AutoModelForSequenceClassification"),
    "TOKEN_CLS": ("token-classification", "AutoModelForTokenClassification"),
}
"""The Hub's name of a task and transformers' class, by PEFT's name of the task."""
_DTYPES = ("F32", "BF16", "F16", "F64")
_WHOLE_DTYPES = ("I32", "I64")


@dataclass(frozen=True, eq=False)
class AdapterFiles:
    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    was_long: bool = False
    """True if the file has names of a whole vision-language model; here they are those of its text model."""


def write_adapter(
    directory: Path,
    spec: AdapterSpec,
    tensors: Mapping[str, ModuleTensors],
    *,
    base_model: str,
    target_names: list[str],
    chat_template: str | None = None,
    shared: Mapping[str, torch.Tensor] | None = None,
    head: HeadObjective | None = None,
    row_modules: Mapping[str, str] | None = None,
    tokenizer: Any = None,
    in_turns: bool = False,
) -> None:
    """Writes the whole adapter into the directory; an existing adapter is replaced.

    `tensors` are those of every module, by path. `target_names` becomes target_modules: full paths, or leaf names where
    these mean no other module of the backbone. `chat_template` is the one that the adapter was trained with instead of
    the base's. `shared` are the frozen tensors of all modules together, if the method has any. `head` is the objective
    of an adapter that has a head among its tensors, `row_modules` the paths of the modules that it has rows of, and
    `tokenizer` that of an adapter with new tokens. `in_turns`: outputs of experts' gate and up take turns.
    """
    parts = {path: own for path, own in tensors.items() if path in PARTS}
    spec, modules = method_of(spec).exported(spec, {path: tensors[path] for path in tensors if path not in parts})
    files = adapter_files(
        spec,
        {**modules, **parts},
        base_model=base_model,
        target_names=target_names,
        shared=shared,
        row_modules=row_modules or {},
        in_turns=in_turns,
    )
    if head is not None:
        saved = [*(files.config.get("modules_to_save") or ()), HEAD]
        files.config.update({"task_type": head.task_type, "modules_to_save": saved})
    with staged_directory(directory) as staged:
        write_unsynced(staged / CONFIG_FILE, json_text.dump(files.config))
        write_unsynced(staged / TENSORS_FILE, *file_pieces(files.tensors, {"format": "pt"}))
        write_unsynced(staged / CARD_FILE, _model_card(spec, base_model, head))
        if head is not None:
            write_unsynced(staged / LABELS_FILE, json_text.dump(_labels(head)))
        if tokenizer is not None:
            write_tokenizer(staged, tokenizer)
        if chat_template is not None:
            write_unsynced(staged / TEMPLATE_FILE, chat_template)


@dataclass(frozen=True)
class ServedForm:
    """The form of an adapter's files that a server reads."""

    is_long: bool
    """True for the names of the whole vision-language model that has its base."""
    layout: str
    """Layout of experts' factors."""
    family: str | None
    """Model type of the base."""


def write_served(
    directory: Path, staged: Path, spec: AdapterSpec, tensors: Mapping[str, ModuleTensors], form: ServedForm
) -> None:
    """Writes the config and tensors of an adapter as a server reads them."""
    read = _read_files(directory)
    config, found = read.config, read.tensors
    if form.layout != "fused":
        experts, keys = files_for(spec, tensors, form.layout, form.family)
        kept = {name: x for name, x in found.items() if not is_expert_name(name.removeprefix(_PREFIX))}
        found = {**kept, **{f"{_PREFIX}{name}": tensor for name, tensor in experts.items()}}
        linears = config.get("target_modules") or []
        config = {**config, **keys, "target_modules": sorted({*linears, *keys["target_modules"]})}
    if form.is_long:
        paths = [long_name(path) for path in tensors if path not in PARTS]
        config, found = renamed_config(config, paths, is_long=True), renamed_tensors(found, is_long=True)
    write_unsynced(staged / CONFIG_FILE, json_text.dump(config))
    write_unsynced(staged / TENSORS_FILE, *file_pieces(found, {"format": "pt"}))


def read_adapter(directory: Path) -> tuple[AdapterSpec, dict[str, ModuleTensors], dict[str, Any]]:
    """The adapter's spec, its tensors by module path, and its config; an AdapterFileError names the problem."""
    read = _read_files(directory)
    where = str(directory / TENSORS_FILE)
    files = METHODS[method_named(read.config, str(directory / CONFIG_FILE))].files
    shared = _shared(read, files, where)
    heads = {name: read.tensors[name] for name in _head_names(files) if name in read.tensors}
    rows = rows_in_file([name for name in read.tensors if name.startswith(_PREFIX)])
    own = {name: tensor for name, tensor in read.tensors.items() if name not in {*heads, *shared, *rows}}
    names = {name: name.removeprefix(_PREFIX) for name in own if files.has_experts}
    experts = {short: own.pop(name) for name, short in names.items() if is_expert_name(short)}
    modules: dict[str, ModuleTensors] = {}
    if own or not experts:
        joined = files if isinstance(files, JoinedFormat) else None
        modules = _modules(own, files, where) if joined is None else joined.part(own, read.config, where)
    config = renamed_config(read.config, modules, is_long=False) if read.was_long else read.config
    config_file, has_experts = str(directory / CONFIG_FILE), bool(experts)
    spec = spec_of(config, modules, where=config_file, has_head=bool(heads), has_experts=has_experts)
    if experts:
        spec, factors = read_experts(experts, spec, config, where)
        modules |= factors
    for path, tensors in modules.items():
        if not is_expert_path(path) and not is_target(spec, method_of(spec).attachment, path):
            raise AdapterFileError(f"holds weights of {path}, which {CONFIG_FILE} does not target.", where=where)
        files.check_tensors(spec, path, tensors, where)
        if not all(tensor.isfinite().all() for tensor in tensors):
            raise AdapterFileError(f"{path} holds a NaN or an infinity.", where=where)
    if shared:
        files.check_shared(spec, {name.removeprefix(_SHARED_PREFIX): read.tensors[name] for name in shared}, where)
    if heads:
        modules[HEAD] = _head(list(heads.values()), where)
    check_rows(spec, {kind: read.tensors[name] for name, kind in rows.items()}, where)
    if spec.trainable_token_indices is not None:
        ids = {*(spec.own_rows.inputs or ()), *(spec.own_rows.outputs or ())}
        spec = dataclasses.replace(spec, new_tokens=read_new_tokens(directory, ids))
    modules |= {kind: (read.tensors[name],) for name, kind in rows.items()}
    return spec, modules, read.config


def read_head(directory: Path, config: Mapping[str, Any], tensors: Mapping[str, ModuleTensors]) -> HeadObjective | None:
    """The objective of an adapter's head, with its labels; None for an adapter without a head. An adapter of PEFT has
    only its task, so its labels are numbers."""
    if HEAD not in tensors:
        return None
    num_labels = tensors[HEAD][0].shape[0]
    if config.get("task_type") == "SEQ_CLS" and num_labels == 1:
        return Reward()
    kind = TokenClassification if config.get("task_type") == "TOKEN_CLS" else Classification
    labels = _stated_labels(directory / LABELS_FILE)
    return kind(labels if len(labels) == num_labels else tuple(str(number) for number in range(num_labels)))


def _stated_labels(path: Path) -> tuple[str, ...]:
    try:
        labels = json_text.parse(path.read_bytes()[:MAX_HEADER_BYTES])
        return tuple(str(name) for name in labels["id2label"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return ()


def _labels(head: HeadObjective) -> dict[str, Any]:
    names = dict(enumerate(head.labels))
    return {
        "objective": head.name,
        "id2label": {str(number): name for number, name in names.items()},
        "label2id": {name: number for number, name in names.items()},
        "num_labels": head.num_labels,
    }


def _head_names(files: PeftFormat) -> tuple[str, str]:
    """PEFT's names of the weight and the bias of a head; virtual tokens wrap the model once less."""
    prefix = "base_model." if isinstance(files, JoinedFormat) else _PREFIX
    return f"{prefix}{HEAD}.weight", f"{prefix}{HEAD}.bias"


def _head(tensors: Sequence[torch.Tensor], where: str) -> ModuleTensors:
    shapes = [tuple(tensor.shape) for tensor in tensors]
    if len(shapes[0]) != 2 or any(shape != shapes[0][:1] for shape in shapes[1:]):
        raise AdapterFileError(f"{HEAD} has tensors {shapes}; expected (labels, width) and (labels,).", where=where)
    if not all(tensor.isfinite().all() for tensor in tensors):
        raise AdapterFileError(f"{HEAD} holds a NaN or an infinity.", where=where)
    return tuple(tensors)


def read_chat_template(directory: Path) -> str | None:
    """The chat template an adapter was trained with, or None if it was the base model's."""
    path = directory / TEMPLATE_FILE
    if not path.exists():
        return None
    data = _read(directory, TEMPLATE_FILE)
    if len(data) > MAX_HEADER_BYTES:
        raise AdapterFileError(f"has {len(data)} bytes; at most {MAX_HEADER_BYTES} are read.", where=str(path))
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise AdapterFileError("is not UTF-8 text.", where=str(path)) from None


def adapter_files(
    spec: AdapterSpec,
    tensors: Mapping[str, ModuleTensors],
    *,
    base_model: str,
    target_names: list[str],
    shared: Mapping[str, torch.Tensor] | None = None,
    row_modules: Mapping[str, str] = MappingProxyType({}),
    in_turns: bool = False,
) -> AdapterFiles:
    files = method_of(spec).files
    heads = {name: x.detach().cpu() for name, x in zip(_head_names(files), tensors.get(HEAD, ()), strict=False)}
    names = names_in_file(spec, tensors, row_modules)
    heads |= {f"{_PREFIX}{name}": tensors[kind][0].detach().cpu() for kind, name in names.items()}
    tensors = {path: own for path, own in tensors.items() if path not in PARTS}
    config = config_of(spec, base_model=base_model, target_names=target_names, paths=tensors)
    if isinstance(files, JoinedFormat):
        joined = {name: tensor.detach().cpu() for name, tensor in files.join(tensors).items()}
        return AdapterFiles(config, joined | heads)
    named: dict[str, torch.Tensor] = {}
    written = dataclasses.replace(spec, target_modules=tuple(target_names))
    experts = {path: own for path, own in tensors.items() if is_expert_path(path)}
    if experts:
        factors, keys = fused_files(spec, experts, in_turns=in_turns)
        config.update(keys)
        named |= {f"{_PREFIX}{name}": tensor.detach().cpu() for name, tensor in factors.items()}
    for path, own in ((path, own) for path, own in tensors.items() if path not in experts):
        assert is_target(written, method_of(written).attachment, path), f"no reader would find {path} by {target_names}"
        for suffix, tensor in zip(files.suffixes.values(), own, strict=True):
            named[f"{_PREFIX}{path}.{suffix}"] = tensor.detach().cpu()
    for name in files.shared_names(config):
        assert shared is not None, f"the file of a {files.title} has {name}"
        named[f"{_SHARED_PREFIX}{name}"] = shared[name].detach().cpu()
    return AdapterFiles(config, named | heads)


def _model_card(spec: AdapterSpec, base_model: str, head: HeadObjective | None) -> str:
    files = method_of(spec).files
    task = "text-generation" if head is None else TASKS[head.task_type][0]
    if files.in_peft:
        library = "library_name: peft\n"
        made = ""
        if head is not None:
            # Others do not know our names of models.
            source = f"directory_of_{base_model}" if base_model in EMBEDDED else repr(base_model)
            loaded = f"{TASKS[head.task_type][1]}.from_pretrained({source}, num_labels={head.num_labels})"
            made = f"# base_model = {loaded}\n"
        made += "".join(f"{line}\n" for line in resizing("base_model", "adapter_directory")) if spec.new_tokens else ""
        use = (
            f"```python\nfrom peft import PeftModel\n\n{made}"
            "model = PeftModel.from_pretrained(base_model, adapter_directory)\n```\n"
        )
    else:
        verb = "chat" if head is None else "eval --data FILE"
        library, use = "", f"```bash\nweft {verb} --adapter ADAPTER_DIRECTORY\n```\n"
    return (
        f"---\n{library}pipeline_tag: {task}\ntags:\n- {spec.method}\n- weft\n---\n\n"
        f"# {files.title} adapter\n\n"
        f"Trained with Weft on `{base_model}`: {files.summary(spec)}.\n\n{use}"
    )


def _read_files(directory: Path) -> AdapterFiles:
    if directory.is_file():
        raise AdapterFileError("is a file; name the adapter's directory.", where=str(directory))
    if not directory.is_dir():
        raise AdapterFileError("there is no such adapter directory.", where=str(directory))
    where = str(directory / CONFIG_FILE)
    text = _read(directory, CONFIG_FILE)
    if len(text) > MAX_HEADER_BYTES:
        raise AdapterFileError(f"has {len(text)} bytes; at most {MAX_HEADER_BYTES} are read.", where=where)
    try:
        config = json_text.parse(text)
    except ValueError as error:
        raise AdapterFileError(f"is not valid JSON: {error}.", where=where) from None
    if not isinstance(config, dict):
        raise AdapterFileError("does not hold a JSON object.", where=where)
    if not (directory / TENSORS_FILE).exists() and (directory / PICKLE_FILE).exists():
        raise AdapterFileError("is a pickle file; save it as safetensors.", where=str(directory / PICKLE_FILE))
    tensors = _load_tensors(_read(directory, TENSORS_FILE), where=str(directory / TENSORS_FILE))
    short = renamed_tensors(tensors, is_long=False)
    return AdapterFiles(config, short, short.keys() != tensors.keys())


def _read(directory: Path, name: str) -> bytes:
    path = directory / name
    if not path.exists():
        raise AdapterFileError("is missing.", where=str(path))
    if not path.is_file():
        raise AdapterFileError("is not a file.", where=str(path))
    try:
        return path.read_bytes()
    except OSError as error:
        raise AdapterFileError(f"cannot be read ({error.strerror}).", where=str(path)) from None


def _load_tensors(data: bytes, where: str) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file; its header is checked here before anything is built from it."""
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > len(data) - 8:
        raise AdapterFileError("is not a whole safetensors file; it is cut short or something else.", where=where)
    if size > MAX_HEADER_BYTES:
        raise AdapterFileError(f"has a header of {size} bytes; at most {MAX_HEADER_BYTES} are read.", where=where)
    try:
        header = json_text.parse(data[8 : 8 + size])
    except ValueError as error:
        raise AdapterFileError(f"has a damaged header: {error}.", where=where) from None
    if not isinstance(header, dict):
        raise AdapterFileError("has a header that does not name tensors.", where=where)
    for name, entry in header.items():
        dtype = entry.get("dtype") if isinstance(entry, dict) else None
        accepted = _WHOLE_DTYPES if name.rpartition(".")[2] in WHOLE_NUMBERS else _DTYPES
        if name != "__metadata__" and dtype not in accepted:
            raise AdapterFileError(f"{name} has type {dtype}; accepted are {', '.join(accepted)}.", where=where)
    try:
        return dict(load(data))
    except SafetensorError as error:
        raise AdapterFileError(f"is not a sound safetensors file ({error}).", where=where) from None


def _shared(read: AdapterFiles, files: PeftFormat, where: str) -> set[str]:
    """The names of tensors of no module; none that the config refers to may be missing."""
    names = {f"{_SHARED_PREFIX}{name}" for name in files.shared_names(read.config)}
    for name in sorted(names - read.tensors.keys()):
        raise AdapterFileError(f"{name} is missing.", where=where)
    return names


def _modules(tensors: Mapping[str, torch.Tensor], files: PeftFormat, where: str) -> dict[str, ModuleTensors]:
    """The tensors by module path; every one must be of the method, and none of a module may be missing."""
    suffixes = "|".join(re.escape(suffix) for suffix in files.suffixes.values())
    pattern = re.compile(rf"{re.escape(_PREFIX)}(.+)\.({suffixes})", re.DOTALL)
    result: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        match = pattern.fullmatch(name)
        if match is None:
            raise AdapterFileError(f"holds {name!r}, {files.what_it_is(name)}.", where=where)
        result.setdefault(match[1], {})[match[2]] = tensor
    if not result:
        raise AdapterFileError(f"holds no {files.title} weights.", where=where)
    for path, own in result.items():
        for kind, suffix in files.suffixes.items():
            if suffix not in own:
                raise AdapterFileError(f"{kind} of {path} is missing.", where=where)
    return {path: tuple(own[suffix] for suffix in files.suffixes.values()) for path, own in sorted(result.items())}
