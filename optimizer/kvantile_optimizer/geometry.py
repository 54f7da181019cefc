"""The shape of a model: from the ServingPlan, from a local Hugging Face `config.json`, or from the catalogue.

In that order. Only the shape matters here (layers, heads, parameters, types); what it costs in memory and time on a
GPU is `hardware`'s.
"""

from __future__ import annotations

import difflib
import json
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
    config = config.get("text_config", config) if isinstance(config, dict) else None
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
    shared = config.get("n_shared_experts") or 0
    inner = integer("intermediate_size", "n_inner", default=4 * hidden)
    expert_inner = integer("moe_intermediate_size", default=inner)
    dense_layers = min(config.get("first_k_dense_replace") or 0, layers) if experts > 1 else 0
    attention = _attention_parameters(config, hidden, heads, kv_heads, head_dim)
    embeddings = integer("vocab_size") * hidden * (1 if config.get("tie_word_embeddings") else 2)

    def parameters(active_experts: int) -> int:
        sparse = 3 * hidden * expert_inner * (active_experts + shared)
        mlp = dense_layers * 3 * hidden * inner + (layers - dense_layers) * sparse
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


def _attention_span(config: dict[str, Any], layers: int) -> tuple[int | None, int]:
    """The window (or chunk) of the layers that have one, and how many layers attend to everything."""
    window = config.get("sliding_window") or config.get("attention_chunk_size")
    kinds, pattern = config.get("layer_types"), config.get("sliding_window_pattern")
    if not isinstance(window, int) or config.get("use_sliding_window") is False:
        return None, layers
    if isinstance(kinds, list):
        return window, sum(kind == "full_attention" for kind in kinds)
    if isinstance(pattern, int) and pattern > 0:
        return window, layers // pattern
    return window, sum(flag == 0 for flag in config.get("no_rope_layers") or [])


def with_engine_args(model: Geometry, args: Sequence[str]) -> Geometry:
    """The geometry with the KV cache's type that the engine's arguments ask for (`--kv-cache-dtype fp8`)."""
    words = [word for arg in args for word in arg.replace("=", " ").split()]
    asked = next((value for flag, value in pairwise(words) if flag == "--kv-cache-dtype"), "")
    return model.model_copy(update={"kv_dtype": "fp8"}) if asked.startswith("fp8") else model


def _dtype(config: dict[str, Any]) -> Any:  # noqa: ANN401 - one of Geometry's literals, which pydantic checks
    quantised = config.get("quantization_config") or {}
    bits = quantised.get("bits") or quantised.get("w_bit")
    if bits == 4:
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
