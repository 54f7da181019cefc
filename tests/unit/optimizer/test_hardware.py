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


@pytest.mark.parametrize(
    ("gpu", "model", "tp", "one_token_ms", "prefill_ms"),
    [
        ("A100-80", "Llama-2-7B", 1, 9.28, 259.92),
        ("A100-80", "Llama-3.1-8B", 4, 3.392, 76.872),
        ("A100-80", "Llama-2-70B", 2, 45.04, 1248.3),
        ("A100-80", "Llama-3.1-70B", 8, 14.28, 355.38),
        ("H100-80", "Llama-2-7B", 2, 3.2, 44.032),
        ("H100-80", "Llama-2-70B", 1, 50.0, 875.02),
        ("H100-80", "Llama-2-70B", 8, 8.36, 122.32),
    ],
)
def test_linear_layers_take_what_vidur_measured(
    gpu: str, model: str, tp: int, one_token_ms: float, prefill_ms: float
) -> None:
    # microsoft/vidur, data/profiling/compute (MIT): medians of one pass of 1 and of 4,096 tokens through all layers,
    # without attention, logits and communication.
    found = shape(model)
    layers = found.model_copy(
        update={
            "parameters_millions": found.parameters_millions - found.embedding_parameters_millions,
            "embedding_parameters_millions": 0,
        }
    )
    chip = hardware.gpu_table()[gpu]
    assert hardware.linear_seconds(layers, chip, tp) == pytest.approx(one_token_ms / 1000, rel=0.08)
    assert 4096 * hardware.prefill_seconds(layers, chip, tp, prompt=0) == pytest.approx(prefill_ms / 1000, rel=0.08)


@pytest.mark.parametrize(
    ("gpu", "tp", "megabytes", "milliseconds"),
    [
        ("A100-80", 2, 28.2, 0.211),
        ("A100-80", 8, 28.2, 0.378),
        ("H100-80", 2, 28.2, 0.116),
        ("H100-80", 8, 28.2, 0.171),
    ],
)
def test_a_large_all_reduce_takes_what_vidur_measured(gpu: str, tp: int, megabytes: float, milliseconds: float) -> None:
    # microsoft/vidur, data/profiling/network (MIT), inside one node.
    found = hardware.all_reduce(hardware.gpu_table()[gpu], tp)
    assert found.latency_s + megabytes * 1e6 * found.seconds_per_byte == pytest.approx(milliseconds / 1000, rel=0.2)


def test_a_single_gpu_reduces_nothing() -> None:
    assert hardware.all_reduce(hardware.gpu_table()["H100-80"], 1) == hardware.AllReduce(0.0, 0.0)


def test_the_catalogue_has_every_memory_shape() -> None:
    known = geometry.catalogue()
    assert len(known) >= 30
    assert sum(model.active_parameters_millions is not None for model in known.values()) >= 8
    assert sum(model.kv_latent_dim is not None for model in known.values()) >= 2
    assert sum(model.sliding_layers > 0 for model in known.values()) >= 6
    assert sum(model.weights_megabytes is not None for model in known.values()) >= 6


@pytest.mark.parametrize("name", list(geometry.catalogue()))
def test_every_model_of_the_catalogue_has_as_many_parameters_as_its_shape_needs(name: str) -> None:
    model = geometry.catalogue()[name]
    assert shape(name) == model, "another entry has the same name"
    attention = 2 * model.hidden_size * (model.attention_heads + model.kv_heads) * model.head_dim * model.layers
    if model.kv_latent_dim is None:
        assert attention / 1e6 < model.parameters_millions - model.embedding_parameters_millions
    fits = [gpu for gpu in hardware.gpu_table().values() if hardware.kv_tokens(model, gpu, 8, 1, 2048, 256) > 0]
    assert fits


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "Qwen3-30B-A3B"),
        ("mistralai/Mistral-Nemo-Instruct-2407", "Mistral-Nemo"),
        ("google/gemma-3-27b-it", "Gemma-3-27B"),
        ("openai/gpt-oss-120b", "gpt-oss-120b"),
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct", "Llama-4-Scout-17B-16E"),
        ("Qwen/Qwen2.5-72B-Instruct-AWQ", "Qwen2.5-72B-Instruct-AWQ"),
        ("deepseek-ai/DeepSeek-V2-Lite-Chat", "DeepSeek-V2-Lite"),
    ],
)
def test_names_of_the_hub_are_found(name: str, entry: str) -> None:
    assert shape(name) == geometry.catalogue()[entry]


def test_sliding_layers_keep_a_window_for_each_sequence_or_everything_whichever_holds_more() -> None:
    gpu, oss = hardware.gpu_table()["H100-80"], shape("gpt-oss-20b")
    full = oss.model_copy(update={"sliding_window": None, "full_attention_layers": None})
    hybrid_tokens, full_tokens = (hardware.kv_tokens(model, gpu, 1, 1, 2048, 256) for model in (oss, full))
    # Half of the layers keep 144 tokens for each of 256 sequences: 36,864 tokens of theirs are gone, half the rest won.
    assert hybrid_tokens == pytest.approx(2 * full_tokens - 256 * 144, abs=32)
    wide = oss.model_copy(update={"sliding_window": 100_000})
    assert hardware.kv_tokens(wide, gpu, 1, 1, 2048, 256) == full_tokens


