"""What models take and how fast GPUs are, against engine logs and the shapes themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvantile_optimizer import geometry, hardware
from kvantile_optimizer.errors import InputError
from kvantile_optimizer.spec import Geometry, Model

LLAMA_8B: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def shape(name: str) -> Geometry:
    return geometry.of_model(Model(name=name, max_model_len=8192))


def test_kv_capacity_is_what_an_engine_log_says() -> None:
    # "GPU KV cache size: 41,408 tokens": vLLM 0.19, Llama-3.1-8B, RTX 4090, 256 sequences, 2,048 batched tokens.
    tokens = hardware.kv_tokens(shape("Llama-3.1-8B"), hardware.gpu_table()["RTX4090"], 1, 1, 2048, 256)
    assert tokens == pytest.approx(41_408, rel=0.05)


def test_step_time_prior_is_near_a_recorded_run() -> None:
    # RTX PRO 6000, Llama-3.1-8B: 11.25 ms, 0.0735 ms a sequence, 0.0412 ms a prefill token.
    step = hardware.step_time(shape("Llama-3.1-8B"), hardware.gpu_table()["RTXPRO6000"], 1, 1)
    assert step.alpha == pytest.approx(11.25e-3, rel=0.15)
    assert step.beta == pytest.approx(0.0735e-3, rel=0.5)
    assert step.delta == pytest.approx(0.0412e-3, rel=0.5)


def test_heads_are_replicated_once_there_are_more_gpus_than_kv_heads() -> None:
    qwen = shape("Qwen2.5-7B")
    assert hardware.kv_bytes_per_token(qwen, 4, 1) == hardware.kv_bytes_per_token(qwen, 8, 1)
    assert hardware.kv_bytes_per_token(qwen, 1, 1) == 4 * hardware.kv_bytes_per_token(qwen, 4, 1)


def test_latent_attention_is_replicated_over_all_gpus() -> None:
    deepseek = shape("DeepSeek-V3")
    assert hardware.kv_bytes_per_token(deepseek, 1, 1) == hardware.kv_bytes_per_token(deepseek, 8, 1) == 61 * 576 * 2


def test_parallelism_shortens_the_step() -> None:
    model, gpu = shape("Llama-3.1-70B"), hardware.gpu_table()["H100-80"]
    steps = [hardware.step_time(model, gpu, tp, 1) for tp in (2, 4, 8)]
    assert [step.alpha for step in steps] == sorted((step.alpha for step in steps), reverse=True)
    assert [step.delta for step in steps] == sorted((step.delta for step in steps), reverse=True)


@pytest.mark.parametrize(
    "name",
    [
        "meta-llama/Llama-3.1-8B-Instruct",
        "meta-llama/Meta-Llama-3.1-8B",
        "Llama-3.1-8B",
        "mistralai/Mistral-7B-Instruct-v0.3",
        "mistralai/Mixtral-8x7B-Instruct-v0.1",
        "deepseek-ai/DeepSeek-V3",
    ],
)
def test_names_match_whatever_stands_around_them(name: str) -> None:
    assert shape(name).layers in {32, 61}


def config(tmp_path: Path, **overrides: Any) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({key: value for key, value in {**LLAMA_8B, **overrides}.items() if value != "absent"}))
    return path


def test_a_local_config_gives_the_catalogue_s_shape(tmp_path: Path) -> None:
    config(tmp_path)
    found = geometry.of_model(Model(name=str(tmp_path), max_model_len=8192))
    assert found == shape("Llama-3.1-8B")


def test_a_mixture_counts_every_expert_and_those_that_are_used(tmp_path: Path) -> None:
    mixtral = {"vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2}
    found = geometry.of_config(config(tmp_path, **mixtral))
    assert found.parameters_millions == pytest.approx(46_703, rel=0.005)
    assert found.active_parameters_millions == pytest.approx(12_879, rel=0.005)


def test_latent_attention_is_read_from_a_config(tmp_path: Path) -> None:
    deepseek = {
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "num_hidden_layers": 61,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "head_dim": 128,
        "vocab_size": 129280,
        "quantization_config": {"quant_method": "fp8"},
    }
    found = geometry.of_config(config(tmp_path, **deepseek))
    assert (found.kv_latent_dim, found.dtype) == (576, "fp8")
    assert found.parameters_millions == pytest.approx(671_026, rel=0.005)
    assert found.active_parameters_millions == pytest.approx(37_550, rel=0.01)


@pytest.mark.parametrize(
    ("key", "value"), [("hidden_size", "absent"), ("num_hidden_layers", "many"), ("vocab_size", 0)]
)
def test_a_config_that_lacks_a_figure_is_refused_by_name(tmp_path: Path, key: str, value: object) -> None:
    with pytest.raises(InputError, match=f"{key}: found .*, allowed: a positive integer"):
        geometry.of_config(config(tmp_path, **{key: value}))


@pytest.mark.parametrize("text", ["", "[]", "not json", '{"text_config": 3}'])
def test_a_config_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(InputError):
        geometry.of_config(path)


def test_the_gpu_table_can_be_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = "{memoryGiB: 10, bandwidthTBps: 1, tflops: 100, linkGBps: 10, pricePerHour: 1}"
    path = tmp_path / "gpus.yaml"
    path.write_text(f"gpus:\n  Mine: {row}\n")
    monkeypatch.setenv("KVANTILE_GPUS", str(path))
    hardware.gpu_table.cache_clear()
    try:
        assert set(hardware.gpu_table()) == {"Mine"}
        path.write_text("gpus:\n  Mine: {memoryGiB: 10}\n")
        hardware.gpu_table.cache_clear()
        with pytest.raises(InputError, match="bandwidthTBps"):
            hardware.gpu_table()
    finally:
        hardware.gpu_table.cache_clear()
