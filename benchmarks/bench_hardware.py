"""How far the step-time priors are from recorded profiles of linear layers and all-reduces, and KV from engine logs.

    python benchmarks/bench_hardware.py FOLDER

FOLDER holds gpu_profiles.csv (gpu, model, tp, num_tokens, total_ms: one pass through all layers, without attention,
logits and communication) and allreduce_profiles.csv (network, world_size, devices_per_node, size_bytes, median_ms), as
cut from vidur's published profiles (MIT). Prints the relative error of the prior for each GPU, model and tp: of a step
of one token, of a prefill of 512 to 4,096 tokens, and of the engine's KV capacity where a log tells it. A step is bound
by reading the weights or by arithmetic, whichever takes longer; the plan's affine step time, alpha + delta * tokens,
adds both, and its error is the last column. Nothing is random; the same files give the same table on every machine.
"""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np

from kvantile_optimizer import geometry, hardware
from kvantile_optimizer.spec import Geometry

GPUS = {"a100": "A100-80", "h100": "H100-80", "a100_dgx": "A100-80", "h100_dgx": "H100-80"}
MODELS = {
    "Llama-2-7b-hf": "Llama-2-7B",
    "Llama-2-70b-hf": "Llama-2-70B",
    "Meta-Llama-3-8B": "Llama-3.1-8B",
    "Meta-Llama-3-70B": "Llama-3.1-70B",
}
PREFILLS = (512, 1024, 2048, 4096)
REDUCED_BYTES = (4e6, 66e6)
"""Reduced tensors of prefills; smaller ones are noise in the profiles."""
ENGINE_LOGS = (("Llama-3.1-8B", "RTX4090", 256, 2048, 41_408),)
"""Model, GPU, sequences, batched tokens and the tokens that the engine's log told (vLLM 0.19)."""


def without_embeddings(model: Geometry) -> Geometry:
    """What the profiles run: the layers alone."""
    layers = model.parameters_millions - model.embedding_parameters_millions
    return model.model_copy(update={"parameters_millions": layers, "embedding_parameters_millions": 0})


def linear_layers(folder: Path) -> None:
    """Errors of a step of one token and of prefills."""
    measured: dict[tuple[str, str, int], dict[int, float]] = defaultdict(dict)
    with (folder / "gpu_profiles.csv").open() as file:
        for row in csv.DictReader(file):
            key = (row["gpu"], row["model"], int(row["tp"]))
            measured[key][int(row["num_tokens"])] = float(row["total_ms"]) / 1000
    print(
        f"{'gpu':5} {'model':17} tp  one token   " + "  ".join(f"{tokens:>6}" for tokens in PREFILLS) + "  affine, 2048"
    )
    for (gpu_name, model_name, tp), times in sorted(measured.items()):
        gpu = hardware.gpu_table()[GPUS[gpu_name]]
        model = without_embeddings(geometry.catalogue()[MODELS[model_name]])
        once = hardware.linear_seconds(model, gpu, tp)
        slope = hardware.prefill_seconds(model, gpu, tp, prompt=0)
        errors = [max(once, slope * tokens) / times[tokens] - 1 for tokens in PREFILLS]
        affine = (once + slope * 2048) / times[2048] - 1
        shown = "  ".join(f"{error:+6.1%}" for error in errors)
        print(f"{gpu_name:5} {model_name:17} {tp:2}  {once / times[1] - 1:+9.1%}   {shown}  {affine:+12.1%}")


def all_reduces(folder: Path) -> None:
    """Errors of all-reduces inside a node: the median over sizes, and the largest."""
    measured: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    with (folder / "allreduce_profiles.csv").open() as file:
        for row in csv.DictReader(file):
            size = float(row["size_bytes"])
            if row["world_size"] == row["devices_per_node"] and REDUCED_BYTES[0] <= size <= REDUCED_BYTES[1]:
                measured[row["network"], int(row["world_size"])].append((size, float(row["median_ms"]) / 1000))
    print("\nnetwork   tp  median   worst of all-reduces")
    for (network, tp), rows in sorted(measured.items()):
        size, seconds = np.array(rows).T
        found = hardware.all_reduce(hardware.gpu_table()[GPUS[network]], tp)
        errors = (found.latency_s + found.seconds_per_byte * size) / seconds - 1
        print(f"{network:8} {tp:3}  {np.median(errors):+6.1%}  {errors[np.argmax(np.abs(errors))]:+6.1%}")


def capacities() -> None:
    """Errors of the KV capacity."""
    print("\nmodel         gpu       log      prior    error of KV tokens")
    for name, gpu, sequences, batched, told in ENGINE_LOGS:
        tokens = hardware.kv_tokens(geometry.catalogue()[name], hardware.gpu_table()[gpu], 1, 1, batched, sequences)
        print(f"{name:13} {gpu:8} {told:8,} {tokens:8,}  {tokens / told - 1:+6.1%}")


def main() -> None:
    """Prints the three tables."""
    if len(sys.argv) != 2:
        sys.exit("usage: python benchmarks/bench_hardware.py FOLDER")
    linear_layers(Path(sys.argv[1]))
    all_reduces(Path(sys.argv[1]))
    capacities()


if __name__ == "__main__":
    main()
