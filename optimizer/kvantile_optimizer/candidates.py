"""The replica groups that a plan may consist of, before any of them is chosen.

A candidate is a pool, a tensor and pipeline parallelism, and a *tier*: the strictest targets of the classes that it
may serve. The tier is part of the candidate because a group has to meet its tightest class for everybody, so rows
stay linear without a big-M, and because it fixes the longest step: `max_num_batched_tokens` is what fits into the
tier's time per token. What cannot work is left out here, and for each class that nothing can serve the nearest miss
is kept: it becomes the plan's remedy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from kvantile_optimizer import hardware
from kvantile_optimizer.hardware import BLOCK_SIZE, GpuType
from kvantile_optimizer.load import Moments
from kvantile_optimizer.plan import Group, StepTime
from kvantile_optimizer.spec import Calibration, Geometry, NodePool, RequestClass
from kvantile_optimizer.workload import Workload

PIPELINES = (2, 4, 8)
NANOSECONDS = 1e9
MAX_NUM_SEQS = 256
"""vLLM's long-standing default, until the load that a candidate is to carry says how many it needs."""
FEWEST_SEQS, MOST_SEQS = 8, 1024
STEP_HALVINGS = 3
"""How often the largest step that a tier allows is halved to look for one that sustains more."""
FEWEST_BATCHED_TOKENS, MOST_BATCHED_TOKENS = 256, 8192
SEQUENCES_IN_A_STEP = 32
"""Sequences whose decoding the longest step is to leave time for when max_num_batched_tokens is chosen."""
MAX_TIERS = 12
"""Beyond this many distinct pairs of targets, classes share the tier of the next stricter pair."""


@dataclass(frozen=True, slots=True, order=True)
class Tier:
    """Targets in seconds, and the percentile at which both hold."""

    tpot_s: float
    ttft_s: float
    percentile: int

    def serves(self, other: Tier) -> bool:
        """Whether a group that keeps these targets keeps `other`'s too."""
        return self.tpot_s <= other.tpot_s and self.ttft_s <= other.ttft_s and self.percentile >= other.percentile


@dataclass(frozen=True, slots=True)
class Pool:
    """A node pool as the program sees it."""

    name: str
    gpu: GpuType
    per_node: int
    gpus: int | None
    """None: unlimited."""
    price_usd_per_hour: float
    """Of one GPU."""
    calibrations: tuple[Calibration, ...] = ()
    """Engines that were measured on it."""
    forced_kv_tokens: int | None = None
    """The KV cache of a replica where the engine's arguments set it, whatever the memory."""

    def calibration(self, tp: int, pp: int) -> Calibration | None:
        """What was measured for a parallelism."""
        pairs = ((item.tensor_parallel, item.pipeline_parallel) for item in self.calibrations)
        return next((item for item, pair in zip(self.calibrations, pairs, strict=True) if pair == (tp, pp)), None)

    def step_time(self, model: Geometry, tp: int, pp: int) -> StepTime:
        """As it was measured, else as the GPU table suggests."""
        found = self.calibration(tp, pp)
        return _measured_step(found) if found else hardware.step_time(model, self.gpu, tp, pp)

    def kv_tokens(self, model: Geometry, tp: int, pp: int, max_num_batched_tokens: int, max_num_seqs: int) -> int:
        """KV capacity of a replica in whole blocks: the formula's, off by as much as it was where one was measured."""
        if self.forced_kv_tokens is not None:
            return self.forced_kv_tokens // BLOCK_SIZE * BLOCK_SIZE
        expected = hardware.kv_tokens(model, self.gpu, tp, pp, max_num_batched_tokens, max_num_seqs)
        found = self.calibration(tp, pp)
        if found is None or found.kv_tokens is None:
            return expected
        there = hardware.kv_tokens(model, self.gpu, tp, pp, found.max_num_batched_tokens, found.max_num_seqs)
        return (found.kv_tokens + expected - there) // BLOCK_SIZE * BLOCK_SIZE


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica group that could be."""

    pool: Pool
    tp: int
    pp: int
    tier: Tier
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_tokens: int
    max_model_len: int
    step: StepTime

    @property
    def gpus(self) -> int:
        """GPUs of one replica."""
        return self.tp * self.pp

    @property
    def price_usd_per_second(self) -> float:
        """Of one replica."""
        return self.gpus * self.pool.price_usd_per_hour / 3600

    @property
    def shape(self) -> str:
        """Name of the hardware, without the tier."""
        return shape_name(self.pool.name, self.tp, self.pp)

    def runs_as(self, group: Group) -> bool:
        """Whether engines of the group are this candidate's: the same hardware and sizes."""
        sizes = self.max_num_seqs, self.max_num_batched_tokens
        return self.shape == shape_of(group) and sizes == (group.max_num_seqs, group.max_num_batched_tokens)


