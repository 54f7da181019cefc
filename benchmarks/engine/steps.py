"""Steps of vLLM's scheduler, timed; runs in vLLM's environment, as `python steps.py KIND SHORTAGE MODEL_FOLDER`.

KIND is stock, plain (ours, no request brings a hint) or hinted. SHORTAGE is what others wait for: seats, which are all
taken, so that nobody is asked for at the gate; or blocks, so that the first in line stands there in every step. Those
that run have a long answer to go, so that every step is the same work: a token for each. Every line on stdin asks for
so many steps, and is answered on stdout by a JSON list of what each took, in microseconds of the thread: what others
run meanwhile is not in them.

A process has one scheduler. With two of different classes in one, the interpreter's caches serve one of them better:
differences of 5 % for the same work.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from typing import Any

RUNNING = 256
WAITING = 64
PROMPT = 128
BLOCK_SIZE = 16
LONGEST_ANSWER = 6000
"""More than the steps that are ever asked for."""
FREE_BLOCKS = 300
"""At the start of each step, where others wait for blocks."""
TOKEN = 7
HINT = {"kv_reserve_tokens": LONGEST_ANSWER, "kv_pooling": 0.25, "kv_class": "chat", "kv_ttft_budget": 3600.0}
"""Never used up: an account that still counts is the dear one."""


def main(kind: str, shortage: str, model_folder: str) -> None:
    """Answers until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    # vLLM prints on stdout too.
    os.dup2(2, 1)
    steps = Steps(kind, shortage, model_folder)
    gc.collect()
    gc.disable()
    for line in sys.stdin:
        print(json.dumps([1e6 * steps.one() for _ in range(int(line))]), file=answers, flush=True)


class Steps:
    """A scheduler with `RUNNING` requests whose prompts are computed and `WAITING` that cannot join them."""

    def __init__(self, kind: str, shortage: str, model_folder: str) -> None:
        self.hint = HINT if kind == "hinted" else None
        self.of_blocks = shortage == "blocks"
        self.scheduler = _made(kind, RUNNING + WAITING if self.of_blocks else RUNNING, model_folder)
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.held: list[Any] = []
        self._add(RUNNING, PROMPT)
        self.one()
        if self.of_blocks:
            self.held = self.pool.get_new_blocks(self.pool.get_num_free_blocks() - FREE_BLOCKS)
        self._add(WAITING, (FREE_BLOCKS + 1) * BLOCK_SIZE if self.of_blocks else PROMPT)

    def one(self) -> float:
        """A step; seconds that the scheduler's thread worked."""
        from vllm.v1.outputs import ModelRunnerOutput

        if self.held:
            # What the last step took.
            keep = len(self.held) + self.pool.get_num_free_blocks() - FREE_BLOCKS
            self.pool.free_blocks(self.held[keep:])
            del self.held[keep:]
        began = time.thread_time()
        output = self.scheduler.schedule()
        scheduled_s = time.thread_time() - began
        names = list(output.num_scheduled_tokens)
        assert len(names) == RUNNING
        answer = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: place for place, name in enumerate(names)},
            sampled_token_ids=[[TOKEN] for _ in names],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )
        began = time.thread_time()
        self.scheduler.update_from_output(output, answer)
        return scheduled_s + time.thread_time() - began

    def _add(self, count: int, prompt: int) -> None:
        for _ in range(count):
            self.scheduler.add_request(_request(len(self.scheduler.requests), prompt, self.hint))


def _request(number: int, prompt: int, hint: dict[str, Any] | None) -> Any:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    params = SamplingParams(max_tokens=LONGEST_ANSWER, ignore_eos=True, extra_args=dict(hint) if hint else None)
    return Request(str(number), [TOKEN] * prompt, params, None, arrival_time=float(number))


def _class(kind: str) -> Any:
    if kind == "stock":
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler

        return AsyncScheduler
    from kvantile_engine import ReservationScheduler

    return ReservationScheduler


def _made(kind: str, seats: int, model_folder: str) -> Any:
    import torch
    from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    longest = PROMPT + LONGEST_ANSWER
    blocks = RUNNING * longest // BLOCK_SIZE + 1
    model = ModelConfig(model=model_folder, skip_tokenizer_init=True, dtype="float16", max_model_len=longest)
    scheduling = SchedulerConfig(
        max_num_seqs=seats,
        max_num_batched_tokens=RUNNING * PROMPT,
        max_model_len=longest,
        is_encoder_decoder=False,
        enable_chunked_prefill=True,
        async_scheduling=True,
    )
    cached = CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=False)
    config = VllmConfig(model_config=model, scheduler_config=scheduling, cache_config=cached)
    config.cache_config.num_gpu_blocks = blocks
    # vLLM turns it off on the CPU; most engines schedule ahead, and that is what ours is compared with.
    config.scheduler_config.async_scheduling = True
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32)
    groups = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["l"], spec)])
    return _class(kind)(
        vllm_config=config,
        kv_cache_config=groups,
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
        log_stats=True,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
