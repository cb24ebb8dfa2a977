"""Every process of a layout has a GPU, or the layout is refused in a sentence."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from weft.errors import ConfigError
from weft.model.resolve import resolve
from weft.parallel.stages.transport import choose_backend, find_gpus
from weft.processes import VISIBLE
from weft.spec import BackboneSpec


@pytest.fixture
def _two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.model.resolve.has_gpu", lambda: True)
    monkeypatch.setenv(VISIBLE, "4,6")


@pytest.mark.usefixtures("_two_gpus")
@pytest.mark.parametrize(
    ("number", "chosen", "found"),
    [(2, None, ("4", "6")), (1, None, ("4",)), (2, "1,0", ("6", "4")), (3, "0,0,1", ("4", "4", "6"))],
)
def test_gpus_when_there_are_enough_then_each_process_has_one(number, chosen, found):
    """Or those that were chosen, one of them for several if that was requested."""
    assert find_gpus(resolve(BackboneSpec("tiny")), number, chosen) == found


@pytest.mark.usefixtures("_two_gpus")
@pytest.mark.parametrize(
    ("number", "chosen", "message"),
    [
        (3, None, "--layout: takes 3 GPUs, and there are 2 GPUs; use a layout of at most 2, or to try it out put"),
        (2, "0", "--devices: got 0, which names 1; the layout has 2 devices, so name one for each"),
        (2, "0,5", "--devices: got '5'; accepted are numbers from 0 to 1"),
    ],
)
def test_gpus_when_there_are_too_few_then_refused_with_what_would_fit(number, chosen, message):
    with pytest.raises(ConfigError) as found:
        find_gpus(resolve(BackboneSpec("tiny")), number, chosen)
    assert str(found.value).startswith(message)


def test_gpus_when_the_run_is_on_a_cpu_then_there_are_none_and_none_is_chosen():
    assert find_gpus(resolve(BackboneSpec("tiny", device="cpu")), 8, None) == ()
    with pytest.raises(ConfigError, match="--devices: are for GPUs, and this run is on a CPU"):
        find_gpus(resolve(BackboneSpec("tiny", device="cpu")), 2, "0,0")


@pytest.mark.parametrize("has_nccl", [True, False])
def test_backend_when_every_process_has_its_own_gpu_then_is_nccl_if_there_is_one(has_nccl, monkeypatch):
    monkeypatch.setattr(dist, "is_nccl_available", lambda: has_nccl)
    assert choose_backend(("4", "6")) == ("nccl" if has_nccl else "gloo")
    assert choose_backend(("4", "4")) == choose_backend(()) == "gloo"
