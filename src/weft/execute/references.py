"""What the objectives of jobs compare with: the bare backbone, or a frozen adapter on a slot of its own.

A reference never changes, and what it says of a sample depends on nothing else. So each sample runs through its job's
reference once, forward only, in front of the first microbatch that has to know it. The numbers stay beside the backbone
until the job leaves it, and jobs that compare the same samples with the same reference share them. Only the last hidden
states of a teacher whose whole distribution is wanted are too many to keep: these are made for each microbatch. Rows of
a fixed tile do not depend on their neighbours: whether numbers are kept, shared or made again changes no bit.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch

from weft.backbone.backbone import Backbone
from weft.backbone.distill import top_tokens
from weft.backbone.packed import PackedBatch, Placed, pack_samples
from weft.backbone.path import Path
from weft.backbone.reference_rows import ReferenceRows
from weft.data.dataset import Dataset
from weft.data.sample import Sample
from weft.inference.attach import StoredAdapter, attach_adapter
from weft.kernels.device_event import sent


class KnownRows:
    """What references say of samples, for as long as somebody keeps it."""

    def __init__(self, backbone: Backbone) -> None:
        self.backbone = backbone
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


class Wanted(NamedTuple):
    """What an objective wants to know of each supervised token."""

    is_whole: bool
    """The whole distribution: the last hidden state, which the output head makes one of."""
    top_k: int | None
    """So many of the most likely tokens; None and not whole: only the token that is there."""

    @classmethod
    def of(cls, data: Dataset) -> Wanted:
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

    def __init__(self, known: KnownRows, data: Dataset, adapter: StoredAdapter | None = None) -> None:
        """`adapter`: the reference, which takes part once it has a slot; None: the bare backbone."""
        self._known = known
        self._adapter = adapter
        self.wanted = Wanted.of(data)
        self.keeps = not (self.wanted.is_whole or data.has_teacher)
        """Whether what is known is kept: it is little, and not at hand anyway."""
        self._identity = f"{'' if adapter is None else adapter_digest(adapter)} {self.wanted}"
        self._kept: set[ReferenceRows] = set()
        self._slot: int | None = None

    def take_slot(self) -> None:
        """Puts the reference on the backbone."""
        if self._adapter is not None:
            self._slot = attach_adapter(self._known.backbone, self._adapter)

    def free_slot(self) -> None:
        """Takes the reference off the backbone, and forgets what it has said."""
        self._kept.clear()
        if self._slot is not None:
            self._known.backbone.detach(self._slot)
            self._slot = None

    def rows(self, sample: Sample, slot: int | None, row_tile: int) -> ReferenceRows:
        """What it says of a sample that an adapter learns on a slot, known or not; what the data holds is known."""
        if sample.teacher is not None:
            return told_rows(sample, self.wanted.top_k, self._known.backbone.device)
        return self._known.rows(f"{self._identity} {self.path(slot).name} {row_tile} ", sample)

    def path(self, slot: int | None) -> Path:
        """The path it runs on: its own adapter's, or that of who compares itself with the bare backbone."""
        assert self._adapter is None or self._slot is not None, "a reference takes part while it has a slot"
        return self._known.backbone.path_of(slot if self._slot is None else self._slot)

    def placed(self, sample: Sample) -> Placed:
        """A sample as the reference reads it."""
        return Placed(sample.led_by(self._known.backbone.leading_rows(self._slot)), self._slot)

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
        return 0 if self.rows.is_known else self.reference.placed(self.rows.sample).sample.length


def told_rows(sample: Sample, top_k: int | None, device: torch.device) -> ReferenceRows:
    """What the data holds of a sample's teacher, or of that so many of the most likely tokens."""
    assert sample.teacher is not None
    rows = ReferenceRows(sample)
    rows.learn(*(sent(torch.from_numpy(each[:, :top_k].copy()), device) for each in sample.teacher))
    return rows


def hear_references(backbone: Backbone, asked: Sequence[Asked], row_tile: int, limit: int) -> int:
    """Makes all that is asked known, in passes of at most `limit` tokens or one sample; returns the rows that ran."""
    kinds: dict[tuple[Path, Wanted], dict[ReferenceRows, Asked]] = {}
    for each in asked:
        each.reference.keep(each.rows)
        if not each.rows.is_known:
            kind = (each.reference.path(each.slot), each.reference.wanted)
            kinds.setdefault(kind, {}).setdefault(each.rows, each)
    num_rows = 0
    for (path, wanted), unknown in kinds.items():
        waiting = list(unknown.values())
        while waiting:
            count, tokens = 1, waiting[0].num_tokens
            while count < len(waiting) and tokens + waiting[count].num_tokens <= limit:
                tokens += waiting[count].num_tokens
                count += 1
            num_rows += _hear(backbone, path, wanted, waiting[:count], row_tile)
            waiting = waiting[count:]
    return num_rows


def _hear(backbone: Backbone, path: Path, wanted: Wanted, asked: Sequence[Asked], row_tile: int) -> int:
    """Runs samples of one path through their references."""
    batch = pack_samples([each.reference.placed(each.rows.sample) for each in asked], row_tile, backbone.device)
    said = wanted.read(backbone, path, batch, path.read(batch, row_tile))
    pieces = zip(*(values.split(list(batch.counts)) for values in said), strict=True)
    for each, own in zip(asked, pieces, strict=True):
        each.rows.learn(*own)
    return batch.num_rows


def adapter_digest(adapter: StoredAdapter) -> str:
    """SHA-256 of what an adapter is; where it lies is no part of it."""
    digest = hashlib.sha256(repr(adapter.spec).encode())
    for path, tensors in sorted(adapter.tensors.items()):
        digest.update(path.encode())
        for tensor in tensors:
            digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
