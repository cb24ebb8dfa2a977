import json
import os
import random

import pytest
import torch
from safetensors.torch import load_file, save, save_file

from weft.errors import AdapterFileError, StorageError
from weft.methods.lora.method import DEFAULTS
from weft.spec import AdapterSpec
from weft.store import faults
from weft.store.atomic import remove_leftovers
from weft.store.faults import FaultPlan
from weft.store.peft_files import (
    CARD_FILE,
    CONFIG_FILE,
    MAX_HEADER_BYTES,
    TEMPLATE_FILE,
    TENSORS_FILE,
    read_adapter,
    read_chat_template,
    write_adapter,
)

SPEC = AdapterSpec(r=2, lora_alpha=4, target_modules=("q_proj", "v_proj"), rank_pattern={"v_proj": 3})
PATHS = [f"model.layers.{i}.self_attn.{n}" for i in range(2) for n in ("q_proj", "v_proj")]
Q = "base_model.model.model.layers.0.self_attn.q_proj"


def pairs(seed=0, spec=SPEC):
    generator = torch.Generator().manual_seed(seed)
    return {
        path: (
            torch.randn(spec.rank_for(path), 6, generator=generator),
            torch.randn(5, spec.rank_for(path), generator=generator),
        )
        for path in PATHS
    }


def write(directory, seed=0, spec=SPEC):
    names = ["v_proj", "q_proj"]
    write_adapter(directory, spec, pairs(seed, spec), base_model="tiny", target_names=names)


def change_config(directory, **changes):
    path = directory / CONFIG_FILE
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


def change_tensors(directory, change):
    tensors = load_file(directory / TENSORS_FILE)
    change(tensors)
    save_file(tensors, directory / TENSORS_FILE)


def test_write_adapter_when_it_returns_then_the_directory_is_a_peft_adapter(tmp_path):
    write(tmp_path / "a")
    assert sorted(os.listdir(tmp_path / "a")) == [CARD_FILE, CONFIG_FILE, TENSORS_FILE]
    config = json.loads((tmp_path / "a" / CONFIG_FILE).read_text())
    assert set(config) == set(DEFAULTS)
    assert (config["peft_type"], config["task_type"], config["inference_mode"]) == ("LORA", "CAUSAL_LM", True)
    assert config["target_modules"] == ["q_proj", "v_proj"]
    assert (config["r"], config["rank_pattern"], config["base_model_name_or_path"]) == (2, {"v_proj": 3}, "tiny")
    data = (tmp_path / "a" / TENSORS_FILE).read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert header["__metadata__"] == {"format": "pt"}
    assert header[f"{Q}.lora_A.weight"]["shape"] == [2, 6]
    assert header[f"{Q}.lora_B.weight"]["shape"] == [5, 2]
    assert len(header) == 1 + 2 * len(PATHS)


@pytest.mark.parametrize(("alpha", "text"), [(4.0, "4"), (None, "4"), (4.5, "4.5"), (0.0, "0")])
def test_write_adapter_when_alpha_is_whole_then_it_is_written_as_an_int(tmp_path, alpha, text):
    write(tmp_path / "a", spec=AdapterSpec(r=2, lora_alpha=alpha))
    assert f'"lora_alpha": {text},' in (tmp_path / "a" / CONFIG_FILE).read_text()


def test_write_adapter_when_patterns_overlap_then_their_order_is_kept(tmp_path):
    spec = AdapterSpec(r=2, rank_pattern={"v_proj": 4, "layers.0.self_attn.v_proj": 1, "q_proj": 3})
    write(tmp_path / "a", spec=spec)
    back, _, _ = read_adapter(tmp_path / "a")
    assert list(back.rank_pattern.items()) == list(spec.rank_pattern.items())


def test_write_adapter_when_repeated_then_the_bytes_are_the_same(tmp_path, files):
    write(tmp_path / "a")
    write(tmp_path / "b")
    assert files(tmp_path / "a") == files(tmp_path / "b")


def test_write_adapter_when_given_views_and_parameters_then_they_are_written_as_seen(tmp_path):
    spec = AdapterSpec(r=2, target_modules=("q_proj",))
    a, b = torch.nn.Parameter(torch.randn(6, 2)), torch.randn(2, 5)
    write_adapter(tmp_path / "a", spec, {"q_proj": (a.T, b.T)}, base_model="tiny", target_names=["q_proj"])
    _, back, _ = read_adapter(tmp_path / "a")
    assert back["q_proj"][0].equal(a.detach().T)
    assert back["q_proj"][1].equal(b.T)


