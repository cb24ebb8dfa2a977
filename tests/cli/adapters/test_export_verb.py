"""`weft export` and `weft merge`."""

import json
import os
import shlex
import stat
from pathlib import Path

import pytest
from tiny_adapters import LEAVES, SHOUTING, plain_logits, tiny_tensors

from weft.data.samples import Sample
from weft.engine.inference.attach import load_with_adapters
from weft.model.packed import SlotSample, pack_samples
from weft.model.source import TINY, load_tokenizer
from weft.spec import AdapterSpec
from weft.store.peft_files import read_adapter, write_adapter


def written(path: Path, **settings: object) -> Path:
    """An adapter directory with unusual settings."""
    spec = AdapterSpec(**{"r": 4, "target_modules": tuple(LEAVES), **settings})
    write_adapter(path, spec, tiny_tensors(0.1, rank=spec.r), base_model="tiny", target_names=LEAVES)
    return path


def test_export_when_the_server_takes_the_adapter_then_explains_how_to_serve_it(weft, adapters: Path):
    adapter = adapters / "strong" / "adapter"
    result = weft("export", adapters / "strong", "--for", "vllm")
    assert result.code == 0
    lines = result.out.splitlines()
    assert lines[0] == f"strong is ready for vllm: {adapter}"
    assert shlex.split(lines[2]) == [
        "vllm", "serve", str(TINY), "--enable-lora", "--max-lora-rank", "16", "--lora-modules", f"strong={adapter}"
    ]  # fmt: skip
    sent = shlex.split(lines[5])[-1]
    assert json.loads(sent) == {"lora_name": "strong", "lora_path": str(adapter)}
    assert f"--lora-paths strong={adapter}" in weft("export", adapter, "--for", "sglang").out
    assert f"PeftModel.from_pretrained(model, '{adapter}')" in weft("export", adapter, "--for", "peft").out


def test_export_when_a_copy_is_requested_then_it_is_whole_and_the_directions_name_it(
    weft, adapters: Path, tmp_path: Path
):
    out = tmp_path / "new" / "copy"
    result = weft("export", adapters / "strong", "--for", "peft", "--out", out)
    assert result.code == 0
    assert str(out) in result.out.splitlines()[-1]
    original = adapters / "strong" / "adapter"
    assert {p.name: p.read_bytes() for p in out.iterdir()} == {p.name: p.read_bytes() for p in original.iterdir()}
    assert [p.name for p in out.parent.iterdir()] == ["copy"]
    assert read_adapter(out)[0].r == 4


def test_export_when_the_rank_is_high_then_notes_the_flag_and_uses_it(weft, tmp_path: Path):
    result = weft("export", written(tmp_path / "wide", r=48), "--for", "vllm")
    assert "note: Start vLLM with --max-lora-rank 64; this adapter has rank 48." in result.out
    assert "--enable-lora --max-lora-rank 64 " in result.out


def test_export_when_the_server_refuses_then_gives_the_reason_and_copies_nothing(refused, tmp_path: Path):
    path = written(tmp_path / "patterned", alpha_pattern={"q_proj": 3.0}, use_rslora=True)
    sentence = refused("export", path, "--for", "sglang", "--out", tmp_path / "copy")
    assert sentence.startswith(f"{path}: SGLang takes one alpha per adapter; this one has an alpha_pattern. ")
    assert "SGLang ignores use_rslora" in sentence
    assert not (tmp_path / "copy").exists()


def test_export_when_the_input_is_wrong_then_reports_it(refused, adapters: Path, pickled: Path, tmp_path: Path):
    idle = adapters / "idle"
    assert refused("export", idle, "--for", "tgi") == "--for: got 'tgi'; accepted are vllm, sglang, peft, tinker."
    assert refused("export", idle, "--for", "peft", "--out", tmp_path).endswith("already exists; name a new directory.")
    assert "is a pickle file" in refused("export", pickled, "--for", "peft")
    assert "there is no such adapter directory" in refused("export", tmp_path / "gone", "--for", "peft")


