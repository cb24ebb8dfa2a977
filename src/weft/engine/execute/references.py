"""What the objectives of jobs compare with: the bare backbone, or a frozen adapter on a slot of its own.

A reference never changes, and what it says of a sample depends on nothing else. So each sample runs through its job's
reference once, forward only, in front of the first microbatch that has to know it. The numbers stay beside the backbone
until the job leaves it, and jobs that compare the same samples with the same reference share them. Only the last hidden
states of a teacher whose whole distribution is wanted are too many to keep: these are made for each microbatch. Rows of
a fixed tile do not depend on their neighbours: whether numbers are kept, shared or made again changes no bit.

Where the backbone is cut into stages, a pass goes through all of them in front of its microbatch
(`stages/hearing.py`); only the last stage hears what is said.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from weft.data.dataset import Dataset
from weft.data.global_batch import GlobalBatches
from weft.data.sample import Sample
from weft.engine.inference.attach import StoredAdapter, attach_adapter, own_part
from weft.kernels.device_event import sent
from weft.model.backbone import Backbone
from weft.model.distill import top_tokens
from weft.model.packed import PackedBatch, PlacedSample, pack_samples
from weft.model.path import Path
from weft.model.reference_rows import ReferenceRows
from weft.plan.types import Microbatch


class ReferenceCache:
    """What references say of samples, for as long as somebody keeps it."""

    def __init__(self, backbone: Backbone, *, kept_only: bool = False) -> None:
        """`kept_only`: other rows are computed again for each microbatch, even if another one still has them."""
        self.backbone = backbone
        self.kept_only = kept_only
        self._rows: weakref.WeakValueDictionary[bytes, ReferenceRows] = weakref.WeakValueDictionary()

    def rows(self, reference: str, sample: Sample) -> ReferenceRows:
        """What a reference says of a sample, known or not; the same for all who ask."""
        digest = hashlib.blake2b(reference.encode(), digest_size=16)
        digest.update(sample.tokens.data)
        digest.update(sample.supervised.data)
        key = digest.digest()
        found = self._rows.get(key)
        if found is None:
            found = self._rows[key] = ReferenceRows(sample)
        return found

    def forget(self) -> None:
        """Knows nothing any more."""
        self._rows.clear()


class WantedValues(NamedTuple):
    """What an objective wants to know of each supervised token."""

    is_whole: bool
    """The whole distribution: the last hidden state, which the output head makes one of."""
    top_k: int | None
    """So many of the most likely tokens; None and not whole: only the token that is there."""

    @classmethod
    def of(cls, data: Dataset) -> WantedValues:
        """What the objective of some data wants."""
        taught = data.distillation
        return cls(taught is not None and taught.top_k is None, None if taught is None else taught.top_k)

    def read(
        self, backbone: Backbone, path: Path, batch: PackedBatch, hidden_ND: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """What is to be known of a microbatch's supervised rows, which have these hidden states."""
        if self.is_whole:
            return (hidden_ND,)
        if self.top_k is not None:
            return top_tokens(backbone.head, hidden_ND, self.top_k)
        results_2N, _ = path.loss(batch)(hidden_ND, batch.targets_N)
        return (results_2N[0].neg(),)


class JobReference:
    """What one job compares with."""

    def __init__(self, known: ReferenceCache, data: Dataset, adapter: StoredAdapter | None = None) -> None:
        """`adapter`: the reference, which takes part once it has a slot; None: the bare backbone."""
        self._known = known
        self._adapter = adapter
        self.wanted = WantedValues.of(data)
        self.keeps = not (self.wanted.is_whole or data.has_teacher)
        """Whether what is known is kept: it is little, and not at hand anyway."""
        self._identity = f"{'' if adapter is None else adapter_digest(adapter)} {self.wanted}"
        self._kept: set[ReferenceRows] = set()
        self._slot: int | None = None
        self.has_place = False
        """Whether it takes part, on a slot or as the bare backbone."""

    def take_slot(self) -> None:
        """Puts the reference on the backbone, as far as it has modules there."""
        own = None if self._adapter is None else own_part(self._known.backbone, self._adapter)
        if own is not None:
            self._slot = attach_adapter(self._known.backbone, own)
        self.has_place = True

    def free_slot(self) -> None:
        """Takes the reference off the backbone, and forgets what it has said."""
        self.has_place = False
        if self._slot is not None:
            self._known.backbone.detach(self._slot)
            self._slot = None
        self.forget()

    def forget(self) -> set[ReferenceRows]:
        """Holds on to nothing that it has said; that is returned."""
        kept, self._kept = self._kept, set()
        return kept

    def rows(self, sample: Sample, slot: int | None, row_tile: int) -> ReferenceRows:
        """What it says of a sample that an adapter learns on a slot, known or not; what the data holds is known."""
        if sample.teacher is not None:
            return teacher_reference_rows(sample, self.wanted.top_k, self._known.backbone.device)
        if self._known.kept_only and not self.keeps:
            return ReferenceRows(sample)
        return self._known.rows(f"{self._identity} {self.path(slot).name} {row_tile} ", sample)

    def path(self, slot: int | None) -> Path:
        """The path it runs on: its own adapter's, or that of who compares itself with the bare backbone."""
        assert self._adapter is None or self.has_place, "a reference takes part while it has a slot"
        return self._known.backbone.path_of(slot if self._slot is None else self._slot)

    def placed(self, sample: Sample) -> PlacedSample:
        """A sample as the reference reads it."""
        leading = 0 if self._adapter is None else self._adapter.spec.num_leading_rows
        return PlacedSample(sample.led_by(leading), self._slot)

    def keep(self, rows: ReferenceRows) -> None:
        """Holds on to what it has said, if it is to be kept."""
        if self.keeps:
            self._kept.add(rows)


