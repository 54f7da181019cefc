"""The layout that everything else relies on.

Four packages in four folders, seams that can be imported where nothing is installed, and documents that are true.
"""

from __future__ import annotations

import ast
import importlib.metadata
import operator
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any, get_args

import pytest

from kvantile_engine.emulator.settings import VllmVersion
from kvantile_engine.plugin import versions
from kvantile_optimizer.spec import Engine
from tests.support import real_vllm
from tests.support.leaks import committed_files, leaks

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("operator", "router", "engine", "optimizer")
SEAMS = ("admission", "waiting", "hint", "plan", "spec", "observation")


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_component_folder_is_not_a_package(folder: str) -> None:
    assert (ROOT / folder).is_dir()
    assert not (ROOT / folder / "__init__.py").exists()


def test_operator_is_the_standard_librarys() -> None:
    assert Path(operator.__file__).parent == Path(os.__file__).parent


def test_the_base_package_depends_on_nothing(project: dict[str, Any]) -> None:
    assert project["project"]["dependencies"] == []
    required = importlib.metadata.requires("kvantile") or []
    assert [name for name in required if "extra ==" not in name] == []


def test_the_seams_are_imported_without_the_solver() -> None:
    program = "import sys\n" + "".join(f"import kvantile_optimizer.{seam}\n" for seam in SEAMS) + "print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert {"numpy", "scipy", "highspy", "matplotlib"}.isdisjoint(ran.stdout.split())


def test_the_rule_imports_nothing() -> None:
    body = ast.parse((ROOT / "optimizer/kvantile_optimizer/admission.py").read_text(encoding="utf-8")).body
    assert [ast.unparse(node) for node in body if isinstance(node, ast.Import | ast.ImportFrom)] == []


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    return next(folder.glob("*.whl"))


def test_the_wheel_holds_every_file_of_the_packages_and_no_other(wheel: Path) -> None:
    files = [path.relative_to(ROOT).parts for path in committed_files(ROOT)]
    expected = {"/".join(parts[1:]) for parts in files if len(parts) > 2 and parts[1] == f"kvantile_{parts[0]}"}
    with zipfile.ZipFile(wheel) as archive:
        assert {name for name in archive.namelist() if ".dist-info/" not in name} == expected


def test_what_the_engine_takes_works_with_nothing_else_installed(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    program = f"import sys; sys.path.append({str(tmp_path)!r})\n" + "\n".join(
        f"import kvantile_engine.plugin.{part}" for part in ("defaults", "ledger", "pages", "settings", "versions")
    )
    subprocess.run([sys.executable, "-I", "-S", "-c", program], check=True)


def test_the_engine_images_version_is_one_that_is_driven_and_spoken() -> None:
    built = re.search(r"^ARG VLLM_IMAGE=(.*:v(.*))$", (ROOT / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)
    assert built is not None
    assert built[1] == Engine().image
    driven = {real_vllm.SERVING, *real_vllm.ALONE}
    assert built[2] in driven
    assert set(get_args(VllmVersion)) == driven
    minors = {tuple(map(int, version.split(".")[:2])) for version in driven}
    assert minors == {(0, minor) for minor in range(versions.TESTED[0][1], versions.TESTED[1][1] + 1)}


def test_no_file_names_a_registry_or_a_path_of_one_machine() -> None:
    assert leaks(ROOT) == []


def test_the_readme_names_the_test_command_that_ci_runs() -> None:
    bash = shutil.which("bash")
    assert bash is not None
    ran = subprocess.run([bash, ".ci/run", "--test-command"], cwd=ROOT, check=False, capture_output=True, text=True)
    assert ran.stdout.strip() == "make test", ran.stderr


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", ".ci/run"])
def test_every_make_command_in_a_document_exists(document: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    text = (ROOT / document).read_text(encoding="utf-8")
    used = set(re.findall(r"(?:^|`|\$ |timed )\s*make ([a-z-]+)\b", text, re.MULTILINE))
    assert used <= targets


def test_every_make_target_is_explained_by_help() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    phony = re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    assert phony is not None
    explained = set(re.findall(r"^([a-z-]+):.*## ", makefile, re.MULTILINE))
    assert explained == set(phony[1].split()) - {"environment"}


def test_the_installed_version_is_the_projects(project: dict[str, Any]) -> None:
    assert importlib.metadata.version("kvantile") == project["project"]["version"]


def test_the_changelog_has_a_place_for_what_comes_next() -> None:
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert headings[0] == "[Unreleased]"
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d{2}-\d{2}", heading) for heading in headings[1:])


@pytest.mark.parametrize("file", ["dev", "build", "compile", "optimizer", "router", "engine", "operator"])
def test_every_direct_dependency_is_pinned_with_hashes(file: str, project: dict[str, Any]) -> None:
    extras, groups = project["project"]["optional-dependencies"], project["dependency-groups"]
    everything = [*extras["local"], *groups["build"], *groups["test"], *groups["lint"]]
    wanted = everything if file == "dev" else extras.get(file) or groups[file]
    names = {re.split(r"[\[>=]", requirement)[0] for requirement in wanted} - {"kvantile"}
    text = (ROOT / "requirements" / f"{file}.txt").read_text(encoding="utf-8")
    pins = re.findall(r"^([a-z0-9-]+)==.*\\\n    --hash=sha256:", text, re.MULTILINE)
    assert names <= set(pins)
    assert len(pins) == len(re.findall(r"^[a-z]", text, re.MULTILINE))
