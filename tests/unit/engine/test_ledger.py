"""The ledger of running requests: its sums are those that a recount by the rule would give, after every event."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from kvantile_engine.plugin.ledger import Account, Ledger, Room
from kvantile_optimizer.admission import HELD, NONE, POOLED, blocks_for, running_firm_blocks, soft_millitokens

SIZE = 16


def make_account(
    prompt: int = 32, form: int = HELD, reserve: int = 64, phi: int = 1000, *, name: str = "request"
) -> Account:
    return Account(name, prompt, form, reserve, phi, class_name="chat", answer=[])


def grow(account: Account, generated: int) -> None:
    """Gives its answer so many tokens."""
    assert isinstance(account.answer, list)
    account.answer[:] = [0] * generated


def catch_up(ledger: Ledger, **allocated: int) -> None:
    """With the blocks of the requests whose prompt is being computed."""
    ledger.catch_up(allocated.__getitem__)


@dataclass(slots=True)
class Running:
    """A request as the test knows it."""

    account: Account
    allocated: int
    output: int

    @property
    def generated(self) -> int:
        return len(self.account.answer)

    def firm(self) -> int:
        item = self.account
        return running_firm_blocks(item.form, item.prompt, self.generated, item.reserve, self.allocated, SIZE)

    def soft(self) -> int:
        item = self.account
        return soft_millitokens(item.form, self.generated, item.reserve, item.pooling_per_mille)


@pytest.mark.parametrize("seed", range(20))
def test_the_sums_are_those_of_a_recount(seed: int) -> None:
    rng = random.Random(seed)
    ledger, running = Ledger(1000, SIZE), dict[str, Running]()
    for step in range(400):
        if rng.random() < 0.2:
            form, name = rng.choice((NONE, HELD, POOLED)), str(step)
            reserve, phi = rng.randint(0, 120), rng.choice((0, 100, 250, 1000))
            account = make_account(rng.randint(1, 200), form, reserve, phi, name=name)
            ledger.open(account, max_tokens=rng.choice((50, 10_000)))
            running[name] = Running(account, 1, rng.randint(1, 150))
            ledger.join(account, 1)
        for name, item in list(running.items()):
            if item.allocated < blocks_for(item.account.prompt, SIZE):
                item.allocated += 1
                continue
            if new := rng.choice((0, 1, 1, 1, 2)):
                grow(item.account, item.generated + new)
                item.allocated = blocks_for(item.account.prompt + item.generated, SIZE)
            if item.generated >= item.output or rng.random() < 0.01:
                ledger.leave(running.pop(name).account)
        if rng.random() < 0.5:
            catch_up(ledger, **{name: item.allocated for name, item in running.items()})
            assert ledger.firm == sum(item.firm() for item in running.values())
            assert ledger.soft == sum(item.soft() for item in running.values())
    for item in running.values():
        ledger.leave(item.account)
        ledger.leave(item.account)
    assert (ledger.firm, ledger.soft) == (0, 0)


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
    grow(first, 17)
    catch_up(ledger)
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
            grow(account, generated)
            catch_up(ledger)
        ledger.leave(account)
        ledger.join(account, 3)
        ledger.leave(account)
    assert ledger.overshoots == {"chat": 2}
    assert (ledger.firm, ledger.soft) == (0, 0)


def test_an_answer_that_ends_before_anybody_asks_is_counted() -> None:
    ledger = Ledger(100, SIZE)
    for reserve in (3, 4):
        account = make_account(reserve=reserve)
        ledger.join(account, 2)
        grow(account, 4)
        ledger.leave(account)
    assert ledger.overshoots == {"chat": 1}


def test_another_groups_blocks_are_wanted_beside_what_is_promised_there() -> None:
    ledger = Ledger(100, SIZE)
    ledger.join(make_account(prompt=16, reserve=32), 1)
    ledger.join(make_account(prompt=16, form=POOLED, reserve=32, phi=500), 1)
    account = make_account(prompt=16, form=POOLED, reserve=32, phi=500)
    assert ledger.wanted(account, hits=0, running=0) == 1
    # Its prompt's block, two of the held, and two for twice 16 tokens of the pooled.
    assert ledger.wanted(account, hits=0, running=2) == 5
    assert ledger.holding == 2


def test_a_moving_window_keeps_a_block_for_as_long_as_it_runs() -> None:
    ledger = Ledger(100, SIZE, swing=1)
    account = make_account(prompt=16, reserve=16)
    assert ledger.wanted(account, hits=0, running=1) == 3
    ledger.join(account, 1)
    for generated in (1, 16, 17, 40):
        grow(account, generated)
        catch_up(ledger)
        assert ledger.firm == 1
    ledger.leave(account)
    assert ledger.firm == 0
