"""Drives vLLM's own scheduler without a model: scripts come in, what it decided in each step goes out.

It runs in vLLM's environment, where nothing of the tests' is installed, as `python real_scheduler.py MODEL_FOLDER`: one
JSON script a line on stdin, one JSON list of steps a line on stdout; what vLLM prints goes to stderr. Each step takes
the requests that arrive and go, asks the scheduler, answers with a token for whoever has all its tokens computed (the
stop token when its answer is complete), and notes who was admitted and preempted and how many blocks are free then.
"""

from __future__ import annotations

import json
import os
import sys
from functools import cache
from typing import Any

STEP_S = 0.05
STOP_TOKEN = 2
MOST_STEPS = 20_000
LONGEST = 8192
"""Tokens of a sequence; scripts have fewer."""


def main(model_folder: str) -> None:
    """Answers scripts until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print(json.dumps({"version": _version()}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(Drive(json.loads(line), model_folder).run()), file=answers, flush=True)


def _version() -> str:
    import vllm

    return str(vllm.__version__)


class Drive:
    """One script. `kind` is stock, stepwise (ours) or ahead (ours, in the variant that schedules a step ahead)."""

    def __init__(self, script: dict[str, Any], model_folder: str) -> None:
        self.script = script
        self.step = 0
        self.wanted: dict[str, dict[str, Any]] = {}
        self.scheduler = self._scheduler(model_folder)
        self.hasher = self._hasher()

    def run(self) -> list[dict[str, Any]]:
        """What happened in each step."""
        items = {str(place): item for place, item in enumerate(self.script["sequences"])}
        steps = []
        last = max((item["arrival_step"] for item in items.values()), default=0)
        while self.step <= last or self.scheduler.has_unfinished_requests():
            assert self.step < MOST_STEPS, "the script does not end"
            steps.append(self._one(items))
            self.step += 1
        return steps

    def _one(self, items: dict[str, dict[str, Any]]) -> dict[str, Any]:
        from vllm.v1.request import RequestStatus

        for name, item in items.items():
            if item["arrival_step"] == self.step:
                self.wanted[name] = item
                self.scheduler.add_request(self._request(name, item))
            if item["abort_step"] == self.step:
                self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        before = [request.request_id for request in self.scheduler.running]
        output = self.scheduler.schedule()
        running = [request.request_id for request in self.scheduler.running]
        tokens = self._answer(output)
        return {
            "admitted": [name for name in running if name not in before],
            "preempted": sorted(name for name in before if name not in running),
            "tokens": sorted(tokens),
            "free": self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
            "soft": self._soft(),
        }

    def _soft(self) -> int:
        ledger = getattr(self.scheduler, "_ledger", None)
        if ledger is None:
            return 0
        ledger.catch_up(self.scheduler._rows_of)
        return int(ledger.soft)

    def _answer(self, output: Any) -> list[str]:
        from vllm.v1.outputs import ModelRunnerOutput

        names = list(output.num_scheduled_tokens)
        sampled: list[list[int]] = []
        for name in names:
            request = self.scheduler.requests[name]
            done = request.num_computed_tokens >= request.num_tokens
            last = request.num_output_tokens + 1 >= self.wanted[name]["output"]
            # Unlike in every sequence, so that nobody finds the answer of another in the cache.
            token = STOP_TOKEN if last else 1_000_000_000 + 10_000 * int(name) + request.num_output_tokens
            sampled.append([token] if done else [])
        answer = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: place for place, name in enumerate(names)},
            sampled_token_ids=sampled,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )
        self.scheduler.update_from_output(output, answer)
        return [name for name, token in zip(names, sampled, strict=True) if token]

    def _request(self, name: str, item: dict[str, Any]) -> Any:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        shared = [10_000 * (item["prefix_id"] + 1) + place for place in range(item["prefix_tokens"])]
        own = [10_000_000 * (int(name) + 1) + place for place in range(item["prompt"] - len(shared))]
        hint: dict[str, Any] = {}
        if item["form"] != "none":
            hint["kv_reserve_tokens"] = item["reserve"]
        if item["form"] == "pooled":
            hint["kv_pooling"] = item["per_mille"] / 1000
        if item["budget_s"] is not None:
            hint["kv_ttft_budget"] = item["budget_s"]
        params = SamplingParams(max_tokens=item["max_tokens"], stop_token_ids=[STOP_TOKEN], extra_args=hint or None)
        return Request(name, shared + own, params, None, arrival_time=self.step * STEP_S, block_hasher=self.hasher)

    def _hasher(self) -> Any:
        if not self.script["prefix_caching"]:
            return None
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

        init_none_hash(sha256)
        return get_request_block_hasher(self.script["block_size"], sha256)

    def _scheduler(self, model_folder: str) -> Any:
        import torch
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

        script = self.script
        config, structured = _config(model_folder)
        blocks, ahead = script["total_blocks"] + 1, script["kind"] == "ahead"
        for owner, name, value in (
            (config.scheduler_config, "max_num_seqs", script["max_num_seqs"]),
            (config.scheduler_config, "max_num_batched_tokens", script["max_num_batched_tokens"]),
            (config.scheduler_config, "async_scheduling", ahead),
            (config.scheduler_config, "watermark", script["watermark"]),
            (config.cache_config, "block_size", script["block_size"]),
            (config.cache_config, "enable_prefix_caching", script["prefix_caching"]),
            (config.cache_config, "num_gpu_blocks", blocks),
        ):
            assert hasattr(owner, name)
            setattr(owner, name, value)
        spec = FullAttentionSpec(block_size=script["block_size"], num_kv_heads=1, head_size=1, dtype=torch.float32)
        groups = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["l"], spec)])
        os.environ["KVANTILE_ENGINE_ORDER"] = script["order"]
        return self._kind()(
            vllm_config=config,
            kv_cache_config=groups,
            structured_output_manager=structured,
            block_size=script["block_size"],
            log_stats=True,
        )

    def _kind(self) -> Any:
        from vllm.v1.core.sched.scheduler import Scheduler

        if self.script["kind"] == "stock":
            return Scheduler
        from kvantile_engine.plugin import scheduler

        drive = self

        class Timed:
            """The script's clock instead of the engine's."""

            def _clock(self) -> float:
                return drive.step * STEP_S

            def _prefill_s(self, _: int) -> float:
                return 0.0

        base = scheduler.ReservationScheduler if self.script["kind"] == "ahead" else scheduler._StepwiseScheduler
        return type("TimedScheduler", (Timed, base), {})


@cache
def _config(model_folder: str) -> Any:
    """One configuration for all scripts, since making it takes longer than driving one; and its grammar manager."""
    from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.v1.structured_output import StructuredOutputManager

    model = ModelConfig(model=model_folder, skip_tokenizer_init=True, dtype="float16", max_model_len=LONGEST)
    scheduling = SchedulerConfig(
        max_num_seqs=64,
        max_num_batched_tokens=512,
        max_model_len=LONGEST,
        is_encoder_decoder=False,
        enable_chunked_prefill=True,
        async_scheduling=False,
    )
    cached = CacheConfig(block_size=32, enable_prefix_caching=True)
    # The package that is built for GPUs finds no device here, and its scheduler needs none.
    config = VllmConfig(
        model_config=model, scheduler_config=scheduling, cache_config=cached, device_config=DeviceConfig(device="cpu")
    )
    return config, StructuredOutputManager(config)


if __name__ == "__main__":
    main(sys.argv[1])
