"""The plug-in's settings and its file of defaults: what they mean, and what is said of those that are no good."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvantile_engine.plugin.defaults import Defaults, DefaultsFile, parse
from kvantile_engine.plugin.pages import Group, Kind, Pages, pages_of
from kvantile_engine.plugin.settings import Settings
from kvantile_optimizer.hint import Hint

GOOD = {
    "default": {"reserveTokens": 400, "pooling": 0.25},
    "classes": {"chat": {"reserveTokens": 600}, "batch": {"ttftBudgetSeconds": 30}},
}


def test_defaults_say_what_a_hint_says() -> None:
    found = parse(json.dumps(GOOD).encode())
    assert found.of(None) == found.of("unheard") == Hint(400, 0.25)
    assert found.of("chat") == Hint(600)
    assert found.of("batch") == Hint(ttft_budget_s=30.0)


def test_a_request_says_more_than_its_class() -> None:
    default = Hint(400, 0.25, None, 2.0)
    assert Hint(class_name="chat").or_else(default) == Hint(400, 0.25, "chat", 2.0)
    assert Hint(100).or_else(default) == Hint(100, None, None, 2.0)
    assert Hint(100, 0.5, "chat", 1.0).or_else(default) == Hint(100, 0.5, "chat", 1.0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "Expecting"),
        ("[]", "expected an object with default and classes"),
        ('{"clases": {}}', "clases: no such field"),
        ('{"classes": []}', "classes: expected an object"),
        ('{"default": 3}', "default: expected an object"),
        ('{"default": {"reserve": 3}}', "default.reserve: no such field, allowed reserveTokens"),
        ('{"classes": {"chat": {"reserveTokens": -1}}}', "classes.chat.reserveTokens: found -1"),
        ('{"default": {"pooling": NaN}}', "default.pooling: found nan"),
        ('{"default": {"ttftBudgetSeconds": "soon"}}', "default.ttftBudgetSeconds: found 'soon'"),
    ],
)
def test_a_bad_file_names_the_field(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said.replace("(", r"\(")):
        parse(text.encode())


def test_a_changed_file_is_taken_up_and_a_broken_one_is_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, now = tmp_path / "defaults.json", [0.0]
    path.write_text(json.dumps(GOOD))
    file = DefaultsFile(path, lambda: now[0])
    file.load()
    file.follow()
    good = file.current

    def write(text: str) -> None:
        other = tmp_path / "other"
        other.write_text(text)
        other.replace(path)
        now[0] += 2

    write("{")
    for _ in range(3):
        file.follow()
        now[0] += 2
    assert (file.current, file.faults) == (good, 1)
    assert caplog.text.count("stays in force") == 1
    path.unlink()
    now[0] += 2
    file.follow()
    assert (file.current, file.faults) == (good, 2)
    write("{}")
    file.follow()
    assert (file.current, file.faults) == (Defaults(), 2)


def test_a_file_that_is_broken_from_the_start_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"defaults\.json: .*No such file"):
        DefaultsFile(tmp_path / "defaults.json", lambda: 0.0).load()


def test_settings_come_from_variables() -> None:
    assert Settings.of({}) == Settings()
    found = Settings.of({"KVANTILE_ENGINE_DEFAULTS": "/x.json", "KVANTILE_ENGINE_ORDER": "fcfs"})
    assert (found.defaults, found.order) == (Path("/x.json"), "fcfs")
    with pytest.raises(ValueError, match="KVANTILE_ENGINE_ORDER: found 'lifo', allowed fcfs, deadline, slack"):
        Settings.of({"KVANTILE_ENGINE_ORDER": "lifo"})


def test_a_hybrid_models_groups_are_counted_by_kind() -> None:
    window, full = Kind(16, 100, 65), Kind(16)
    pages = pages_of([window, full, window, full])
    assert pages == Pages(Group(full, 1, copies=2), (Group(window, 0, copies=2),))
    assert pages.blocks_per_row == 2
    assert pages_of([window]) is None


@pytest.mark.parametrize(
    ("prompt", "generated", "reserve", "found"),
    [
        (20, 0, 30, (20, 30)),  # below the window: as it is
        (20, 0, 300, (20, 60)),  # an answer that fills the window
        (500, 0, 30, (160, 0)),  # a prompt that is computed in large chunks takes more than an answer ever will
        (20, 40, 300, (20, 60)),  # one that comes back, with what it had of its answer
        (20, 400, 500, (-240, 400)),  # the same, beyond the window: 160 again
    ],
)
def test_a_window_takes_no_more_than_it_shows(
    prompt: int, generated: int, reserve: int, found: tuple[int, int]
) -> None:
    assert Kind(16, 10, 5).lengths(prompt, generated, reserve) == found
    assert Kind(16).lengths(prompt, generated, reserve) == (prompt, reserve)