def test_read_adapter_when_we_wrote_it_then_spec_and_weights_come_back(tmp_path):
    write(tmp_path / "a")
    spec, back, config = read_adapter(tmp_path / "a")
    assert spec == SPEC
    assert list(back) == sorted(PATHS)
    for path, (a, b) in pairs().items():
        assert back[path][0].equal(a)
        assert back[path][1].equal(b)
    assert config["lora_alpha"] == 4


def test_read_adapter_when_keys_are_missing_then_peft_s_defaults_count(tmp_path):
    write(tmp_path / "a", spec=AdapterSpec(r=8, target_modules=("q_proj", "v_proj")))
    (tmp_path / "a" / CONFIG_FILE).write_text('{"peft_type": "LORA", "target_modules": ["q_proj", "v_proj"]}')
    spec, _, _ = read_adapter(tmp_path / "a")
    assert (spec.r, spec.lora_alpha, spec.scale_for(PATHS[0])) == (8, 8.0, 1.0)


def test_read_adapter_when_settings_do_not_change_the_weights_then_they_are_accepted(tmp_path):
    write(tmp_path / "a")
    change_config(
        tmp_path / "a",
        peft_version="0.21.2",
        revision="main",
        fan_in_fan_out=True,
        inference_mode=False,
        auto_mapping={"base_model_class": "LlamaForCausalLM"},
        ensure_weight_tying=True,
        eva_config={"rho": 2.0},
        init_lora_weights="eva",
        loftq_config=None,
        rank_pattern={"v_proj": 3},
        alpha_pattern=None,
        some_future_setting=None,
        layers_to_transform=[],
    )
    spec, _, _ = read_adapter(tmp_path / "a")
    assert spec == SPEC


def test_read_adapter_when_the_config_has_a_layers_pattern_then_the_weights_show_what_it_meant(tmp_path):
    path = "model.groups.0.blocks.1.q_proj"
    spec = AdapterSpec(r=2, target_modules=("q_proj",))
    pair = (torch.ones(2, 6), torch.ones(5, 2))
    write_adapter(tmp_path / "a", spec, {path: pair}, base_model="tiny", target_names=["q_proj"])
    change_config(tmp_path / "a", layers_pattern="blocks", layers_to_transform=[1])
    back, _, _ = read_adapter(tmp_path / "a")
    assert (back.target_modules, back.layers_to_transform) == ((path,), None)


CONFIG_REFUSALS = {
    "no_type": ({"peft_type": ...}, "peft_type is nothing"),
    "unknown": ({"peft_type": "XLORA"}, "peft_type is 'XLORA'; only "),
    "ia3": ({"peft_type": "IA3"}, "is no ia3_l vector"),
    "task": ({"task_type": "SEQ_CLS"}, "task_type is 'SEQ_CLS'"),
    "dora": ({"use_dora": True}, "lora_magnitude_vector of "),
    "lora_bias": ({"lora_bias": True}, "LoRA with a bias"),
    "bias": ({"bias": "all"}, "trains biases of the shared backbone"),
    "modules_to_save": ({"modules_to_save": ["lm_head"]}, "rows of the output head are missing"),
    "tied_copies": ({"modules_to_save": ["wte"], "ensure_weight_tying": True}, "ties whole modules of an adapter"),
    "tokens": ({"trainable_token_indices": [1]}, "rows of the input embedding are missing"),
    "replication": ({"layer_replication": [[0, 2]]}, "changes the layers"),
    "parameters": ({"target_parameters": ["experts.w"]}, "bare parameters"),
    "alora": ({"alora_invocation_tokens": [1]}, "activated LoRA"),
    "qalora": ({"use_qalora": True}, "QALoRA"),
    "kasa": ({"kasa_config": {"beta": 1}}, "KaSA changes the weights"),
    "pissa": ({"init_lora_weights": "pissa"}, "changes the weights of the shared backbone"),
    "pissa_niter": ({"init_lora_weights": "pissa_niter_16"}, "path_initial_model_for_weight_conversion"),
    "olora": ({"init_lora_weights": "olora"}, "changes the weights"),
    "corda": ({"init_lora_weights": "corda"}, "changes the weights"),
    "loftq": ({"init_lora_weights": "loftq"}, "changes the weights"),
    "mica": ({"init_lora_weights": "mica"}, "'mica', which is not supported yet"),
    "unknown_setting": ({"use_magic": True}, "unknown setting use_magic = True"),
    "no_targets": ({"target_modules": None}, "target_modules is missing"),
    "bad_targets": ({"target_modules": [1, 2]}, "target_modules"),
    "bad_regex": ({"rank_pattern": {"(": 2}}, "rank_pattern: '(' is not a regular expression"),
    "text_rank": ({"r": "many"}, "r: expected a whole number"),
    "zero_rank": ({"r": 0}, "r: must be at least 1"),
    "huge_rank": ({"r": 10**400}, "too large"),
    "dropout": ({"lora_dropout": 1.5}, "lora_dropout: must be at least 0 and below 1"),
    "rank_differs": ({"r": 4}, "has rank 2, but adapter_config.json has 4"),
    "pattern_differs": ({"rank_pattern": {}}, "has rank 3, but adapter_config.json has 2"),
    "untargeted": ({"target_modules": ["q_proj"]}, "v_proj, which adapter_config.json does not target"),
    "untargeted_layer": ({"layers_to_transform": [0]}, "layers.1.self_attn.q_proj, which"),
}


