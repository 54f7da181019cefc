"""The replicas' memory is put on the replay's clock and added up."""

from __future__ import annotations

import numpy as np
import pytest

from kvantile_optimizer.local import probe

COLUMNS = ["engineSeconds", "kvUsedTokens", "kvCommittedTokens", "running", "waiting", "preemptions"]


def make_trace(*samples: tuple[float, int, int], now_s: float = 100.0) -> dict[str, object]:
    return {"columns": COLUMNS, "samples": [(*sample, 0, 0, 0) for sample in samples], "engineSecondsNow": now_s}


def test_a_replicas_clock_is_moved_to_the_replays() -> None:
    memory = probe.memory_of(make_trace((90.0, 5, 6), (95.0, 7, 8)), now_s=20.0)
    assert memory.time_s == pytest.approx([10.0, 15.0])
    assert memory.committed_tokens == pytest.approx([6, 8])


def test_a_replica_without_samples_adds_nothing() -> None:
    kv = probe.together([probe.memory_of(make_trace(), 20.0)], 100.0, 10.0)
    assert not kv.used_tokens.any()


def test_replicas_add_up_and_keep_their_last_value() -> None:
    first = probe.memory_of(make_trace((0.0, 10, 20)), now_s=100.0)
    second = probe.memory_of(make_trace((5.0, 1, 2), (6.0, 3, 4)), now_s=100.0)
    kv = probe.together([first, second], 100.0, 10.0)
    used = np.interp([1.0, 5.5, 9.0], kv.time_s, kv.used_tokens)
    assert used == pytest.approx([10, 11, 13])
    assert kv.committed_tokens[-1] == 24


def test_preemptions_are_read_whatever_the_labels() -> None:
    text = '# TYPE x counter\nvllm:num_preemptions_total{model_name="m"} 3.0\nvllm:num_preemptions_total 4.0\n'
    assert [float(found) for found in probe.PREEMPTIONS.findall(text)] == [3.0, 4.0]
