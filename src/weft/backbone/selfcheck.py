"""Checks a model family nobody has tested: packed samples must give what the model's own attention gives them alone."""

from __future__ import annotations

import numpy as np
import torch

from weft.backbone.attention import NAME
from weft.backbone.backbone import Backbone
from weft.backbone.packed import Placed, pack_samples
from weft.data.sample import Sample
from weft.errors import ModelError

LENGTHS = (5, 9)


def packing_error(backbone: Backbone) -> float:
    """Largest difference of packed logits from the model's own, relative to the largest logit."""
    rng = np.random.default_rng(0)
    vocabulary = backbone.model.config.get_text_config().vocab_size
    samples = [_random_sample(rng, n, vocabulary) for n in LENGTHS]
    packed = backbone.logits(pack_samples([Placed(s) for s in samples], None, backbone.device))
    backbone.routing.segments = ()
    backbone.model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            alone = [
                backbone.model(input_ids=torch.from_numpy(s.tokens.astype(np.int64))[None].to(backbone.device)).logits[
                    0
                ]
                for s in samples
            ]
    finally:
        backbone.model.set_attn_implementation(NAME)
    expected = torch.cat(alone).float()
    return float((packed - expected).abs().max() / expected.abs().max())


def check_packing(backbone: Backbone) -> None:
    """Refuses a backbone whose packed results differ from its own."""
    bound = 1e-4 if backbone.dtype == torch.float32 else 5e-2
    error = packing_error(backbone)
    if not error <= bound:
        raise ModelError(
            f"{backbone.model.config.model_type} gives other results when samples are packed (relative error "
            f"{error:.1e}), so it cannot be trained exactly.",
            where=f"base_model {backbone.name}",
        )


def _random_sample(rng: np.random.Generator, length: int, vocabulary: int) -> Sample:
    return Sample(rng.integers(0, vocabulary, length, dtype=np.int32), np.ones(length, dtype=bool))