class Asked(NamedTuple):
    """Rows that somebody has to know."""

    reference: JobReference
    slot: int | None
    """Of who asks."""
    rows: ReferenceRows

    @property
    def num_tokens(self) -> int:
        """What has to run for it."""
        return self.reference.placed(self.rows.sample).sample.length if self.rows.is_missing else 0


def teacher_reference_rows(sample: Sample, top_k: int | None, device: torch.device) -> ReferenceRows:
    """What the data holds of a sample's teacher, or of that so many of the most likely tokens."""
    assert sample.teacher is not None
    said = [each[:, :top_k].copy() for each in sample.teacher]
    rows = ReferenceRows(sample, num_reference_values=said[0].shape[1])
    rows.learn(*(sent(torch.from_numpy(each), device) for each in said))
    return rows


class ReferenceRequest(NamedTuple):
    """A job that compares."""

    reference: JobReference
    slot: int | None
    batches: GlobalBatches
    looks_ahead: bool = True
    """Whether it will run the samples of its later microbatches here."""

    def asked(self, rows: ReferenceRows) -> Asked:
        """Rows that it has to know."""
        return Asked(self.reference, self.slot, rows)


def requested_rows(
    microbatch: Microbatch, batch: PackedBatch, row_tile: int, askers: Mapping[str, ReferenceRequest | None]
) -> list[Asked]:
    """What a microbatch has to know of references; where somebody has to speak anyway, also what its jobs will have to,
    as far as there is room for it in one pass as large as the microbatch. `askers`: its jobs."""
    asked: list[Asked] = []
    at_once: dict[str, int] = {}
    """Jobs of which something is missing now, and the steps that they are in."""
    later_on: dict[str, int] = {}
    """The same of all others."""
    for segment, rows in zip(microbatch.segments, batch.references, strict=True):
        asker = askers[segment.job]
        if rows is not None:
            assert asker is not None
            asked.append(asker.asked(rows))
            if asker.reference.keeps and asker.looks_ahead:
                (at_once if rows.is_missing else later_on).setdefault(segment.job, segment.step)
    if not at_once:
        return asked
    known = {each.rows for each in asked}
    room = batch.num_rows - sum(each.num_tokens for each in asked)
    for name, step in (at_once | later_on).items():
        asker = askers[name]
        assert asker is not None
        to_pass_over = batch.num_rows
        for sample in asker.batches.samples_from(step):
            rows = asker.reference.rows(sample, asker.slot, row_tile)
            if rows in known:
                continue
            later = asker.asked(rows)
            room -= later.num_tokens
            to_pass_over -= 0 if rows.is_missing else sample.length
            if room < 0:
                return asked
            if to_pass_over < 0:
                # What is missing of it will be asked for late enough.
                break
            known.add(rows)
            asked.append(later)
    return asked


class ReferencePass(NamedTuple):
    """Samples that run through their references together."""

    path: Path
    wanted: WantedValues
    asked: Sequence[Asked]

    def packed(self, row_tile: int, device: torch.device) -> PackedBatch:
        """One buffer with all of them."""
        return pack_samples([each.reference.placed(each.rows.sample) for each in self.asked], row_tile, device)

    def learn(self, backbone: Backbone, batch: PackedBatch, hidden_ND: torch.Tensor) -> None:
        """Makes known what is said of supervised rows that have these hidden states."""
        said = self.wanted.read(backbone, self.path, batch, hidden_ND)
        pieces = zip(*(values.split(list(batch.counts)) for values in said), strict=True)
        for each, own in zip(self.asked, pieces, strict=True):
            each.rows.learn(*own)


def reference_passes(asked: Sequence[Asked], limit: int) -> list[ReferencePass]:
    """What has to run to know all that is asked, in passes of at most `limit` tokens or one sample; it is kept."""
    kinds: dict[tuple[Path, WantedValues], dict[ReferenceRows, Asked]] = {}
    for each in asked:
        each.reference.keep(each.rows)
        if each.rows.is_missing:
            kind = (each.reference.path(each.slot), each.reference.wanted)
            kinds.setdefault(kind, {}).setdefault(each.rows, each)
    found: list[ReferencePass] = []
    for (path, wanted), missing in kinds.items():
        waiting = list(missing.values())
        while waiting:
            count, tokens = 1, waiting[0].num_tokens
            while count < len(waiting) and tokens + waiting[count].num_tokens <= limit:
                tokens += waiting[count].num_tokens
                count += 1
            found.append(ReferencePass(path, wanted, waiting[:count]))
            waiting = waiting[count:]
    return found


def hear_references(backbone: Backbone, asked: Sequence[Asked], row_tile: int, limit: int) -> int:
    """Makes all that is asked known, in passes of at most `limit` tokens or one sample; returns the rows that ran."""
    num_rows = 0
    for each in reference_passes(asked, limit):
        batch = each.packed(row_tile, backbone.device)
        each.learn(backbone, batch, each.path.read(batch, row_tile))
        num_rows += batch.num_rows
    return num_rows


def adapter_digest(adapter: StoredAdapter) -> str:
    """SHA-256 of what an adapter is; where it lies is no part of it."""
    digest = hashlib.sha256(repr(adapter.spec).encode())
    for path, tensors in sorted(adapter.tensors.items()):
        digest.update(path.encode())
        for tensor in tensors:
            digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
