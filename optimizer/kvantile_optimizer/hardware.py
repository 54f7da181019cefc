"""What a model costs on a GPU: KV capacity in tokens, and the time of an engine step. Priors from data sheets.

Capacity: what is left of the engine's share of memory after weights, activations and the runtime, divided by the bytes
that one token's keys and values take on one GPU. Heads are replicated once there are more GPUs than KV heads, and
latent attention is replicated over all of them. Layers with a sliding window keep at most that for each sequence; how
much of a token they keep depends on contexts that are not known here, so the capacity is what is certain to fit.

Step time: T = alpha + beta * sequences + gamma * context tokens + delta * prefill tokens (seconds). alpha reads the
weights once, gamma reads the cache, delta is arithmetic and the memory traffic between the matrix products, beta the
per-sequence overhead; tensor parallelism divides these and adds two all-reduces a layer, each a latency and the size
over the link's bandwidth. An engine's own figures, where there are any, replace all of this.
"""

from __future__ import annotations

import difflib
import os
from dataclasses import astuple, dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from kvantile_optimizer.errors import InputError
from kvantile_optimizer.geometry import BYTES
from kvantile_optimizer.plan import StepTime
from kvantile_optimizer.spec import Geometry

GIB = 1024**3
BLOCK_SIZE = 16

MEMORY_UTILISATION = 0.9
"""vLLM's default `--gpu-memory-utilization`."""
BANDWIDTH_EFFICIENCY = 0.8
"""Reading weights and cache reaches about four fifths of the data sheet's bandwidth on every recorded run."""
GEMM_EFFICIENCY = 0.72
"""Matrix products of 1,024 to 4,096 tokens reach 0.66 to 0.78 of dense peak in recorded profiles of A100 and H100."""
ATTENTION_EFFICIENCY = 0.5
"""Of dense peak, in attention over a prompt."""
LINK_EFFICIENCY = 0.65
"""All-reduces of 16 to 66 MB reach 0.5 to 0.75 of the data sheet's one-way bandwidth in recorded profiles."""
ELEMENTWISE_VALUES, ELEMENTWISE_VALUES_SPLIT = 12, 20
"""Values a layer moves through memory between its matrix products, over the hidden size: on every GPU, and split among
them. Norms and residuals are the former, activations and rotations the latter; both fit the profiles within a tenth."""
TYPICAL_PROMPT, TYPICAL_CONTEXT = 2048, 2048
"""Tokens at which the share of attention in a prefill, and of sliding layers in reading the cache, is worked out."""
LAYER_OVERHEAD_S = 32e-6
SEQUENCE_OVERHEAD_S = 1e-4
"""beta: between 0.05 and 0.2 ms on recorded runs."""
ALL_REDUCE_LATENCY_S = 20e-6
"""One small all-reduce inside a node: NCCL takes 31 to 60 us in recorded profiles, the engine's own kernel less."""
RUNTIME_BYTES = 0.6 * GIB
"""CUDA context, workspaces and communicators of one worker. With the activations below it gives 41,952 tokens for
Llama-3.1-8B on an RTX 4090, whose engine log says 41,408."""
LOGIT_BYTES_PER_SEQUENCE = 8 * 128_256
"""Sampling keeps the logits twice in float32, for a vocabulary of Llama's size."""
MLP_WIDTH = 3.5
"""Width of the MLP over the hidden size, when no config says it."""
EXPERT_BATCH = 32
"""Sequences in a batch for which the share of a mixture's experts that are read in a step is worked out."""


@dataclass(frozen=True, slots=True)
class GpuType:
    """A row of the GPU table, in SI units."""

    name: str
    memory_bytes: float
    bandwidth_bytes_per_s: float
    flops: float
    link_bytes_per_s: float
    price_usd_per_hour: float
    bandwidth_efficiency: float = BANDWIDTH_EFFICIENCY
    gemm_efficiency: float = GEMM_EFFICIENCY
    link_efficiency: float = LINK_EFFICIENCY