def test_merge_when_done_then_transformers_computes_what_base_and_adapter_do(weft, adapters: Path, tmp_path: Path):
    out = tmp_path / "merged"
    result = weft("merge", adapters / "strong", "--out", out)
    assert (result.code, result.err) == (0, "")
    assert result.out.splitlines()[0] == f"merged 12 modules of strong into tiny: {out}"
    tokens = list(b"a planet in a garden")
    loaded = load_with_adapters([str(adapters / "strong")], base_model=None)
    sample = Sample(tokens, [False] * len(tokens))
    batch = pack_samples([SlotSample(sample, loaded.slots["strong"])], None, loaded.backbone.device)
    expected = loaded.backbone.logits(batch)
    merged = plain_logits(str(out), tokens)
    assert (merged - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert (merged - plain_logits("tiny", tokens)).abs().max() > 1


def test_merge_when_chatted_with_then_is_a_model_of_its_own(weft, adapters: Path, tmp_path: Path):
    out = tmp_path / "merged"
    weft("merge", adapters / "idle", "--out", out, "--dtype", "bfloat16")
    assert weft("chat", "--base-model", out, typed="planet\n").out == "planet\n"


def test_merge_when_the_input_is_wrong_then_reports_it_and_writes_nothing(
    refused, adapters: Path, other_base: Path, tmp_path: Path
):
    assert "already exists" in refused("merge", adapters / "idle", "--out", tmp_path)
    out = tmp_path / "merged"
    assert refused("merge", adapters / "idle", "--out", out, "--dtype", "int8").startswith("dtype: got 'int8'")
    assert "no such model directory" in refused("merge", adapters / "idle", "--out", out, "--base-model", "./gone")
    assert not out.exists()
    assert list(tmp_path.iterdir()) == []


def test_merge_when_the_modules_of_adapter_and_model_differ_then_names_them_and_writes_nothing(refused, tmp_path: Path):
    spec = AdapterSpec(r=4, target_modules=tuple(LEAVES))
    fewer, more = tiny_tensors(0.1), tiny_tensors(0.1)
    fewer.pop("model.layers.5.self_attn.q_proj")
    more["model.layers.6.self_attn.q_proj"] = more["model.layers.5.self_attn.q_proj"]
    other = dict(tiny_tensors(0.1))
    other["model.layers.0.self_attn.v_proj"] = other["model.layers.0.self_attn.q_proj"]
    out = tmp_path / "new" / "merged"
    for name, tensors, sentence in (
        (
            "fewer",
            fewer,
            "has no weights for model.layers.5.self_attn.q_proj of base_model tiny, which its config targets.",
        ),
        ("more", more, "model.layers.6.self_attn.q_proj is not a linear module of base_model tiny."),
        (
            "other",
            other,
            "model.layers.0.self_attn.v_proj is for a module of 192 x 192; in base_model tiny it is 64 x 192.",
        ),
    ):
        write_adapter(tmp_path / name, spec, tensors, base_model="tiny", target_names=LEAVES)
        assert refused("merge", tmp_path / name, "--out", out) == f"{tmp_path / name}: {sentence}"
    assert not out.parent.exists()


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640)])
def test_merge_when_done_then_others_may_read_the_files_as_far_as_the_umask_lets_them(
    weft, adapters: Path, tmp_path: Path, umask: int, mode: int
):
    before = os.umask(umask)
    try:
        weft("merge", adapters / "idle", "--out", tmp_path / "merged")
    finally:
        assert os.umask(before) == umask
    files = list((tmp_path / "merged").iterdir())
    assert "model.safetensors" in [file.name for file in files]
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {mode}


def test_merge_when_the_adapter_has_its_own_chat_template_then_the_model_has_it_too(
    weft, templated: Path, tmp_path: Path
):
    weft("merge", templated, "--out", tmp_path / "merged")
    assert load_tokenizer(str(tmp_path / "merged")).chat_template == SHOUTING


def test_export_when_the_adapter_has_its_own_chat_template_then_it_goes_along(weft, templated: Path, tmp_path: Path):
    out = tmp_path / "copy"
    for server in ("vllm", "sglang"):
        assert f"--chat-template {templated}/chat_template.jinja" in weft("export", templated, "--for", server).out
    weft("export", templated, "--for", "peft", "--out", out)
    assert (out / "chat_template.jinja").read_text() == SHOUTING


@pytest.mark.parametrize("verb", ["export", "merge"])
def test_verb_when_an_argument_is_missing_then_shows_its_usage(weft, verb: str):
    result = weft(verb)
    assert result.code == 2
    assert "Missing argument 'ADAPTER_DIR'" in result.err