@pytest.mark.parametrize("case", CONFIG_REFUSALS)
def test_read_adapter_when_the_config_requests_something_else_then_refused_with_what_is_wrong(tmp_path, case):
    changes, words = CONFIG_REFUSALS[case]
    write(tmp_path / "a")
    change_config(tmp_path / "a", **changes)
    with pytest.raises(AdapterFileError) as caught:
        read_adapter(tmp_path / "a")
    assert words in str(caught.value)
    assert str(tmp_path / "a" / "adapter_") in str(caught.value), "the sentence names the file"
    assert "\n" not in str(caught.value)


def _set(name, value):
    return lambda tensors: tensors.update({name: value})


def _spoil(tensors):
    tensors[f"{Q}.lora_B.weight"][1, 1] = float("nan")


TENSOR_REFUSALS = {
    "nothing": (lambda t: t.clear(), "no LoRA weights"),
    "a_missing": (lambda t: t.pop(f"{Q}.lora_A.weight"), "lora_A of model.layers.0.self_attn.q_proj is missing"),
    "b_missing": (lambda t: t.pop(f"{Q}.lora_B.weight"), "lora_B of model.layers.0.self_attn.q_proj is missing"),
    "ranks": (_set(f"{Q}.lora_A.weight", torch.ones(4, 6)), "their ranks differ"),
    "vector": (_set(f"{Q}.lora_A.weight", torch.ones(2)), "expected two matrices"),
    "empty": (_set(f"{Q}.lora_A.weight", torch.ones(2, 0)), "expected two matrices"),
    "nan": (_spoil, "a NaN or an infinity"),
    "inf": (_set(f"{Q}.lora_A.weight", torch.full((2, 6), torch.inf)), "a NaN or an infinity"),
    "ints": (_set(f"{Q}.lora_A.weight", torch.ones(2, 6).long()), "has type I64"),
    "fp8": (_set(f"{Q}.lora_A.weight", torch.ones(2, 6).to(torch.float8_e4m3fn)), "has type F8_E4M3"),
    "dora": (_set(f"{Q}.lora_magnitude_vector", torch.ones(5)), "DoRA"),
    "lora_bias": (_set(f"{Q}.lora_B.bias", torch.ones(5)), "a LoRA bias"),
    "embedding": (_set("base_model.model.model.embed_tokens.lora_embedding_A", torch.ones(2, 9)), "an embedding"),
    "full_module": (_set("base_model.model.model.norm.weight", torch.ones(9)), "neither a lora_A nor a lora_B"),
    "full_head": (_set("base_model.model.lm_head.weight", torch.ones(2, 9)), "rows of the output head, which the conf"),
    "no_prefix": (_set("model.q_proj.lora_A.weight", torch.ones(2, 9)), "neither a lora_A nor a lora_B"),
    "adapter_name": (_set(f"{Q}.lora_A.default.weight", torch.ones(2, 9)), "neither a lora_A nor a lora_B"),
}


