"""References of jobs' objectives: the bare backbone, or a frozen adapter on a slot of its own.

A reference never changes, and its values for a sample depend on nothing else. So each sample runs through its job's
reference once, forward only, before the first microbatch that needs it. The values stay beside the backbone until the
job leaves it, and jobs that compare the same samples with the same reference share them. Only the last hidden states of
a teacher whose whole distribution is needed are too large to keep: they are computed for each microbatch. Rows of a
fixed tile do not depend on their neighbours: keeping, sharing or computing values again changes no bit.

Where the backbone is divided into stages, a pass goes through all of them before its microbatch
(`stages/stage_passes.py`); only the last stage gets the values.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from weft.data.dataset import Dataset, GlobalBatches
from weft.data.samples import Sample
from weft.engine.inference.attach import StoredAdapter, attach_adapter, own_part
from weft.kernels.device_event import sent
from weft.model.backbone import Backbone
from weft.model.loss import top_tokens
from weft.model.objective_loss import ReferenceRows
from weft.model.packed import PackedBatch, SlotSample, pack_samples
from weft.model.path import Path
from weft.plan.types import Microbatch


class ReferenceCache:
    def __init__(self, backbone: Backbone, *, kept_only: bool = False) -> None:
        """`kept_only`: values that no job keeps are computed again for each microbatch."""
        self.backbone = backbone
        self.kept_only = kept_only
        self._rows: weakref.WeakValueDictionary[bytes, ReferenceRows] = weakref.WeakValueDictionary()

    def rows(self, reference: str, sample: Sample) -> ReferenceRows:
        """Reference values of a sample, computed or not; one object per reference and sample."""
        digest = hashlib.blake2b(reference.encode(), digest_size=16)
        digest.update(sample.tokens.data)
        digest.update(sample.supervised.data)
        key = digest.digest()
        found = self._rows.get(key)
        if found is None:
            found = self._rows[key] = ReferenceRows(sample)
        return found

    def forget(self) -> None:
        self._rows.clear()


class WantedValues(NamedTuple):
    is_whole: bool
    """True: the whole distribution, as the last hidden state for the output head."""
    top_k: int | None
    """Number of the most likely tokens; None and not whole: only the token itself."""

    @classmethod
    def of(cls, data: Dataset) -> WantedValues:
        taught = data.distillation
        return cls(taught is not None and taught.top_k is None, None if taught is None else taught.top_k)

    def read(
        self, backbone: Backbone, path: Path, batch: PackedBatch, hidden_ND: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Values of a microbatch's supervised rows, which have these hidden states."""
        if self.is_whole:
            return (hidden_ND,)
        if self.top_k is not None:
            return top_tokens(backbone.head, hidden_ND, self.top_k)
        results_2N, _ = path.loss(batch)(hidden_ND, batch.targets_N)
        return (results_2N[0].neg(),)


class JobReference:
    def __init__(self, known: ReferenceCache, data: Dataset, adapter: StoredAdapter | None = None) -> None:
        """`adapter`: the reference, usable once it has a slot; None: the bare backbone."""
        self._known = known
        self._adapter = adapter
        self.wanted = WantedValues.of(data)
        self.keeps = not (self.wanted.is_whole or data.has_teacher)
        """True if values are kept, because they are small and cost a pass to compute."""
        self._identity = f"{'' if adapter is None else adapter_digest(adapter)} {self.wanted}"
        self._kept: set[ReferenceRows] = set()
        self._slot: int | None = None
        self.takes_part = False
        """True while the reference can run: on a slot, or as the bare backbone."""

    def take_slot(self) -> None:
        """Puts the reference on the backbone, where it has modules there."""
        own = None if self._adapter is None else own_part(self._known.backbone, self._adapter)
        if own is not None:
            self._slot = attach_adapter(self._known.backbone, own)
        self.takes_part = True

    def free_slot(self) -> None:
        self.takes_part = False
        if self._slot is not None:
            self._known.backbone.detach(self._slot)
            self._slot = None
        self.forget()

    def forget(self) -> set[ReferenceRows]:
        """Drops the kept values and returns them."""
        kept, self._kept = self._kept, set()
        return kept

    def rows(self, sample: Sample, slot: int | None, row_tile: int) -> ReferenceRows:
        if sample.teacher is not None:
            return teacher_reference_rows(sample, self.wanted.top_k, self._known.backbone.device)
        if self._known.kept_only and not self.keeps:
            return ReferenceRows(sample)
        return self._known.rows(f"{self._identity} {self.path(slot).name} {row_tile} ", sample)

    def path(self, slot: int | None) -> Path:
        """Path it runs on: its own adapter's, or for the bare backbone that of the job's slot."""
        assert self._adapter is None or self.takes_part, "a reference takes part while it has a slot"
        return self._known.backbone.path_of(slot if self._slot is None else self._slot)

    def as_read(self, sample: Sample) -> SlotSample:
        leading = 0 if self._adapter is None else self._adapter.spec.num_leading_rows
        return SlotSample(sample.led_by(leading), self._slot)

    def keep(self, rows: ReferenceRows) -> None:
        if self.keeps:
            self._kept.add(rows)


