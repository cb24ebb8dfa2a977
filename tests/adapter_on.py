"""An adapter on places that a test has made."""

from collections.abc import Mapping

import torch

from weft.adapters.adapter import Adapter
from weft.adapters.method import Place
from weft.methods.registry import method_of
from weft.spec import AdapterSpec


def adapter_on(places: Mapping[str, Place], spec: AdapterSpec, seed: int = 0) -> Adapter:
    """A fresh adapter on these places, on the CPU."""
    return Adapter(spec, method_of(spec), places, seed, torch.device("cpu"))
