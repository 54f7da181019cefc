"""What a real engine's processes are given: variables that a spec names, GPUs that are shown, our packages alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvantile_optimizer.errors import InputError, WorkError
from kvantile_optimizer.local import vllm
from kvantile_optimizer.spec import Engine

SECRET = {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}


def test_variables_are_the_specs_and_secrets_are_those_of_this_machine() -> None:
    given: list[dict[str, Any]] = [{"name": "A", "value": "1"}, SECRET, {"name": "B"}]
    assert vllm.variables(given, {"HF_TOKEN": "mine", "A": "other"}) == {"A": "1", "HF_TOKEN": "mine", "B": ""}


def test_a_secret_that_is_not_here_is_named() -> None:
    with pytest.raises(InputError, match=r"spec\.engine\.env\[0\]\.valueFrom: .* set HF_TOKEN"):
        vllm.variables([SECRET], {})


def test_the_gpus_that_are_shown_are_all_there_are() -> None:
    assert vllm.gpus({"CUDA_VISIBLE_DEVICES": "3, 1"}) == (("3", "1"), {})
    assert vllm.gpus({"CUDA_VISIBLE_DEVICES": ""}) == ((), {})


def test_the_folder_of_our_packages_has_nothing_else(tmp_path: Path) -> None:
    vllm.link_packages(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kvantile_engine", "kvantile_optimizer"]
    found = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.append({str(tmp_path)!r}); import kvantile_engine"],
        check=False,
    )
    assert found.returncode == 0


def test_an_interpreter_without_vllm_is_refused_by_its_flag() -> None:
    with (
        pytest.raises(WorkError, match=r"(?s)has no vLLM to run: vLLM is not installed.*--vllm-python"),
        vllm.prepared(sys.executable, Engine()),
    ):
        pytest.fail("it was found")


@pytest.mark.parametrize(("reservation", "is_refused"), [("Auto", True), ("None", True), ("Advisory", False)])
def test_a_version_that_was_not_tested_will_do_where_the_plug_in_is_not_used(
    tmp_path: Path, reservation: str, *, is_refused: bool
) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").touch()
    information = tmp_path / "vllm-9.1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 9.1.0\n")
    (information / "top_level.txt").write_text("vllm\n")
    wanted = Engine.model_validate(
        {"reservation": reservation, "env": [{"name": "PYTHONPATH", "value": str(tmp_path)}], "args": ["--swap", "1"]}
    )
    if is_refused:
        with (
            pytest.raises(WorkError, match=r"vLLM 9\.1\.0: the plug-in was tested"),
            vllm.prepared(sys.executable, wanted),
        ):
            pytest.fail("it was not refused")
    else:
        with vllm.prepared(sys.executable, wanted) as found:
            assert found.arguments == ("--swap", "1")
            assert not found.keeps