def test_what_is_certain_to_fit_fits_whatever_the_contexts() -> None:
    gpu, model = hardware.gpu_table()["H100-80"], shape("Gemma-3-12B")
    tokens = hardware.kv_tokens(model, gpu, 1, 1, 2048, 64)
    one = hardware.kv_bytes_per_token(model, 1, 1, 1)
    window = model.sliding_window or 0
    free = hardware.kv_bytes_per_token(model, 1, 1) * hardware.kv_tokens(
        model.model_copy(update={"sliding_window": None, "full_attention_layers": None}), gpu, 1, 1, 2048, 64
    )
    for sequences in (1, 8, 64):
        context = tokens / sequences
        held = sequences * one * (8 * context + 40 * min(context, window))
        assert held <= free * 1.001


def test_sliding_layers_are_read_no_further_than_their_window() -> None:
    gpu, oss = hardware.gpu_table()["H100-80"], shape("gpt-oss-120b")
    full = oss.model_copy(update={"sliding_window": None, "full_attention_layers": None})
    read = hardware.step_time(oss, gpu, 1, 1).gamma / hardware.step_time(full, gpu, 1, 1).gamma
    assert read == pytest.approx(0.5 + 0.5 * 128 / 2048)


def test_quantised_weights_leave_more_room() -> None:
    gpu = hardware.gpu_table()["H100-80"]
    plain, quantised = (shape(f"Qwen2.5-32B-Instruct{suffix}") for suffix in ("", "-AWQ"))
    assert hardware.weight_bytes(quantised) == 19_326e6
    assert hardware.kv_tokens(quantised, gpu, 1, 1, 2048, 256) > 5 * hardware.kv_tokens(plain, gpu, 1, 1, 2048, 256)


@pytest.mark.parametrize(
    "args", [["--kv-cache-dtype", "fp8"], ["--kv-cache-dtype=fp8_e4m3"], ["--x 1 --kv-cache-dtype fp8"]]
)
def test_an_fp8_cache_holds_twice_as_much(args: list[str]) -> None:
    model = shape("Llama-3.1-8B")
    found = geometry.with_engine_args(model, args)
    assert 2 * hardware.kv_bytes_per_token(found, 1, 1) == hardware.kv_bytes_per_token(model, 1, 1)
    assert geometry.with_engine_args(model, ["--kv-cache-dtype", "auto", "--fp8"]) == model


@pytest.mark.parametrize(
    ("args", "tokens"),
    [
        (["--num-gpu-blocks-override", "512"], 8192),
        (["--block-size=32", "--num-gpu-blocks-override=100 --num-gpu-blocks-override=512"], 16384),
        (["--num-gpu-blocks-override"], None),
        (["--block-size", "32"], None),
    ],
)
def test_arguments_may_set_the_kv_cache_whatever_the_memory(args: list[str], tokens: int | None) -> None:
    assert geometry.forced_kv_tokens(args, 16) == tokens


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
    ("keys", "window", "full"),
    [
        ({"sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 16}, 128, 16),
        ({"sliding_window": 1024, "sliding_window_pattern": 6}, 1024, 5),
        ({"attention_chunk_size": 8192, "no_rope_layers": [1, 1, 1, 0] * 8}, 8192, 8),
        ({"sliding_window": 1024, "model_type": "gemma3_text"}, 1024, 5),
        ({"sliding_window": 262_144, "max_position_embeddings": 131_072}, None, None),
        ({"sliding_window": 4096, "use_sliding_window": False}, None, None),
        ({"sliding_window": None}, None, None),
        ({"sliding_window": 4096}, 4096, 0),
    ],
)
def test_windows_are_read_from_a_config(
    tmp_path: Path, keys: dict[str, Any], window: int | None, full: int | None
) -> None:
    found = geometry.of_config(config(tmp_path, **keys))
    assert (found.sliding_window, found.full_attention_layers) == (window, full)


GPT_OSS_120B: dict[str, Any] = {
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_hidden_layers": 36,
    "head_dim": 64,
    "vocab_size": 201_088,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "model_type": "gpt_oss",
    "quantization_config": {"quant_method": "mxfp4"},
}
MAVERICK: dict[str, Any] = {
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16_384,
    "num_attention_heads": 40,
    "num_hidden_layers": 48,
    "head_dim": 128,
    "vocab_size": 202_048,
    "num_local_experts": 128,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 2,
    "attention_chunk_size": 8192,
}
LLAMA_70B_AWQ: dict[str, Any] = {
    "hidden_size": 8192,
    "intermediate_size": 28_672,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "quantization_config": {"quant_method": "awq", "bits": 4},
}
GEMMA_27B: dict[str, Any] = {
    "hidden_size": 5376,
    "intermediate_size": 21_504,
    "num_attention_heads": 32,
    "num_hidden_layers": 62,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "vocab_size": 262_208,
    "sliding_window": 1024,
    "model_type": "gemma3_text",
    "tie_word_embeddings": True,
}


@pytest.mark.parametrize(
    ("keys", "entry"),
    [
        (GPT_OSS_120B, "gpt-oss-120b"),
        (MAVERICK, "Llama-4-Maverick-17B-128E"),
        (LLAMA_70B_AWQ, "Llama-3.1-70B-Instruct-AWQ-INT4"),
        (GEMMA_27B, "Gemma-3-27B"),
    ],
)
def test_published_configs_give_the_catalogue_s_shapes(tmp_path: Path, keys: dict[str, Any], entry: str) -> None:
    found, known = geometry.of_config(config(tmp_path, **keys)), geometry.catalogue()[entry]
    assert hardware.weight_bytes(found) == pytest.approx(hardware.weight_bytes(known), rel=0.02)
    assert found.parameters_millions == pytest.approx(known.parameters_millions, rel=0.02)
    assert (found.sliding_window, found.full_attention_layers) == (known.sliding_window, known.full_attention_layers)
    if known.active_parameters_millions:
        active = known.active_parameters_millions
        assert found.active_parameters_millions == pytest.approx(active, rel=0.15)


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
