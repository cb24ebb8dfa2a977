"""VeRA's shared matrices are PEFT's, made once, and its files go both ways with and without them."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from adapter_on import adapter_on
from tiny_models import random_backbone, random_data, random_model
from whole_linear import WholeLinear

from weft.adapters.adapter import Adapter
from weft.engine.inference.attach import attach_adapter, read_named
from weft.errors import AdapterFileError
from weft.methods.vera import weights as vera_weights
from weft.model.packed import SlotSample, pack_samples
from weft.spec import AdapterSpec
from weft.store.peft_files import CONFIG_FILE, read_adapter, write_adapter

PATHS = {"model.layers.0.self_attn.q_proj": (10, 12), "model.layers.0.mlp.down_proj": (8, 20)}
CPU = torch.device("cpu")


def adapter(**settings: Any) -> Adapter:
    sites = {path: WholeLinear(num_in, num_out, device="meta") for path, (num_out, num_in) in PATHS.items()}
    return adapter_on(sites, AdapterSpec(method="vera", **{"vera_rank": 4, **settings}))


def test_projection_when_adapters_have_one_key_then_is_in_memory_once():
    first, second, other = adapter(), adapter(d_initial=0.5), adapter(projection_prng_key=1)
    assert first.shared["vera_A"].shape == (4, 20) and first.shared["vera_B"].shape == (10, 4)
    assert first.shared["vera_A"].data_ptr() == second.shared["vera_A"].data_ptr()
    assert not first.shared["vera_A"].equal(other.shared["vera_A"])
    weights = first.modules["model.layers.0.self_attn.q_proj"]
    assert weights.a_RD.data_ptr() == first.shared["vera_A"].data_ptr() and weights.a_RD.shape == (4, 12)
    assert first.num_parameters == 2 * 4 + 10 + 8
    del first, second, other, weights
    gc.collect()
    assert not vera_weights._MADE, "unused matrices are still cached"


@pytest.mark.parametrize("save_projection", [True, False])
@pytest.mark.filterwarnings("ignore:Specified to not")
def test_files_when_peft_wrote_or_reads_them_then_both_compute_the_same(tmp_path, save_projection):
    plain, backbone = random_model("llama_bias"), random_backbone("llama_bias")
    plain.set_attn_implementation("eager")
    config = peft.VeraConfig(
        r=6, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM", init_weights=False,
        projection_prng_key=5, save_projection=save_projection,
    )  # fmt: skip
    theirs = peft.get_peft_model(plain, config).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    stored = read_named(str(tmp_path / "theirs"))
    assert (stored.spec.method, stored.spec.vera_rank, stored.spec.projection_prng_key) == ("vera", 6, 5)
    sample = random_data(1, num_samples=1, lengths=(12, 13)).train.samples[0]
    slot = attach_adapter(backbone, stored)
    mine = backbone.logits(pack_samples([SlotSample(sample, slot)], None, CPU))
    tokens = torch.from_numpy(sample.tokens.astype("int64"))[None]
    with torch.no_grad():
        torch.testing.assert_close(mine, theirs(tokens).logits[0], rtol=1e-4, atol=1e-5)
    again = backbone.stored_adapter(stored.spec, stored.tensors)
    write_adapter(
        tmp_path / "mine", stored.spec, stored.tensors, base_model="tiny", target_names=["q_proj", "down_proj"],
        shared=again.shared,
    )  # fmt: skip
    assert names_in(tmp_path / "mine") == names_in(tmp_path / "theirs")
    back = peft.PeftModel.from_pretrained(theirs.unload(), tmp_path / "mine").eval()
    with torch.no_grad():
        torch.testing.assert_close(mine, back(tokens).logits[0], rtol=1e-4, atol=1e-5)


def names_in(directory: Path) -> set[str]:
    with (directory / "adapter_model.safetensors").open("rb") as file:
        return set(json.loads(file.read(int.from_bytes(file.read(8), "little")))) - {"__metadata__"}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"projection_prng_key": 3}, "are not those that projection_prng_key 3 draws"),
        ({"save_projection": False}, "base_model.vera_.', though save_projection of its config is off"),
        ({"r": 5}, r"has vera_lambda_d \(4,\) and vera_lambda_b \(\d+,\); expected \(5,\) and one number for each"),
        ({"bias": "all"}, "trains biases of the shared backbone"),
    ],
)
def test_read_when_the_files_mean_something_else_then_refused_with_what_is_wrong(tmp_path, changes, sentence):
    made = adapter()
    names = ["q_proj", "down_proj"]
    write_adapter(tmp_path / "a", made.spec, made.tensors(), base_model="tiny", target_names=names, shared=made.shared)
    path = tmp_path / "a" / CONFIG_FILE
    assert json.loads(path.read_text()).keys() == peft.VeraConfig().to_dict().keys() - {"peft_version"}
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(AdapterFileError, match=sentence):
        read_adapter(tmp_path / "a")


def test_read_when_the_shared_matrices_are_missing_then_reports_it(tmp_path):
    made = adapter(save_projection=False)
    write_adapter(tmp_path / "a", made.spec, made.tensors(), base_model="tiny", target_names=["q_proj", "down_proj"])
    path = tmp_path / "a" / CONFIG_FILE
    path.write_text(path.read_text().replace('"save_projection": false', '"save_projection": true'))
    with pytest.raises(AdapterFileError, match=r"base_model\.vera_A is missing"):
        read_adapter(tmp_path / "a")