class RequestedRows(NamedTuple):
    reference: JobReference
    slot: int | None
    rows: ReferenceRows

    @property
    def num_tokens(self) -> int:
        """Tokens that have to run for them."""
        return self.reference.as_read(self.rows.sample).sample.length if self.rows.is_missing else 0


def teacher_reference_rows(sample: Sample, top_k: int | None, device: torch.device) -> ReferenceRows:
    """Values of a sample's teacher from the data; of its tokens the `top_k` most likely."""
    assert sample.teacher is not None
    values = [each[:, :top_k].copy() for each in sample.teacher]
    rows = ReferenceRows(sample, num_reference_values=values[0].shape[1])
    rows.learn(*(sent(torch.from_numpy(each), device) for each in values))
    return rows


class ReferenceRequest(NamedTuple):
    reference: JobReference
    slot: int | None
    batches: GlobalBatches
    looks_ahead: bool = True
    """True if the samples of its later microbatches run here too."""

    def rows_of(self, rows: ReferenceRows) -> RequestedRows:
        return RequestedRows(self.reference, self.slot, rows)


def requested_rows(
    microbatch: Microbatch, batch: PackedBatch, row_tile: int, requests: Mapping[str, ReferenceRequest | None]
) -> list[RequestedRows]:
    """Reference values that a microbatch needs. If any has to be computed, also those of its jobs' later samples, as
    far as they fit one pass as large as the microbatch. `requests`: of its jobs."""
    needed: list[RequestedRows] = []
    at_once: dict[str, int] = {}
    """Step of each job that misses values now."""
    later_on: dict[str, int] = {}
    for segment, rows in zip(microbatch.segments, batch.references, strict=True):
        request = requests[segment.job]
        if rows is not None:
            assert request is not None
            needed.append(request.rows_of(rows))
            if request.reference.keeps and request.looks_ahead:
                (at_once if rows.is_missing else later_on).setdefault(segment.job, segment.step)
    if not at_once:
        return needed
    known = {each.rows for each in needed}
    room = batch.num_rows - sum(each.num_tokens for each in needed)
    for name, step in (at_once | later_on).items():
        request = requests[name]
        assert request is not None
        to_pass_over = batch.num_rows
        for sample in request.batches.samples_from(step):
            rows = request.reference.rows(sample, request.slot, row_tile)
            if rows in known:
                continue
            later = request.rows_of(rows)
            room -= later.num_tokens
            to_pass_over -= 0 if rows.is_missing else sample.length
            if room < 0:
                return needed
            if to_pass_over < 0:
                # Its later samples can wait for a later microbatch.
                break
            known.add(rows)
            needed.append(later)
    return needed


class ReferencePass(NamedTuple):
    path: Path
    wanted: WantedValues
    rows: Sequence[RequestedRows]

    def packed(self, row_tile: int, device: torch.device) -> PackedBatch:
        return pack_samples([each.reference.as_read(each.rows.sample) for each in self.rows], row_tile, device)

    def learn(self, backbone: Backbone, batch: PackedBatch, hidden_ND: torch.Tensor) -> None:
        """Stores the values of supervised rows that have these hidden states."""
        values = self.wanted.read(backbone, self.path, batch, hidden_ND)
        pieces = zip(*(values.split(list(batch.counts)) for values in values), strict=True)
        for each, own in zip(self.rows, pieces, strict=True):
            each.rows.learn(*own)


def reference_passes(needed: Sequence[RequestedRows], limit: int) -> list[ReferencePass]:
    """Passes that compute the missing values, of at most `limit` tokens or one sample; the values are kept."""
    kinds: dict[tuple[Path, WantedValues], dict[ReferenceRows, RequestedRows]] = {}
    for each in needed:
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


def run_references(backbone: Backbone, needed: Sequence[RequestedRows], row_tile: int, limit: int) -> int:
    """Computes missing values in passes of at most `limit` tokens or one sample; returns the rows that ran."""
    num_rows = 0
    for each in reference_passes(needed, limit):
        batch = each.packed(row_tile, backbone.device)
        each.learn(backbone, batch, each.path.read(batch, row_tile))
        num_rows += batch.num_rows
    return num_rows


def adapter_digest(adapter: StoredAdapter) -> str:
    """SHA-256 of an adapter's settings and tensors, wherever it is stored."""
    digest = hashlib.sha256(repr(adapter.spec).encode())
    for path, tensors in sorted(adapter.tensors.items()):
        digest.update(path.encode())
        for tensor in tensors:
            digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
