"""The shape of a model: from the ServingPlan, from a local Hugging Face `config.json`, or from the catalogue.

In that order. Only the shape matters here (layers, heads, parameters, types); what it costs in memory and time on a
GPU is `hardware`'s.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from kvantile_optimizer.errors import InputError
from kvantile_optimizer.spec import Geometry, Model

BYTES = {"bfloat16": 2.0, "float16": 2.0, "float32": 4.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5}
_SUFFIX = re.compile(r"(-(instruct|chat|base|it|hf|thinking))?(-v\d+(\.\d+)*)?(-(instruct|chat))?(-\d{4})?$")


def of_model(model: Model) -> Geometry:
    """The geometry of `spec.model`. Raises InputError when nothing knows it."""
    if model.geometry is not None:
        return model.geometry
    folder = Path(model.name)
    if (folder / "config.json").is_file():
        return of_config(folder / "config.json")
    known = catalogue()
    name = _normal(model.name)
    for entry, geometry in known.items():
        if _normal(entry) == name:
            return geometry
    near = difflib.get_close_matches(name, [_normal(entry) for entry in known], n=1)
    meant = next((f" (did you mean {entry}?)" for entry in known if near and _normal(entry) == near[0]), "")
    raise InputError(
        f"spec.model.name: found {model.name!r}{meant}, allowed: a folder with a config.json, one of "
        f"{', '.join(known)}, or any name together with spec.model.geometry"
    )


@cache
def catalogue() -> dict[str, Geometry]:
    """The models that need no geometry, by name."""
    text = files("kvantile_optimizer").joinpath("data/models.yaml").read_text(encoding="utf-8")
    models = YAML(typ="safe", pure=True).load(text)["models"]
    return {name: Geometry.model_validate(shape) for name, shape in models.items()}


def of_config(path: Path) -> Geometry:
    """The geometry that a Hugging Face `config.json` describes.

    Parameters are counted from the shapes: embeddings, attention projections and gated MLPs, with every expert of a
    mixture. Raises InputError naming the key that is missing or not a number.
    """
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: {error}, allowed: a readable Hugging Face config.json") from error
    if isinstance(config, dict) and "text_config" in config:
        outer, config = config, config["text_config"]
        if isinstance(config, dict) and "quantization_config" in outer:
            config = {**config, "quantization_config": outer["quantization_config"]}
    if not isinstance(config, dict):
        raise InputError(f"{path}: found no mapping, allowed: a Hugging Face config.json")

    def integer(*keys: str, default: int | None = None) -> int:
        value: Any = next((config[key] for key in keys if config.get(key) is not None), default)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise InputError(f"{path}: {keys[0]}: found {value!r}, allowed: a positive integer")
        return value

    hidden, heads = integer("hidden_size", "n_embd"), integer("num_attention_heads", "n_head")
    layers = integer("num_hidden_layers", "n_layer")
    kv_heads = integer("num_key_value_heads", default=heads)
    head_dim = integer("head_dim", default=hidden // heads)
    latent = integer("kv_lora_rank") + integer("qk_rope_head_dim") if config.get("kv_lora_rank") else None
    experts = integer("num_local_experts", "n_routed_experts", "num_experts", default=1)
    used = integer("num_experts_per_tok", default=1)
    # Llama 4 has a wider MLP in layers without experts, and one shared expert beside the others.
    shared = config.get("n_shared_experts") or (1 if config.get("intermediate_size_mlp") else 0)
    inner = integer("intermediate_size_mlp", "intermediate_size", "n_inner", default=4 * hidden)
    expert_inner = integer("moe_intermediate_size", "intermediate_size", default=inner)
    sparse_layers = (layers - min(config.get("first_k_dense_replace") or 0, layers)) if experts > 1 else 0
    sparse_layers //= integer("interleave_moe_layer_step", default=1)
    attention = _attention_parameters(config, hidden, heads, kv_heads, head_dim)
    embeddings = integer("vocab_size") * hidden * (1 if config.get("tie_word_embeddings") else 2)

    def parameters(active_experts: int) -> int:
        sparse = 3 * hidden * expert_inner * (active_experts + shared)
        mlp = (layers - sparse_layers) * 3 * hidden * inner + sparse_layers * sparse
        return max(1, round((embeddings + layers * attention + mlp) / 1e6))

    window, full = _attention_span(config, layers)
    dtype = _dtype(config)
    return Geometry(
        layers=layers,
        hidden_size=hidden,
        attention_heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        parameters_millions=parameters(experts),
        active_parameters_millions=parameters(used) if experts > 1 else None,
        embedding_parameters_millions=round(embeddings / 1e6),
        weights_megabytes=_checkpoint_megabytes(config, parameters(experts), embeddings, layers * attention),
        sliding_window=window,
        full_attention_layers=full if window else None,
        kv_latent_dim=latent,
        dtype=dtype,
        kv_dtype="bfloat16",
    )


def _attention_parameters(config: dict[str, Any], hidden: int, heads: int, kv_heads: int, head_dim: int) -> int:
    if config.get("kv_lora_rank"):
        rank, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
        value = config.get("v_head_dim") or head_dim
        nope = config.get("qk_nope_head_dim") or head_dim
        q_rank = config.get("q_lora_rank")
        query = (hidden * q_rank + q_rank * heads * (nope + rope)) if q_rank else hidden * heads * (nope + rope)
        return int(query + hidden * (rank + rope) + rank * heads * (nope + value) + heads * value * hidden)
    return 2 * hidden * heads * head_dim + 2 * hidden * kv_heads * head_dim


def _checkpoint_megabytes(config: dict[str, Any], millions: int, embeddings: int, attention: int) -> int | None:
    """Size of a quantised checkpoint: embeddings stay in 16 bits, mxfp4 leaves attention there as well."""
    quantised = _quantised_bytes(config)
    if quantised is None:
        return None
    mxfp4 = config["quantization_config"].get("quant_method") == "mxfp4"
    kept = (embeddings + (attention if mxfp4 else 0)) / 1e6
    return max(1, round(2 * kept + quantised * (millions - kept)))


def _quantised_bytes(config: dict[str, Any]) -> float | None:
    """Bytes of a quantised parameter with its scales: one of 16 bits (and a zero) for 128 weights, 8 bits for 32."""
    quantised = config.get("quantization_config")
    if not quantised:
        return None
    if quantised.get("quant_method") == "mxfp4":
        return 4.25 / 8
    return {"int4": 4.16 / 8, "int8": 1.0, "fp8": 1.0}.get(_dtype(config))


def _attention_span(config: dict[str, Any], layers: int) -> tuple[int | None, int]:
    """The window (or chunk) of the layers that have one, and how many layers attend to everything."""
    chunk = config.get("attention_chunk_size")
    window = config.get("sliding_window") or chunk
    longest = config.get("max_position_embeddings") or math.inf
    if not isinstance(window, int) or config.get("use_sliding_window") is False or window >= longest:
        return None, layers
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        return window, sum(kind == "full_attention" for kind in kinds)
    # Every so many layers one attends to everything; the configs of these families may leave the number out.
    usual = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "gpt_oss": 2}.get(str(config.get("model_type")))
    every = config.get("sliding_window_pattern") or (config.get("no_rope_layer_interval", 4) if chunk else usual)
    return window, layers // every if isinstance(every, int) and every > 0 else 0


def with_engine_args(model: Geometry, args: Sequence[str]) -> Geometry:
    """The geometry with the KV cache's type that the engine's arguments ask for (`--kv-cache-dtype fp8`)."""
    asked = _argument(args, "--kv-cache-dtype")
    return model.model_copy(update={"kv_dtype": "fp8"}) if asked.startswith("fp8") else model


def forced_kv_tokens(args: Sequence[str], block_size: int) -> int | None:
    """The KV cache that the engine's arguments ask for whatever the memory (`--num-gpu-blocks-override`), in tokens.

    `block_size` is what a block has unless the arguments say so; None where they leave the cache to the memory.
    """
    blocks, size = _argument(args, "--num-gpu-blocks-override"), _argument(args, "--block-size")
    if not blocks.isdecimal():
        return None
    return int(blocks) * (int(size) if size.isdecimal() else block_size)


def _argument(args: Sequence[str], flag: str) -> str:
    """What follows `flag`, as a word or after `=`; empty where it is absent. The last one counts, as for the engine."""
    words = [word for arg in args for word in arg.replace("=", " ").split()]
    return next((value for name, value in reversed(list(pairwise(words))) if name == flag), "")


def _dtype(config: dict[str, Any]) -> Any:  # noqa: ANN401 - one of Geometry's literals, which pydantic checks
    quantised = config.get("quantization_config") or {}
    bits = quantised.get("bits") or quantised.get("w_bit")
    if bits == 4 or quantised.get("quant_method") in {"awq", "mxfp4"}:
        return "int4"
    if bits == 8:
        return "int8"
    if quantised.get("quant_method") in {"fp8", "fbgemm_fp8", "compressed-tensors"}:
        return "fp8"
    named = str(config.get("torch_dtype") or config.get("dtype") or "bfloat16")
    return named if named in BYTES else "bfloat16"


def _normal(name: str) -> str:
    base = name.rstrip("/").rsplit("/", 1)[-1].lower().removeprefix("meta-")
    return _SUFFIX.sub("", base)
