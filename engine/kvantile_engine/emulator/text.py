"""What stands in for a tokenizer and a language model: token counts, prefix hashes, answer lengths and words.

Four characters are a token on the way in, a word is a token on the way out. How long an answer gets is drawn from a
log-normal whose median and P90 are those of the Azure conversation trace of 2023 (114 and 421 tokens), keyed by seed
and prompt, so that the same prompt always gets the same answer.
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterable, Sequence

CHARACTERS_PER_TOKEN = 4
LENGTH_LOG_MEAN, LENGTH_LOG_DEVIATION = 4.736, 1.02
SENTENCE = (
    "the plan keeps a share of memory for every answer because nobody knows in advance how long one will be and so "
    "each request waits until its place is there then it runs without being moved again while shorter ones pass by "
    "in most cases this costs little but when many long answers meet at once some blocks must be given back later"
)
WORDS = SENTENCE.split()
UNKNOWN = ord("?")


def token_count(prompt: str | Sequence[int]) -> int:
    """Tokens of a prompt: about four characters each, or as many as were given."""
    if isinstance(prompt, str):
        return max(1, -(-len(prompt) // CHARACTERS_PER_TOKEN))
    return len(prompt)


def block_hashes(prompt: str | Sequence[int], block_size: int, tokens: int) -> tuple[int, ...]:
    """Hashes of the prompt's full blocks within its first `tokens` tokens, each over all that comes before."""
    width = block_size * CHARACTERS_PER_TOKEN if isinstance(prompt, str) else block_size
    full = min(len(prompt) // width, tokens // block_size)
    return _chain(_hashable(prompt[i * width : (i + 1) * width]) for i in range(full))


def named_hashes(prefix_id: str, block_size: int, tokens: int) -> tuple[int, ...]:
    """Hashes of the full blocks in a prefix of `tokens` tokens that is known by its name alone."""
    return _chain((prefix_id, i) for i in range(tokens // block_size))


def answer_tokens(seed: int, prompt: str | Sequence[int], count: int) -> list[int]:
    """How long the first `count` answers to a prompt get when nothing cuts them."""
    key = f"{seed}/{prompt if isinstance(prompt, str) else list(prompt)}"
    draw = random.Random(key.encode("utf-8", "surrogatepass"))
    return [max(1, round(draw.lognormvariate(LENGTH_LOG_MEAN, LENGTH_LOG_DEVIATION))) for _ in range(count)]


def words(key: int, start: int, stop: int) -> str:
    """Words `start` to `stop` of the answer of that key; chunks concatenate."""
    text = " ".join(WORDS[(key + i) % len(WORDS)] for i in range(start, stop))
    return text if start == 0 or not text else f" {text}"


def length(key: int, stop: int) -> int:
    """Characters of the first `stop` words of the answer of that key."""
    rounds, rest = divmod(stop, len(WORDS))
    tail = sum(len(WORDS[(key + i) % len(WORDS)]) + 1 for i in range(rest))
    return max(0, rounds * (len(SENTENCE) + 1) + tail - 1)


def token_ids(prompt: str) -> list[int]:
    """An id for each token: its characters, 15 bits each, so that `shown` can give them back."""
    pieces = [prompt[i : i + CHARACTERS_PER_TOKEN] for i in range(0, len(prompt), CHARACTERS_PER_TOKEN)] or [""]
    codes = ([code if (code := ord(character)) < 1 << 15 else UNKNOWN for character in piece] for piece in pieces)
    return [sum(code << 15 * place for place, code in enumerate(piece)) for piece in codes]


def shown(prompt: str | Sequence[int]) -> str:
    """A prompt as text; of ids that `token_ids` did not make, something."""
    if isinstance(prompt, str):
        return prompt
    codes = (token >> 15 * place & 0x7FFF for token in prompt for place in range(CHARACTERS_PER_TOKEN))
    return "".join(chr(code) for code in codes if code)


def _chain(pieces: Iterable[Hashable]) -> tuple[int, ...]:
    hashes: list[int] = []
    for piece in pieces:
        hashes.append(hash((hashes[-1] if hashes else 0, piece)))
    return tuple(hashes)


def _hashable(piece: str | Sequence[int]) -> Hashable:
    return piece if isinstance(piece, str) else tuple(piece)