@cache
def gpu_table() -> dict[str, GpuType]:
    """The GPU table: the file that KVANTILE_GPUS names, or the bundled one. Raises InputError."""
    override = os.environ.get("KVANTILE_GPUS")
    source = Path(override) if override else files("kvantile_optimizer").joinpath("data/gpus.yaml")
    try:
        rows = YAML(typ="safe", pure=True).load(source.read_text(encoding="utf-8"))["gpus"]
        return {name: _gpu(name, row) for name, row in rows.items()}
    except (OSError, YAMLError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{source}: {error!r}, allowed: a GPU table as in the documentation") from error


def _gpu(name: str, row: dict[str, Any]) -> GpuType:
    gpu = GpuType(
        name,
        row["memoryGiB"] * GIB,
        row["bandwidthTBps"] * 1e12,
        row["tflops"] * 1e12,
        row["linkGBps"] * 1e9,
        float(row["pricePerHour"]),
        float(row.get("bandwidthEfficiency", BANDWIDTH_EFFICIENCY)),
        float(row.get("gemmEfficiency", GEMM_EFFICIENCY)),
        float(row.get("linkEfficiency", LINK_EFFICIENCY)),
    )
    if not all(0 < figure < float("inf") for figure in astuple(gpu)[1:]):
        raise ValueError(f"{name}: figures above zero")
    return gpu


def gpu_type(name: str, path: str) -> GpuType:
    """The GPU of that name; `path` is the field that named it. Raises InputError."""
    table = gpu_table()
    if name in table:
        return table[name]
    near = difflib.get_close_matches(name, table, n=1, cutoff=0.4)
    meant = f" (did you mean {near[0]}?)" if near else ""
    raise InputError(f"{path}: found {name!r}{meant}, allowed: one of {', '.join(table)}")


def weight_bytes(model: Geometry) -> float:
    """Bytes of all weights."""
    if model.weights_megabytes is not None:
        return model.weights_megabytes * 1e6
    return model.parameters_millions * 1e6 * BYTES[model.dtype]


def kv_bytes_per_token(model: Geometry, tp: int, pp: int, layers: float | None = None) -> float:
    """Bytes of keys and values that one token takes on each GPU, in `layers` of the model or all of them."""
    kept = model.layers if layers is None else layers
    if model.kv_latent_dim is not None:
        return kept * model.kv_latent_dim * BYTES[model.kv_dtype] / pp
    values = 2 * kept * model.kv_heads * model.head_dim
    return values * BYTES[model.kv_dtype] / min(tp, model.kv_heads) / pp


def activation_bytes(model: Geometry, tp: int, max_num_batched_tokens: int, max_num_seqs: int) -> float:
    """Peak of one step's intermediate values on each GPU."""
    hidden = model.hidden_size * (4 + 3 * MLP_WIDTH / tp)
    return 2 * hidden * max_num_batched_tokens + LOGIT_BYTES_PER_SEQUENCE * max_num_seqs


def kv_tokens(model: Geometry, gpu: GpuType, tp: int, pp: int, max_num_batched_tokens: int, max_num_seqs: int) -> int:
    """KV capacity of one replica in tokens, whole blocks; zero or less when the weights do not fit."""
    free = (
        MEMORY_UTILISATION * gpu.memory_bytes
        - weight_bytes(model) / (tp * pp)
        - activation_bytes(model, tp, max_num_batched_tokens, max_num_seqs)
        - RUNTIME_BYTES
    )
    return int(_tokens_in(free, model, tp, pp, max_num_seqs) // BLOCK_SIZE) * BLOCK_SIZE


def _tokens_in(free_bytes: float, model: Geometry, tp: int, pp: int, sequences: int) -> float:
    """Tokens that are certain to fit: as if every layer kept all, or with a whole window set aside for each sequence.

    A sequence of C tokens takes full * C + sliding * min(C, window) of a layer's bytes. Neither bound counts on long
    contexts, so hybrid models hold more than this where contexts are long and sequences few.
    """
    everywhere = free_bytes / kv_bytes_per_token(model, tp, pp)
    if not model.sliding_window or not model.full_attention_layers:
        return everywhere
    window = model.sliding_window + BLOCK_SIZE
    aside = sequences * window * kv_bytes_per_token(model, tp, pp, model.sliding_layers)
    return max(everywhere, (free_bytes - aside) / kv_bytes_per_token(model, tp, pp, model.full_attention_layers))


def step_time(model: Geometry, gpu: GpuType, tp: int, pp: int) -> StepTime:
    """Prior of the step-time coefficients, seconds.

    alpha is the latency through all pipeline stages; the other three are divided by pp, since the stages work on
    different batches at once.
    """
    bandwidth = gpu.bandwidth_efficiency * gpu.bandwidth_bytes_per_s
    reduces = all_reduce(gpu, tp)
    # What a token reads of the cache is on each GPU of a stage at once: pp is already in the bytes per token.
    sliding = model.sliding_layers * (1 - min(1.0, (model.sliding_window or 0) / TYPICAL_CONTEXT))
    reduced_bytes = 2 * model.layers * model.hidden_size * 2
    return StepTime(
        alpha=linear_seconds(model, gpu, tp) + 2 * model.layers * reduces.latency_s,
        beta=(SEQUENCE_OVERHEAD_S + reduced_bytes * reduces.seconds_per_byte) / pp,
        gamma=kv_bytes_per_token(model, tp, pp, model.layers - sliding) / bandwidth,
        delta=(prefill_seconds(model, gpu, tp) + reduced_bytes * reduces.seconds_per_byte) / pp,
    )


def linear_seconds(model: Geometry, gpu: GpuType, tp: int) -> float:
    """Seconds to read the weights once on `tp` GPUs, launches of all layers included: a step of one token."""
    active = model.active_parameters_millions or model.parameters_millions
    share = active / model.parameters_millions
    touched = 1 - (1 - share) ** EXPERT_BATCH if share < 1 else 1.0
    bandwidth = gpu.bandwidth_efficiency * gpu.bandwidth_bytes_per_s
    return weight_bytes(model) * touched / (tp * bandwidth) + LAYER_OVERHEAD_S * model.layers


def prefill_seconds(model: Geometry, gpu: GpuType, tp: int, prompt: int = TYPICAL_PROMPT) -> float:
    """Seconds that one more prompt token takes on `tp` GPUs: its matrix products, its attention, the rest."""
    linear = (model.active_parameters_millions or model.parameters_millions) - model.embedding_parameters_millions
    products = 2 * linear * 1e6 / (tp * gpu.gemm_efficiency * gpu.flops)
    attended = 2 * model.layers * model.attention_heads * model.head_dim * prompt
    attention = attended / (tp * ATTENTION_EFFICIENCY * gpu.flops)
    moved = 2 * model.layers * model.hidden_size * (ELEMENTWISE_VALUES + ELEMENTWISE_VALUES_SPLIT / tp)
    return products + attention + moved / (gpu.bandwidth_efficiency * gpu.bandwidth_bytes_per_s)


@dataclass(frozen=True, slots=True)
class AllReduce:
    """Time of one all-reduce inside a node: a latency and a rate."""

    latency_s: float
    seconds_per_byte: float
    """Of the tensor that is reduced."""


def all_reduce(gpu: GpuType, tp: int) -> AllReduce:
    """All-reduce among `tp` GPUs: each sends and receives 2 (tp - 1) / tp of the tensor; nothing for a single GPU."""
    if tp == 1:
        return AllReduce(0.0, 0.0)
    return AllReduce(ALL_REDUCE_LATENCY_S, 2 * (tp - 1) / tp / (gpu.link_efficiency * gpu.link_bytes_per_s))