@pytest.mark.parametrize("case", TENSOR_REFUSALS)
def test_read_adapter_when_the_tensors_do_not_fit_then_refused_with_what_is_wrong(tmp_path, case):
    change, words = TENSOR_REFUSALS[case]
    write(tmp_path / "a")
    change_tensors(tmp_path / "a", change)
    with pytest.raises(AdapterFileError) as caught:
        read_adapter(tmp_path / "a")
    assert words in str(caught.value)
    assert str(tmp_path / "a" / TENSORS_FILE) in str(caught.value)


def _long_header(directory):
    name = "base_model.model." + "x" * MAX_HEADER_BYTES + ".lora_A.weight"
    (directory / TENSORS_FILE).write_bytes(save({name: torch.ones(2, 6)}))


FILE_REFUSALS = {
    "no_directory": (lambda d: d.rename(d.with_name("b")), "there is no such adapter directory"),
    "no_config": (lambda d: (d / CONFIG_FILE).unlink(), "adapter_config.json: is missing"),
    "no_tensors": (lambda d: (d / TENSORS_FILE).unlink(), "adapter_model.safetensors: is missing"),
    "pickle_only": (
        lambda d: (d / TENSORS_FILE).rename(d / "adapter_model.bin"),
        "adapter_model.bin: is a pickle file; save it as safetensors",
    ),
    "config_is_directory": (lambda d: ((d / CONFIG_FILE).unlink(), (d / CONFIG_FILE).mkdir()), "is not a file"),
    "config_not_json": (lambda d: (d / CONFIG_FILE).write_text("r: 8"), "is not valid JSON"),
    "config_nan": (lambda d: (d / CONFIG_FILE).write_text('{"r": NaN}'), "NaN"),
    "config_list": (lambda d: (d / CONFIG_FILE).write_text("[]"), "does not hold a JSON object"),
    "config_deep": (lambda d: (d / CONFIG_FILE).write_text("[" * 100_000), "nested too deeply"),
    "config_long": (lambda d: (d / CONFIG_FILE).write_text(" " * (MAX_HEADER_BYTES + 1)), "at most 1048576"),
    "tensors_empty": (lambda d: (d / TENSORS_FILE).write_bytes(b""), "cut short"),
    "tensors_pickle": (lambda d: (d / TENSORS_FILE).write_bytes(b"\x80\x02}q\x00." * 9), "cut short or something else"),
    "tensors_cut": (lambda d: os.truncate(d / TENSORS_FILE, 2000), "not a sound safetensors file"),
    "tensors_cut_header": (lambda d: os.truncate(d / TENSORS_FILE, 200), "cut short"),
    "tensors_long_header": (_long_header, "at most 1048576 are read"),
    "header_list": (lambda d: (d / TENSORS_FILE).write_bytes(b"\x02" + bytes(7) + b"[]"), "does not name tensors"),
    "header_twice": (
        lambda d: (d / TENSORS_FILE).write_bytes(b"\x0d" + bytes(7) + b'{"a":1,"a":2}'),
        "'a' is repeated",
    ),
}


@pytest.mark.parametrize("case", FILE_REFUSALS)
def test_read_adapter_when_a_file_is_missing_or_broken_then_one_sentence_names_it(tmp_path, case):
    break_it, words = FILE_REFUSALS[case]
    write(tmp_path / "a")
    break_it(tmp_path / "a")
    with pytest.raises(AdapterFileError) as caught:
        read_adapter(tmp_path / "a")
    assert words in str(caught.value)
    assert str(tmp_path / "a") in str(caught.value)


def mutated(data: bytes, rng: random.Random) -> bytes:
    """The file with a few bytes of its length, header or data changed, cut, doubled or replaced by JSON words."""
    size = int.from_bytes(data[:8], "little")
    result = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(min(8 + size, len(result)) or 1)
        kind = rng.randrange(5)
        if kind == 0:
            result[at] = rng.randrange(256)
        elif kind == 1:
            del result[at : at + rng.randint(1, 9)]
        elif kind == 2:
            result[at:at] = result[at : at + rng.randint(1, 30)]
        elif kind == 3:
            word = rng.choice([b"-1", b"1e99", b"null", b"{}", b"[]", b'"F64"', b'"I8"', b"18446744073709551616", b'"'])
            result[at : at + len(word)] = word
        else:
            del result[rng.randrange(len(result)) :]
    if rng.random() < 0.5 and len(result) > 8:
        result[:8] = min(size, len(result) - 8).to_bytes(8, "little")
    return bytes(result)


