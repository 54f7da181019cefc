"""Drives vLLM's own scheduler without a model: scripts come in, what it decided in each step goes out.

It runs in vLLM's environment, where nothing of the tests' is installed, as `python real_scheduler.py MODEL_FOLDER`: one
JSON script a line on stdin, one JSON list of steps a line on stdout; what vLLM prints goes to stderr. Each step takes
the requests that arrive and go, asks the scheduler, answers with a token for whoever has all its tokens computed (the
stop token when its answer is complete), and notes who was admitted and preempted and how many blocks are free then.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections import deque
from functools import cache
from typing import Any

STEP_S = 0.05
STOP_TOKEN = 2
MOST_STEPS = 20_000
WINDOW = 24
"""Tokens that a layer with a window looks back."""
DRAFTS, DRAFT = 2, 3
"""Tokens proposed in each step, and which one."""
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
        self.unanswered: deque[tuple[Any, list[str]]] = deque()
        """What the scheduler asked for, and which requests get a token for it."""

    def run(self) -> list[dict[str, Any]]:
        """What happened in each step."""
        items = {str(place): item for place, item in enumerate(self.script["sequences"])}
        steps = []
        last = max((item["arrival_step"] for item in items.values()), default=0)
        while self.step <= last or self.scheduler.has_unfinished_requests() or self.unanswered:
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
        requests = self.scheduler.requests
        names = output.num_scheduled_tokens
        self.unanswered.append(
            (output, [name for name in names if requests[name].num_computed_tokens >= requests[name].num_tokens])
        )
        # An engine that schedules ahead asks for a step before it has the tokens of the last, while there is one to do.
        left = 1 if self.script["lags"] and names else 0
        tokens = []
        while len(self.unanswered) > left:
            tokens += self._answer(*self.unanswered.popleft())
        firm, soft = self._promised()
        return {
            "admitted": [name for name in running if name not in before],
            "preempted": sorted(name for name in before if name not in running),
            "tokens": sorted(tokens),
            "free": self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
            "firm": firm,
            "soft": soft,
        }

    def _promised(self) -> tuple[int, int]:
        """Firm blocks and soft milli-tokens."""
        ledger = getattr(self.scheduler, "_ledger", None)
        if ledger is None:
            return 0, 0
        self.scheduler._is_behind = True
        self.scheduler._catch_up()
        return int(ledger.firm), int(ledger.soft)

    def _answer(self, output: Any, done: list[str]) -> list[str]:
        from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

        names = list(output.num_scheduled_tokens)
        drafts = output.scheduled_spec_decode_tokens
        sampled = [self._sampled(name, len(drafts.get(name, ()))) if name in done else [] for name in names]
        answer = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: place for place, name in enumerate(names)},
            sampled_token_ids=sampled,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
            kv_connector_output=self.scheduler.connector.loaded() if self.scheduler.connector else None,
        )
        self.scheduler.update_from_output(output, answer)
        if self.script["shape"] == "speculative" and self.script["kind"] == "stepwise":
            self.scheduler.update_draft_token_ids(DraftTokenIds(names, [[DRAFT] * DRAFTS for _ in names]))
        return [name for name, token in zip(names, sampled, strict=True) if token]

    def _sampled(self, name: str, drafts: int) -> list[int]:
        """The tokens of a step in which so many were proposed, of which some are taken."""
        request, output = self.scheduler.requests.get(name), self.wanted[name]["output"]
        if request is None:
            return []
        first = request.num_output_tokens
        taken = random.Random(f"{name} {first}").randint(0, drafts)
        # Unlike in every sequence, so that nobody finds the answer of another in the cache.
        return [
            STOP_TOKEN if place + 1 >= output else 1_000_000_000 + 10_000 * int(name) + place
            for place in range(first, min(first + 1 + taken, output))
        ]

    def _request(self, name: str, item: dict[str, Any]) -> Any:
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        shape, kind_of = self.script["shape"], int(name) % 3
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
        return Request(
            name,
            shared + own,
            params,
            None,
            arrival_time=self.step * STEP_S,
            block_hasher=self.hasher,
            priority=kind_of if shape == "priority" else 0,
            lora_request=LoRARequest(f"adapter {kind_of}", kind_of, "/none") if shape == "lora" and kind_of else None,
        )

    def _hasher(self) -> Any:
        if not self.script["prefix_caching"]:
            return None
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

        init_none_hash(sha256)
        return get_request_block_hasher(self.script["block_size"], sha256)

    def _scheduler(self, model_folder: str) -> Any:
        from vllm.v1.kv_cache_interface import KVCacheConfig

        script = self.script
        config, structured = _config(model_folder, script["shape"])
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
        groups = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=self._groups())
        os.environ["KVANTILE_ENGINE_ORDER"] = script["order"]
        return self._kind()(
            vllm_config=config,
            kv_cache_config=groups,
            structured_output_manager=structured,
            block_size=script["block_size"],
            log_stats=True,
        )

    def _groups(self) -> list[Any]:
        import torch
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, SlidingWindowSpec

        of_layer = {"block_size": self.script["block_size"], "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
        groups = [KVCacheGroupSpec(["full"], FullAttentionSpec(**of_layer))]
        if self.script["shape"] == "hybrid":
            window = SlidingWindowSpec(**of_layer, sliding_window=WINDOW)
            groups.append(KVCacheGroupSpec(["window"], window))
        return groups

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
def _config(model_folder: str, shape: str) -> Any:
    """One configuration for all scripts, since making it takes longer than driving one; and its grammar manager."""
    from vllm.config import (
        CacheConfig,
        DeviceConfig,
        KVTransferConfig,
        LoRAConfig,
        ModelConfig,
        ParallelConfig,
        SchedulerConfig,
        SpeculativeConfig,
        VllmConfig,
    )
    from vllm.v1.structured_output import StructuredOutputManager

    model = ModelConfig(model=model_folder, skip_tokenizer_init=True, dtype="float16", max_model_len=LONGEST)
    scheduling = SchedulerConfig(
        max_num_seqs=64,
        max_num_batched_tokens=512,
        max_model_len=LONGEST,
        is_encoder_decoder=False,
        enable_chunked_prefill=True,
        async_scheduling=False,
        policy="priority" if shape == "priority" else "fcfs",
    )
    cached = CacheConfig(block_size=32, enable_prefix_caching=True)
    # The package that is built for GPUs finds no device here, and its scheduler needs none.
    config = VllmConfig(
        model_config=model, scheduler_config=scheduling, cache_config=cached, device_config=DeviceConfig(device="cpu")
    )
    if shape == "lora":
        config.lora_config = LoRAConfig(max_lora_rank=8, max_loras=1)
    if shape == "speculative":
        config.speculative_config = SpeculativeConfig(
            method="ngram",
            num_speculative_tokens=DRAFTS,
            prompt_lookup_max=3,
            target_model_config=model,
            target_parallel_config=ParallelConfig(),
        )
    if shape == "loading":
        config.kv_transfer_config = KVTransferConfig(
            kv_connector="Loading", kv_connector_module_path="loading", kv_role="kv_both"
        )
    return config, StructuredOutputManager(config)


if __name__ == "__main__":
    main(sys.argv[1])
