"""A model that vLLM starts with at once: a Llama of random weights over bytes, made on the spot, nothing downloaded.

vLLM makes the weights (`--load-format dummy`); here are its configuration, and a tokenizer in which every byte is a
token, so that a prompt of n ASCII characters has n tokens (vLLM puts no token before it).
"""

from __future__ import annotations

import json
from pathlib import Path

BYTES = 256
END = BYTES
"""The token after the bytes: the end of an answer."""
LONGEST = 8192
"""Tokens of a sequence."""
END_TEXT = "<|end|>"


def make_model(folder: Path, *, hidden: int = 64, layers: int = 2) -> Path:
    """Writes the model's files into `folder`, and returns it. Heads have 32 dimensions, vLLM's least on the CPU."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (
        ("config.json", _config(hidden, layers)),
        ("tokenizer.json", _tokenizer()),
        ("tokenizer_config.json", _tokenizer_config()),
    ):
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return folder


def _config(hidden: int, layers: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 32,
        "num_key_value_heads": hidden // 32,
        "head_dim": 32,
        "hidden_act": "silu",
        "vocab_size": BYTES + 1,
        "max_position_embeddings": LONGEST,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "bos_token_id": END,
        "eos_token_id": END,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": True,
    }


def _tokenizer() -> dict[str, object]:
    end = {"id": END, "content": END_TEXT, "single_word": False, "lstrip": False, "rstrip": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{**end, "normalized": False, "special": True}],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {"type": "BPE", "vocab": {**_alphabet(), END_TEXT: END}, "merges": []},
    }


def _alphabet() -> dict[str, int]:
    """A visible character for each byte, as byte-level tokenizers write them: its own, or else one from 256 on."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(BYTES) if byte not in visible]
    characters = {byte: chr(byte) for byte in visible} | {byte: chr(BYTES + place) for place, byte in enumerate(hidden)}
    return {characters[byte]: byte for byte in range(BYTES)}


def _tokenizer_config() -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_TEXT,
        "model_max_length": LONGEST,
        "clean_up_tokenization_spaces": False,
        "chat_template": "{% for message in messages %}{{ message['content'] }}{% endfor %}",
    }