def test_read_adapter_when_the_file_is_mutated_then_it_is_read_or_refused_and_nothing_else(tmp_path):
    write(tmp_path / "a")
    whole = (tmp_path / "a" / TENSORS_FILE).read_bytes()
    rng = random.Random(0)
    refused = 0
    for _ in range(400):
        (tmp_path / "a" / TENSORS_FILE).write_bytes(mutated(whole, rng))
        try:
            _, back, _ = read_adapter(tmp_path / "a")
        except AdapterFileError:
            refused += 1
        else:
            assert all(t.isfinite().all() for pair in back.values() for t in pair)
    assert refused > 300


def test_read_adapter_when_the_config_is_mutated_then_it_is_read_or_refused_and_nothing_else(tmp_path):
    write(tmp_path / "a")
    whole = (tmp_path / "a" / CONFIG_FILE).read_bytes()
    rng = random.Random(1)
    words = [b"null", b"true", b"[]", b"{}", b"-1", b"1e400", b'"x"', b"[[1]]", b'{"a": {}}', b"0.5", b"1" * 400]
    refused = 0
    for _ in range(300):
        lines = whole.splitlines()
        at = rng.randrange(1, len(lines) - 1)
        key = lines[at].split(b":")[0]
        lines[at] = key + b": " + rng.choice(words) + b","
        (tmp_path / "a" / CONFIG_FILE).write_bytes(b"\n".join(lines))
        try:
            read_adapter(tmp_path / "a")
        except AdapterFileError:
            refused += 1
    assert 50 < refused < 300


@pytest.mark.faults
def test_write_adapter_when_killed_anywhere_then_a_restart_finds_the_old_or_the_new_adapter(tmp_path, in_child):
    directory = tmp_path / "a"
    seen = []
    for n in range(1, 100):
        write(directory, seed=1)

        def work(n=n):
            faults.arm(FaultPlan("kill", n))
            write(directory, seed=2)

        if not os.WIFSIGNALED(in_child(work)):
            break
        remove_leftovers(tmp_path)
        assert os.listdir(tmp_path) == ["a"]
        _, back, _ = read_adapter(directory)
        seen.append(next(s for s in (1, 2) if back[PATHS[0]][0].equal(pairs(s)[PATHS[0]][0])))
        assert all(back[p][i].equal(pairs(seen[-1])[p][i]) for p in PATHS for i in (0, 1))
    assert seen == sorted(seen)
    assert set(seen) == {1, 2}
    assert len(seen) > 20


@pytest.mark.faults
def test_write_adapter_when_the_disk_is_full_then_the_old_adapter_stays(tmp_path, files):
    write(tmp_path / "a", seed=1)
    before = files(tmp_path)
    faults.arm(FaultPlan("enospc", 5, "file.write"))
    with pytest.raises(StorageError, match="the disk is full"):
        write(tmp_path / "a", seed=2)
    assert files(tmp_path) == before


def test_chat_template_when_written_then_it_is_read_back_and_gone_with_the_next_adapter(tmp_path):
    spec = AdapterSpec(r=2, target_modules=("q_proj",))
    pair = {"q_proj": (torch.ones(2, 3), torch.ones(3, 2))}
    for template in ("{{ messages[0].content }} – ü\n", None):
        write_adapter(tmp_path / "a", spec, pair, base_model="tiny", target_names=["q_proj"], chat_template=template)
        assert read_chat_template(tmp_path / "a") == template
        assert (tmp_path / "a" / TEMPLATE_FILE).exists() == (template is not None)


def test_chat_template_when_it_is_none_then_reports_it(tmp_path):
    for data, sentence in ((b"x" * (MAX_HEADER_BYTES + 1), "at most 1048576 are read"), (b"\xff", "is not UTF-8 text")):
        (tmp_path / TEMPLATE_FILE).write_bytes(data)
        with pytest.raises(AdapterFileError, match=sentence):
            read_chat_template(tmp_path)
