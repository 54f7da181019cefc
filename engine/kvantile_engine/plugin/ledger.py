"""What the running requests still have coming: the two sums that `admission.admits` asks for, kept up to date.

A ledger is of one group of the KV cache; a model whose groups differ has several (`pages`). Each request has an
account, from its arrival to its end. While it runs its account is in the ledger: `join` when it is let in, `leave` when
it ends or is preempted. What came in between is looked up by `catch_up`, which is called only when somebody asks for
the sums: a step in which nobody waits costs nothing, and one in which somebody does costs an addition for each request
that runs. Soft tokens fall with every token; firm blocks of an answer change only where it begins a new block; an
account whose reservation is used up is not looked at again. A ledger that is told of every token costs every step a
call for each request. The rule itself is `kvantile_optimizer.admission`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sized
from dataclasses import dataclass, field

from kvantile_optimizer.admission import (
    HELD,
    NONE,
    PER_MILLE,
    POOLED,
    admits,
    blocks_for,
    cut_reserve,
    firm_blocks,
    running_firm_blocks,
    soft_blocks,
    soft_millitokens,
)


@dataclass(slots=True, eq=False)
class Account:
    """One request: what was asked for it, and what of that is in the ledger. Lengths in tokens."""

    request_id: str
    prompt: int
    form: int = NONE
    reserve: int = 0
    pooling_per_mille: int = PER_MILLE
    class_name: str = ""
    arrival_s: float = 0.0
    """On the engine's clock."""
    latest_start_s: float | None = None
    answer: Sized = ()
    """Its tokens so far, as the engine has them."""
    generated: int = 0
    """How many of them are in the sums."""
    firm: int = 0
    soft: int = 0
    even_until: int = 0
    """Up to so many tokens of the answer each one changes the sums in the same way: by `fall_per_token`."""
    fall_per_token: int = 0
    """Milli-tokens."""
    in_ledger: bool = False
    overshot: bool = False
    parts: tuple[Account, ...] = ()
    """The same request in the ledgers of other groups, since it last asked to be let in."""


@dataclass(frozen=True, slots=True)
class Room:
    """What is free when a request asks to be let in, in blocks."""

    free: int
    """Without those that hold a prefix the request shares, and those that are for other groups."""
    hits: int
    """That it shares with others."""
    running: int
    """Requests that run, or that have a promise already."""


@dataclass(slots=True)
class Ledger:
    """The accounts of what runs. `total_blocks` is the whole pool, `watermark_blocks` what admission leaves of it."""

    total_blocks: int
    block_size: int
    watermark_blocks: int = 0
    swing: int = 0
    """Blocks that each answer with a held reservation gives back and takes again, for as long as it runs."""
    firm: int = 0
    soft: int = 0
    """Milli-tokens."""
    overshoots: Counter[str] = field(default_factory=Counter)
    """By class: answers that became longer than what was set aside for them."""
    _prefilling: dict[Account, None] = field(default_factory=dict)
    _growing: dict[Account, None] = field(default_factory=dict)

    @property
    def soft_blocks(self) -> int:
        """Blocks that the soft tokens stand for."""
        return soft_blocks(self.soft, self.block_size)

    def open(self, account: Account, max_tokens: int) -> Account:
        """`account` with its reservation cut to what can be honoured."""
        account.reserve = cut_reserve(account.reserve, account.prompt, max_tokens, self.total_blocks, self.block_size)
        return account

    @property
    def holding(self) -> int:
        """Requests whose reservation is not used up."""
        return len(self._prefilling) + len(self._growing)

    def lets_in(self, account: Account, room: Room) -> bool:
        """Whether the request may start now."""
        form = account.form if room.running else NONE
        return admits(
            free_blocks=room.free,
            candidate_firm=firm_blocks(
                form, account.prompt, account.generated, account.reserve, room.hits, self.block_size
            ),
            candidate_soft=self._soft(account),
            running_firm=self.firm,
            running_soft=self.soft,
            running=room.running,
            watermark_blocks=self.watermark_blocks,
            block_size=self.block_size,
        )

    def wanted(self, account: Account, hits: int, running: int) -> int:
        """Blocks that must be free here for the request to start, where another group's ledger decides."""
        form = account.form if running else NONE
        own = firm_blocks(form, account.prompt, account.generated, account.reserve, hits, self.block_size)
        if not running:
            return own
        return own + self._swing(account) + self.firm + soft_blocks(self._soft(account) + self.soft, self.block_size)

    def fits(self, account: Account, room: Room) -> bool:
        """Whether it would start if nothing were reserved: what is known of it fits beside the watermark."""
        known = firm_blocks(NONE, account.prompt, account.generated, 0, room.hits, self.block_size)
        return known + (self.watermark_blocks if room.running else 0) <= room.free

    def join(self, account: Account, allocated_blocks: int) -> None:
        """The request runs, with so many blocks of its own and shared ones."""
        if account.form == NONE:
            return
        account.in_ledger = True
        account.generated = len(account.answer)
        self._prefilling[account] = None
        self._set(account, self._firm(account, allocated_blocks), self._soft(account))

    def catch_up(self, allocated_blocks: Callable[[str], int]) -> None:
        """Brings the sums up to date; `allocated_blocks` says what a request by its id has, shared ones included."""
        for account in list(self._prefilling):
            if len(account.answer) > account.generated:
                del self._prefilling[account]
                self._growing[account] = None
            else:
                self._set(account, self._firm(account, allocated_blocks(account.request_id)), account.soft)
        fallen = 0
        for account in list(self._growing):
            generated = len(account.answer)
            if generated > account.even_until:
                self._grow(account, generated)
            elif account.fall_per_token:
                falls = account.fall_per_token * (generated - account.generated)
                account.soft -= falls
                account.generated = generated
                fallen += falls
        self.soft -= fallen

    def leave(self, account: Account) -> None:
        """It has ended, or was preempted."""
        if account.in_ledger:
            self._note_overshoot(account, len(account.answer))
            self._set(account, 0, 0)
            self._prefilling.pop(account, None)
            self._growing.pop(account, None)
            account.in_ledger = False
            account.even_until = 0

    def _grow(self, account: Account, generated: int) -> None:
        account.generated = generated
        allocated = blocks_for(account.prompt + generated, self.block_size)
        firm = max(self._firm(account, allocated), self._swing(account))
        self._set(account, firm, self._soft(account))
        if account.form == POOLED:
            account.even_until, account.fall_per_token = account.reserve, account.pooling_per_mille
        else:
            account.even_until = min(account.reserve, allocated * self.block_size - account.prompt)
        if generated > account.reserve:
            self._note_overshoot(account, generated)
            del self._growing[account]

    def _note_overshoot(self, account: Account, generated: int) -> None:
        if generated > account.reserve and not account.overshot:
            account.overshot = True
            self.overshoots[account.class_name] += 1

    def _set(self, account: Account, firm: int, soft: int) -> None:
        self.firm += firm - account.firm
        self.soft += soft - account.soft
        account.firm, account.soft = firm, soft

    def _firm(self, account: Account, allocated_blocks: int) -> int:
        return running_firm_blocks(
            account.form, account.prompt, account.generated, account.reserve, allocated_blocks, self.block_size
        )

    def _swing(self, account: Account) -> int:
        return self.swing if account.form == HELD else 0

    def _soft(self, account: Account) -> int:
        return soft_millitokens(account.form, account.generated, account.reserve, account.pooling_per_mille)
