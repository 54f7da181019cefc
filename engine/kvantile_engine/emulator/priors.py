"""The settings that follow from a GPU and a model: KV cache and step times, as the planner assumes them.

Needs the optimizer's part of the dependencies (`kvantile[optimizer]`), so only those who ask for it import this.
"""

from __future__ import annotations

from kvantile_optimizer import geometry, hardware
from kvantile_optimizer.errors import InputError
from kvantile_optimizer.spec import Model

_ANY_NAME = ", or any name together with spec.model.geometry"


def of_hardware(gpu: str, model: str, tp: int, max_num_batched_tokens: int, max_num_seqs: int) -> dict[str, float]:
    """`kv_tokens` and the four coefficients in seconds, by the names of the settings. Raises InputError."""
    # "H100" alone means the first of its sizes in the table.
    sized = next((name for name in hardware.gpu_table() if gpu and name.startswith(f"{gpu}-")), gpu)
    known = hardware.gpu_type(sized, "--gpu")
    try:
        shape = geometry.of_model(Model(name=model, max_model_len=16))
    except InputError as error:
        raise InputError(str(error).replace("spec.model.name", "--model").removesuffix(_ANY_NAME)) from error
    if shape.attention_heads % tp:
        raise InputError(f"--tp: found {tp}, allowed a divisor of the model's {shape.attention_heads} heads")
    tokens = hardware.kv_tokens(shape, known, tp, 1, max_num_batched_tokens, max_num_seqs)
    if tokens <= 0:
        raise InputError(f"--gpu: found {tp} x {gpu}, allowed enough memory for the weights of {model}: more --tp")
    times = hardware.step_time(shape, known, tp, 1)
    return {
        "kv_tokens": tokens,
        "alpha": times.alpha,
        "beta": times.beta,
        "gamma": times.gamma,
        "delta": times.delta,
    }
