"""What a model costs on a GPU: KV capacity in tokens, and the time of an engine step. Priors from data sheets.

Capacity: what is left of the engine's share of memory after weights, activations and the runtime, divided by the bytes
that one token's keys and values take on one GPU. Heads are replicated once there are more GPUs than KV heads, and
latent attention is replicated over all of them.

Step time: T = alpha + beta * sequences + gamma * context tokens + delta * prefill tokens (seconds). alpha reads the
weights once, gamma reads the cache, delta is arithmetic, beta the per-sequence overhead; tensor parallelism divides
the first three and adds two all-reduces a layer. An engine's own figures, where there are any, replace all of this.
"""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass
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
MODEL_FLOPS_UTILISATION = 0.6
"""Linear layers alone reach 0.71 (A100) and 0.76 (H100) of dense peak at 4,096 tokens; attention and the rest cost
about a sixth on top."""
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
    )
    figures = (gpu.memory_bytes, gpu.bandwidth_bytes_per_s, gpu.flops, gpu.link_bytes_per_s, gpu.price_usd_per_hour)
    if not all(0 < figure < float("inf") for figure in figures):
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
    return model.parameters_millions * 1e6 * BYTES[model.dtype]


def kv_bytes_per_token(model: Geometry, tp: int, pp: int) -> float:
    """Bytes of keys and values that one token takes on each GPU."""
    if model.kv_latent_dim is not None:
        return model.layers * model.kv_latent_dim * BYTES[model.kv_dtype] / pp
    values = 2 * model.layers * model.kv_heads * model.head_dim
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
    return int(free / kv_bytes_per_token(model, tp, pp) // BLOCK_SIZE) * BLOCK_SIZE


def step_time(model: Geometry, gpu: GpuType, tp: int, pp: int) -> StepTime:
    """Prior of the step-time coefficients, seconds.

    alpha is the latency through all pipeline stages; the other three are divided by pp, since the stages work on
    different batches at once.
    """
    bandwidth = BANDWIDTH_EFFICIENCY * gpu.bandwidth_bytes_per_s
    active = model.active_parameters_millions or model.parameters_millions
    share = active / model.parameters_millions
    touched = 1 - (1 - share) ** EXPERT_BATCH if share < 1 else 1.0
    reduce_per_token = 0.0
    launches = 0.0
    if tp > 1:
        launches = 2 * model.layers * ALL_REDUCE_LATENCY_S
        reduce_per_token = 2 * model.layers * model.hidden_size * 2 * 2 * (tp - 1) / tp / gpu.link_bytes_per_s
    arithmetic = 2 * active * 1e6 / (tp * MODEL_FLOPS_UTILISATION * gpu.flops)
    # What a token reads of the cache is on each GPU of a stage at once: pp is already in the bytes per token.
    return StepTime(
        alpha=weight_bytes(model) * touched / (tp * bandwidth) + LAYER_OVERHEAD_S * model.layers + launches,
        beta=(SEQUENCE_OVERHEAD_S + reduce_per_token) / pp,
        gamma=kv_bytes_per_token(model, tp, pp) / bandwidth,
        delta=(arithmetic + reduce_per_token) / pp,
    )
