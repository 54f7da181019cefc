"""`kvantile report`: a plan's JSON as one page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.command import outcome
from tests.support.small_plan import make_plan


def write_plan(tmp_path: Path) -> str:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(make_plan().to_json()), encoding="utf-8")
    return str(path)


async def test_a_plan_becomes_a_page(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    code, out, err = await outcome("report", write_plan(tmp_path), "-o", str(page))
    assert (code, out) == (0, ""), err
    html = page.read_text(encoding="utf-8")
    assert html.count("<svg") == 2
    assert "Policies side by side" not in html


async def test_the_rows_of_a_comparison_stand_in_the_page(tmp_path: Path) -> None:
    page, rows = tmp_path / "page.html", tmp_path / "rows.json"
    rows.write_text(json.dumps({"rows": [{"policy": "stock", "ttftP99Seconds": 4.25}]}), encoding="utf-8")
    code, _, err = await outcome("report", write_plan(tmp_path), "--simulation", str(rows), "-o", str(page))
    assert code == 0, err
    assert "stock vLLM" in page.read_text(encoding="utf-8")
    assert "4.25" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("text", ["[]", '{"rows": [{"policy": [1]}]}', "[" * 100_000])
async def test_bad_rows_are_exit_2_and_name_the_file(tmp_path: Path, text: str) -> None:
    rows = tmp_path / "rows.json"
    rows.write_text(text, encoding="utf-8")
    code, _, err = await outcome("report", write_plan(tmp_path), "--simulation", str(rows), "-o", str(tmp_path / "p"))
    assert code == 2
    assert "rows.json: " in err
    assert "Traceback" not in err


async def test_an_unwritable_page_is_exit_1(tmp_path: Path) -> None:
    code, _, err = await outcome("report", write_plan(tmp_path), "-o", str(tmp_path / "no" / "page.html"))
    assert code == 1
    assert "cannot be written" in err
