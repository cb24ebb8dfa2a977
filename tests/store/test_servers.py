import math

import pytest

from weft.errors import ConfigError
from weft.spec import AdapterSpec
from weft.store.peft_config import ServingRemark, check_servable

PATHS = ["model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj", "lm_head"]


@pytest.mark.parametrize("server", ["vllm", "sglang", "peft"])
def test_check_servable_when_the_adapter_is_plain_then_there_is_nothing_to_report(server):
    assert check_servable(AdapterSpec(r=16), PATHS, server) == []


@pytest.mark.parametrize(("rank", "flag"), [(17, 32), (32, 32), (65, 128), (300, 320), (512, 512)])
def test_check_servable_when_vllm_needs_a_flag_then_the_note_states_it(rank, flag):
    remarks = check_servable(AdapterSpec(r=rank), PATHS, "vllm")
    assert remarks == [ServingRemark(f"Start vLLM with --max-lora-rank {flag}; this adapter has rank {rank}.", False)]


def test_check_servable_when_a_pattern_raises_the_rank_then_vllm_s_flag_covers_it():
    (remark,) = check_servable(AdapterSpec(r=8, rank_pattern={"not_here": 40}), PATHS, "vllm")
    assert "--max-lora-rank 64" in str(remark)
    assert not remark.refused


def test_check_servable_when_the_rank_is_above_vllm_s_limit_then_it_is_refused():
    (remark,) = check_servable(AdapterSpec(r=513), PATHS, "vllm")
    assert remark.refused
    assert "513" in remark.text


@pytest.mark.parametrize("server", ["vllm", "sglang"])
def test_check_servable_when_a_module_is_unknown_then_it_is_refused_by_name(server):
    (remark,) = check_servable(AdapterSpec(), [*PATHS, "h.0.attn.c_attn", "h.1.attn.c_attn", "router"], server)
    assert remark.refused
    assert remark.text.endswith("takes no adapters on c_attn, router.")


def test_check_servable_when_mixers_are_adapted_then_vllm_takes_them_and_sglang_does_not():
    paths = [*PATHS, "model.layers.0.linear_attn.in_proj_qkv", "model.layers.0.linear_attn.out_proj"]
    assert check_servable(AdapterSpec(), paths, "vllm") == []
    (remark,) = check_servable(AdapterSpec(), paths, "sglang")
    assert remark.refused and remark.text.endswith("takes no adapters on in_proj_qkv, out_proj.")


def test_check_servable_when_sglang_would_scale_wrongly_then_it_is_refused_with_the_remedy():
    spec = AdapterSpec(r=8, lora_alpha=4, use_rslora=True)
    (remark,) = check_servable(spec, PATHS, "sglang")
    assert remark.refused
    alpha = float(remark.text.split("lora_alpha to ")[1].split(" ")[0])
    plain = AdapterSpec(r=8, lora_alpha=alpha)
    assert math.isclose(plain.scale_for(PATHS[0]), spec.scale_for(PATHS[0]), rel_tol=1e-12)
    assert check_servable(spec, PATHS, "vllm") == []


def test_check_servable_when_sglang_meets_patterns_then_only_those_that_differ_are_refused():
    same = AdapterSpec(r=8, lora_alpha=4, rank_pattern={"q_proj": 8}, alpha_pattern={"q_proj": 4.0})
    assert check_servable(same, PATHS, "sglang") == []
    other = AdapterSpec(r=8, lora_alpha=4, rank_pattern={"q_proj": 4}, alpha_pattern={"q_proj": 2.0})
    assert [r.refused for r in check_servable(other, PATHS, "sglang")] == [True, True]


def test_check_servable_when_the_server_is_unknown_then_the_known_ones_are_named():
    with pytest.raises(ConfigError, match="vllm, sglang, peft"):
        check_servable(AdapterSpec(), PATHS, "triton")


def test_check_servable_when_the_method_is_bitfit_then_reports_what_a_merge_needs():
    (remark,) = check_servable(AdapterSpec(method="bitfit"), PATHS, "vllm")
    assert str(remark).endswith("merge this BitFit into its base, if that has biases.")


def test_check_servable_when_it_has_rows_of_tokens_then_servers_take_it_only_merged():
    (remark,) = check_servable(AdapterSpec(trainable_token_indices=[3]), PATHS, "sglang")
    assert remark.refused and str(remark).endswith("this LoRA has rows of tokens; merge it into its base.")


@pytest.mark.parametrize(("server", "title"), [("vllm", "vLLM"), ("sglang", "SGLang")])
def test_check_servable_when_the_method_is_ia3_then_servers_refuse_and_peft_takes_it(server, title):
    (remark,) = check_servable(AdapterSpec(method="ia3"), PATHS, server)
    assert remark == ServingRemark(f"{title} takes LoRA adapters only; merge this IA³ into its base.", True)
    assert check_servable(AdapterSpec(method="ia3"), PATHS, "peft") == []