@dataclass(frozen=True, slots=True)
class Misfit:
    """Why a class cannot be served by one shape: how far `found` is from what would do."""

    constraint: str
    remedy: str
    excess: float
    """Relative distance from fitting; the smallest is the nearest miss."""


def shape_name(pool: str, tp: int, pp: int) -> str:
    """What replicas of the same hardware are called, in a candidate and in a running plan alike."""
    return f"{pool}-tp{tp}" + (f"-pp{pp}" if pp > 1 else "")


def shape_of(group: Group) -> str:
    """The name of a running group's hardware, as candidates have it."""
    return shape_name(group.pool, group.tensor_parallel, group.pipeline_parallel)


def pools(node_pools: list[NodePool], forced_kv_tokens: int | None = None) -> list[Pool]:
    """The pools with their GPUs looked up. Raises InputError for a GPU the table lacks.

    `forced_kv_tokens` is the KV cache of each replica where the engine's arguments set it.
    """
    return [_pool(index, pool, forced_kv_tokens) for index, pool in enumerate(node_pools)]


def _pool(index: int, pool: NodePool, forced_kv_tokens: int | None) -> Pool:
    gpu = hardware.gpu_type(pool.gpu.type, f"spec.nodePools[{index}].gpu.type")
    price = float(pool.price_per_gpu_hour) if pool.price_per_gpu_hour else gpu.price_usd_per_hour
    return Pool(pool.name, gpu, pool.gpu.per_node, pool.max_gpus, price, tuple(pool.calibrations), forced_kv_tokens)


def _measured_step(found: Calibration) -> StepTime:
    alpha, beta, gamma, delta = (
        float(value) / NANOSECONDS
        for value in (found.alpha_nanoseconds, found.beta_nanoseconds, found.gamma_nanoseconds, found.delta_nanoseconds)
    )
    return StepTime(alpha=alpha, beta=beta, gamma=gamma, delta=delta)


def tier_of(item: RequestClass) -> Tier:
    """The targets of a class."""
    return Tier(item.slo.tpot_milliseconds / 1000, item.slo.ttft_milliseconds / 1000, item.slo.percentile)


def tiers(classes: list[RequestClass]) -> list[Tier]:
    """The tiers that groups may have: each class's own, and the strictest of all together, strictest first."""
    own = {tier_of(item) for item in classes}
    strictest = Tier(
        min(tier.tpot_s for tier in own), min(tier.ttft_s for tier in own), max(tier.percentile for tier in own)
    )
    ordered = sorted(own | {strictest})
    if len(ordered) <= MAX_TIERS:
        return ordered
    # The strictest stays, so that every class keeps at least one tier that serves it.
    step = (len(ordered) - 1) / (MAX_TIERS - 1)
    return [strictest, *(ordered[round(i * step)] for i in range(1, MAX_TIERS))]


def candidates(model: Geometry, max_model_len: int, pool_list: list[Pool], tier_list: list[Tier]) -> list[Candidate]:
    """Every shape and tier that holds the model and some KV, in a fixed order."""
    found = []
    for pool in pool_list:
        inside = _in_pool(model, max_model_len, pool, widths(model, pool), tier_list)
        found += inside or _in_pool(model, max_model_len, pool, stages(model, pool), tier_list)
    return found


def widths(model: Geometry, pool: Pool) -> list[tuple[int, int]]:
    """(tp, pp) inside a node: powers of two that divide the attention heads.

    A pool that has no GPU now has the shapes that it could have, so that a plan can say how many are missing.
    """
    most = min(pool.per_node, pool.gpus or pool.per_node)
    return [(2**k, 1) for k in range(most.bit_length()) if 2**k <= most and model.attention_heads % 2**k == 0]


