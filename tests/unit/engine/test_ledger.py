"""The ledger of running requests: its sums are those that a recount by the rule would give, after every event."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from kvantile_engine.plugin.ledger import Account, Ledger, Room
from kvantile_optimizer.admission import HELD, NONE, POOLED, blocks_for, running_firm_blocks, soft_millitokens

SIZE = 16


def make_account(prompt: int = 32, form: int = HELD, reserve: int = 64, phi: int = 1000) -> Account:
    return Account("request", prompt, form, reserve, phi, class_name="chat")


@dataclass(slots=True)
class Running:
    """A request as the test knows it."""

    account: Account
    allocated: int
    output: int

    def firm(self) -> int:
        item = self.account
        return running_firm_blocks(item.form, item.prompt, item.generated, item.reserve, self.allocated, SIZE)

    def soft(self) -> int:
        item = self.account
        return soft_millitokens(item.form, item.generated, item.reserve, item.pooling_per_mille)


@pytest.mark.parametrize("seed", range(20))
def test_the_sums_are_those_of_a_recount(seed: int) -> None:
    rng = random.Random(seed)
    ledger, running = Ledger(1000, SIZE), list[Running]()
    for _ in range(400):
        if rng.random() < 0.2:
            form = rng.choice((NONE, HELD, POOLED))
            account = make_account(rng.randint(1, 200), form, rng.randint(0, 120), rng.choice((0, 100, 250, 1000)))
            ledger.open(account, max_tokens=rng.choice((50, 10_000)))
            item = Running(account, 1, rng.randint(1, 150))
            ledger.join(account, item.allocated)
            running.append(item)
        for item in list(running):
            account = item.account
            if item.allocated < blocks_for(account.prompt, SIZE):
                item.allocated += 1
                ledger.prefilled(account, item.allocated)
                continue
            new = rng.choice((0, 1, 1, 1, 2))
            if new:
                account_had = account.generated
                ledger.grew(account, account_had + new)
                account.generated = account_had + new
                item.allocated = blocks_for(account.prompt + account.generated, SIZE)
            if account.generated >= item.output or rng.random() < 0.01:
                ledger.leave(account)
                running.remove(item)
        assert ledger.firm == sum(item.firm() for item in running)
        assert ledger.soft == sum(item.soft() for item in running)
    for item in running:
        ledger.leave(item.account)
        ledger.leave(item.account)
    assert (ledger.firm, ledger.soft, ledger.prefilling) == (0, 0, [])


def test_an_empty_engine_lets_anybody_in_whose_prompt_fits() -> None:
    ledger = Ledger(10, SIZE)
    account = ledger.open(make_account(prompt=100, reserve=1_000_000), max_tokens=1_000_000)
    assert ledger.lets_in(account, Room(free=7, hits=0, running=0))
    assert not ledger.lets_in(account, Room(free=6, hits=0, running=0))


def test_a_reservation_is_cut_to_the_pool_and_to_what_the_client_allows() -> None:
    ledger = Ledger(10, SIZE)
    assert ledger.open(make_account(prompt=100, reserve=1_000_000), max_tokens=1_000_000).reserve == 60
    assert ledger.open(make_account(prompt=100, reserve=50), max_tokens=7).reserve == 7


def test_promised_blocks_keep_others_out_until_they_are_used() -> None:
    ledger = Ledger(10, SIZE)
    first = ledger.open(make_account(prompt=16, reserve=64), max_tokens=1000)
    ledger.join(first, 1)
    second = ledger.open(make_account(prompt=16, reserve=64), max_tokens=1000)
    assert ledger.lets_in(second, Room(free=9, hits=0, running=1))
    assert not ledger.lets_in(second, Room(free=8, hits=0, running=1))
    assert ledger.fits(second, Room(free=8, hits=0, running=1))
    ledger.grew(first, 17)
    assert ledger.lets_in(second, Room(free=8, hits=0, running=1))


def test_a_prefix_that_is_there_is_not_reserved_again() -> None:
    ledger = Ledger(10, SIZE)
    ledger.join(make_account(prompt=16, reserve=0), 1)
    account = ledger.open(make_account(prompt=64, reserve=16), max_tokens=1000)
    assert not ledger.lets_in(account, Room(free=4, hits=0, running=1))
    assert ledger.lets_in(account, Room(free=4, hits=1, running=1))


def test_the_watermark_is_kept_beside_reservations() -> None:
    account = make_account(prompt=16, reserve=16)
    assert Ledger(10, SIZE, watermark_blocks=1).lets_in(account, Room(free=3, hits=0, running=1))
    assert not Ledger(10, SIZE, watermark_blocks=2).lets_in(account, Room(free=3, hits=0, running=1))


def test_an_answer_that_outgrows_its_reservation_is_counted_once() -> None:
    ledger = Ledger(100, SIZE)
    for form in (HELD, POOLED):
        account = make_account(form=form, reserve=3)
        ledger.join(account, 2)
        for generated in range(1, 9):
            ledger.grew(account, generated)
    assert ledger.overshoots == {"chat": 2}
    assert (ledger.firm, ledger.soft) == (0, 0)
