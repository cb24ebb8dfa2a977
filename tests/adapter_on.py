"""An adapter at sites that a test has made."""

from collections.abc import Mapping

import torch

from weft.adapters.adapter import Adapter
from weft.adapters.method import Site
from weft.methods.registry import method_of
from weft.spec import AdapterSpec


def adapter_on(sites: Mapping[str, Site], spec: AdapterSpec, seed: int = 0) -> Adapter:
    """A fresh adapter on these sites, on the CPU."""
    return Adapter(spec, method_of(spec), sites, seed, torch.device("cpu"))