def stages(model: Geometry, pool: Pool) -> list[tuple[int, int]]:
    """(tp, pp) across nodes, each as wide as it can be: only for a model that no single node holds, because between
    nodes every step pays for a network that the data sheets do not describe."""
    inside = widths(model, pool)
    if not inside:
        return []
    tp = inside[-1][0]
    return [(tp, pp) for pp in PIPELINES if pp <= model.layers and (not pool.gpus or tp * pp <= pool.gpus)]


def _in_pool(
    model: Geometry, max_model_len: int, pool: Pool, parallel: list[tuple[int, int]], tier_list: list[Tier]
) -> list[Candidate]:
    found = []
    for tp, pp in parallel:
        step = pool.step_time(model, tp, pp)
        for tier in tier_list:
            for batched in step_sizes(batched_tokens(step, tier)):
                kv = pool.kv_tokens(model, tp, pp, batched, MAX_NUM_SEQS)
                if kv >= BLOCK_SIZE:
                    length = min(max_model_len, kv)
                    found.append(Candidate(pool, tp, pp, tier, MAX_NUM_SEQS, batched, kv, length, step))
    return found


def step_sizes(largest: int) -> list[int]:
    """Values of max_num_batched_tokens to choose from: the largest, its half, and so on."""
    sizes = {max(FEWEST_BATCHED_TOKENS, largest // 2**k // 128 * 128) for k in range(STEP_HALVINGS + 1)}
    return sorted(sizes, reverse=True)


def with_seqs(candidate: Candidate, model: Geometry, max_model_len: int, max_num_seqs: int) -> Candidate:
    """The candidate with as many sequences at once, and the KV that they leave; itself where they leave none."""
    tp, pp, batched = candidate.tp, candidate.pp, candidate.max_num_batched_tokens
    kv = candidate.pool.kv_tokens(model, tp, pp, batched, max_num_seqs)
    if kv < BLOCK_SIZE:
        return candidate
    return replace(candidate, max_num_seqs=max_num_seqs, kv_tokens=kv, max_model_len=min(max_model_len, kv))


def batched_tokens(step: StepTime, tier: Tier) -> int:
    """max_num_batched_tokens: what the tier's time per token leaves for prefills in one step."""
    spare = tier.tpot_s - step.alpha - step.beta * SEQUENCES_IN_A_STEP
    tokens = math.floor(spare / step.delta / 128) * 128 if spare > 0 else 0
    return min(max(tokens, FEWEST_BATCHED_TOKENS), MOST_BATCHED_TOKENS)


def misfit(candidate: Candidate, own: Tier, workload: Workload, part: Moments) -> Misfit | None:
    """Why this candidate can never serve the class, however lightly loaded; None when it can.

    `own` are the class's targets, `part` its moments.
    """
    step = candidate.step
    longest = int(min(workload.prompt.max() + workload.upper, workload.max_model_len))
    if longest > candidate.kv_tokens:
        remedy = f"requests of at most {candidate.kv_tokens} tokens instead of {longest}, or more memory per replica"
        return Misfit("kv", remedy, longest / candidate.kv_tokens - 1)
    floor = step.alpha + step.beta + step.gamma * float(part.context)
    if floor >= own.tpot_s:
        return Misfit("tpot", f"TPOT {_ms(own.tpot_s)} ms to {_ms(floor, up=True)} ms", floor / own.tpot_s - 1)
    prompt = float(part.prompt_p)
    prefill = prompt * step.delta + math.ceil(prompt / candidate.max_num_batched_tokens) * step.alpha
    if prefill + floor >= own.ttft_s:
        remedy = f"TTFT {_ms(own.ttft_s)} ms to {_ms(prefill + floor, up=True)} ms"
        return Misfit("ttft", remedy, (prefill + floor) / own.ttft_s - 1)
    return None


def _ms(seconds: float, *, up: bool = False) -> int:
    milliseconds = seconds * 1000
    return math.ceil(milliseconds * 1.05) if up else round(milliseconds)
