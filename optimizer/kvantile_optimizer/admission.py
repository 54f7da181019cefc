"""The admission rule: may this request start now, and who is asked first.

One rule for the emulator, the vLLM plug-in, the simulator and the gateway's queue, so it is integer arithmetic on
plain numbers and imports nothing: it can be called from a scheduler's inner loop, compiled, or copied into an image
that has no other package. Two numbers describe what a request still has coming beyond the blocks it holds: *firm*
blocks, which it is sure to take or has been promised, and *soft* milli-tokens, the share phi of its unused
reservation, which many requests pool. A replica keeps the sums of both over its running requests and asks `admits`.

Order is a rule of its own (`late_turn`): preempted requests first, then those that can still meet their
time-to-first-token target, earliest deadline first, then the late ones, who are guaranteed a share. The queue that
keeps requests so is `waiting.WaitingQueue`.
"""

NONE, HELD, POOLED = 0, 1, 2
FORMS = {"none": NONE, "held": HELD, "pooled": POOLED}

PER_MILLE = 1000
LATE_SHARE_PER_MILLE = 100
"""One admission in ten goes to a late request while both kinds wait: it bounds the wait of the late to about ten
on-time admissions each, and costs the on-time ones a tenth of the capacity only during an overload."""


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that hold `tokens` tokens."""
    return -(-tokens // block_size)


def watermark_blocks(share: float, total_blocks: int) -> int:
    """Blocks that a watermark of `share` leaves free; vLLM counts the one that it never hands out as well."""
    return int(share * (total_blocks + 1))


def cut_reserve(reserve: int, prompt: int, max_tokens: int, total_blocks: int, block_size: int) -> int:
    """The reservation in tokens that can be honoured: not above `max_tokens`, not above what an empty pool leaves."""
    return max(0, min(reserve, max_tokens, total_blocks * block_size - prompt))


def firm_blocks(form: int, prompt: int, generated: int, reserve: int, allocated_blocks: int, block_size: int) -> int:
    """Blocks that a request will take beyond `allocated_blocks`, without doubt or by promise.

    `prompt` and `generated` are tokens. Without doubt is what is known already (the prompt and, after a preemption,
    what was generated before it); by promise, under `HELD`, the reservation. A block shared through the prefix cache
    counts as allocated.
    """
    known = prompt + generated
    promised = prompt + reserve if form == HELD and reserve > generated else known
    return max(0, blocks_for(promised, block_size) - allocated_blocks)


def running_firm_blocks(
    form: int, prompt: int, generated: int, reserve: int, allocated_blocks: int, block_size: int
) -> int:
    """`firm_blocks` of a request that runs: under `NONE` the engine looks at nothing but free blocks, so zero."""
    if form == NONE:
        return 0
    return firm_blocks(form, prompt, generated, reserve, allocated_blocks, block_size)


def soft_millitokens(form: int, generated: int, reserve: int, pooling_per_mille: int) -> int:
    """phi * (reserve - generated)^+ in thousandths of a token; zero unless `POOLED`."""
    return pooling_per_mille * (reserve - generated) if form == POOLED and reserve > generated else 0


def soft_blocks(millitokens: int, block_size: int) -> int:
    """Blocks that a sum of `soft_millitokens` stands for, rounded up once for the sum."""
    return -(-millitokens // (PER_MILLE * block_size))


def admits(
    free_blocks: int,
    candidate_firm: int,
    candidate_soft: int,
    running_firm: int,
    running_soft: int,
    running: int,
    watermark_blocks: int,
    block_size: int,
) -> bool:
    """Whether a request may start now.

    `candidate_*` are its own `firm_blocks` and `soft_millitokens`, `running_*` the sums over the `running` requests.
    An empty engine is never kept waiting: there only the blocks the request needs for sure must be free, which the
    caller says by passing `candidate_firm` without the promise (`firm_blocks(NONE, ...)`).
    """
    if running == 0:
        return candidate_firm <= free_blocks
    wanted = candidate_firm + running_firm + soft_blocks(candidate_soft + running_soft, block_size)
    return wanted + watermark_blocks <= free_blocks


def late_turn(credit: int, on_time_waiting: bool, late_waiting: bool, share: int) -> tuple[bool, int]:
    """Whether the next admission goes to a late request, and the credit that the late then have.

    `credit` and `share` are in thousandths of an admission. While both kinds wait, each admission earns the late
    `share`; at a whole admission one of them is served.
    """
    if not late_waiting:
        return False, 0
    if not on_time_waiting:
        return True, credit
    if credit + share >= PER_MILLE:
        return True, credit + share - PER_MILLE
    return False, credit + share
