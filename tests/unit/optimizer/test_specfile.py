"""Every fault of a file is one line: where, what was found, what is allowed."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from kvantile_optimizer import specfile
from kvantile_optimizer.errors import InputError
from kvantile_optimizer.plan import Plan
from kvantile_optimizer.spec import ServingPlan

CLASS = """
    - name: chat
      default: true
      slo: {ttftMilliseconds: 1500, tpotMilliseconds: 60}
      demand:
        requestsPerSecond: "12"
        promptTokens: {mean: 1200, p99: 4100}
        outputTokens: {p50: 114, p99: 598, max: 1000}
"""
PLAN = f"""
apiVersion: kvantile.dev/v1alpha1
kind: ServingPlan
metadata: {{name: chat, namespace: llm, labels: {{team: a}}}}
spec:
  model: {{name: meta-llama/Llama-3.1-8B-Instruct, maxModelLen: 16384}}
  nodePools:
    - {{name: l4, gpu: {{type: L4}}, maxGPUs: 4, pricePerGPUHour: "0.80"}}
  classes:{CLASS}"""

DECIMAL = 'a decimal of at least zero in quotes, such as "0.5", of up to 9 digits on a side'


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "spec.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def faults_of(tmp_path: Path, text: str) -> list[str]:
    with pytest.raises(InputError) as caught:
        specfile.load(write(tmp_path, text))
    return str(caught.value).splitlines()


def test_a_plan_and_its_config_map_are_read_and_other_kinds_pass(tmp_path: Path) -> None:
    config_map = "kind: ConfigMap\nmetadata: {name: lengths, namespace: llm}\ndata: {trace.csv: 'a,b'}\n"
    file = specfile.load(write(tmp_path, f"{PLAN}---\n{config_map}---\nkind: Secret\n---\n"))
    assert [plan.metadata.name for plan in file.plans] == ["chat"]
    assert file.plans[0].spec.node_pools[0].max_gpus == 4
    assert file.config_maps == {("llm", "lengths", "trace.csv"): "a,b"}


def test_a_plan_is_read_from_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(PLAN.encode())))
    assert len(specfile.load(None).plans) == 1


@pytest.mark.parametrize(
    ("good", "bad", "line"),
    [
        (
            "ttftMilliseconds: 1500",
            "ttftMilliseconds: fast",
            'spec.classes[0].slo.ttftMilliseconds: found "fast", allowed a whole number from 1 to 86400000',
        ),
        (
            'requestsPerSecond: "12"',
            "requestsPerSecond: 12",
            'spec.classes[0].demand.requestsPerSecond: found 12, allowed a decimal in quotes, such as "12"',
        ),
        (
            'requestsPerSecond: "12"',
            'requestsPerSecond: "many"',
            f'spec.classes[0].demand.requestsPerSecond: found "many", allowed {DECIMAL}',
        ),
        (
            'requestsPerSecond: "12"',
            "requestsPerSecond: -3",
            f"spec.classes[0].demand.requestsPerSecond: found -3, allowed {DECIMAL}",
        ),
        ("default: true", "default: yes", 'spec.classes[0].default: found "yes", allowed true or false'),
        (
            "default: true",
            "default: false",
            "spec: found none, allowed exactly one class with default: true",
        ),
        (
            "maxModelLen: 16384",
            "maxModelLen: .nan",
            "spec.model.maxModelLen: found nan, allowed a finite number",
        ),
        (
            "p50: 114",
            "p50: 700",
            "spec.classes[0].demand.outputTokens: found a mapping of p50, p99, max, allowed p99 at least p50, 700",
        ),
        ("maxGPUs: 4", "maxGPUs: -1", "spec.nodePools[0].maxGPUs: found -1, allowed a whole number from 0 to 100000"),
        (
            "name: l4,",
            "name: L4,",
            'spec.nodePools[0].name: found "L4", allowed lower-case letters, digits and inner hyphens, at most 63',
        ),
        ("spec:", "status:", "spec: found nothing, allowed a mapping with model, nodePools, classes"),
        ("model: {", "model: 3 #", "spec.model: found 3, allowed a mapping with name, maxModelLen"),
        ("kvantile.dev/v1alpha1", "v1", 'apiVersion: found "v1", allowed "kvantile.dev/v1alpha1"'),
        ("gpu: {type: L4}", "gpu: []", "spec.nodePools[0].gpu: found an empty list, allowed a mapping with type"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(tmp_path: Path, good: str, bad: str, line: str) -> None:
    assert good in PLAN
    assert line in faults_of(tmp_path, PLAN.replace(good, bad, 1))


def test_a_misspelt_key_is_named_with_the_one_that_was_meant(tmp_path: Path) -> None:
    lines = faults_of(tmp_path, PLAN.replace("ttftMilliseconds", "ttftMiliseconds"))
    assert lines[0].startswith("spec.classes[0].slo.ttftMiliseconds: found an unknown key, allowed one of deadline")
    assert lines[0].endswith("did you mean ttftMilliseconds?")
    assert lines[1].endswith("(misspelt as ttftMiliseconds?)")


def test_python_names_of_fields_are_not_part_of_the_api(tmp_path: Path) -> None:
    lines = faults_of(tmp_path, PLAN.replace("maxModelLen", "max_model_len"))
    assert any("did you mean maxModelLen?" in line for line in lines)


def test_two_classes_of_one_name_are_refused(tmp_path: Path) -> None:
    twice = PLAN + CLASS.replace("default: true", "default: false")
    assert faults_of(tmp_path, twice) == ["spec: found chat twice, allowed classes of different names"]


def test_all_faults_are_told_sorted_and_with_their_document(tmp_path: Path) -> None:
    first = PLAN.replace("1500", "0").replace('"0.80"', '"-1"')
    lines = faults_of(tmp_path, first + "---\n" + PLAN.replace("60}", "no}"))
    assert [line.split(": found")[0] for line in lines] == [
        "document 1: spec.classes[0].slo.ttftMilliseconds",
        "document 1: spec.nodePools[0].pricePerGPUHour",
        "document 2: spec.classes[0].slo.tpotMilliseconds",
    ]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "found nothing, allowed a ServingPlan"),
        ("---\n---\n", "found nothing, allowed a ServingPlan"),
        ("- a\n", "document 1: found a list of 1, allowed a mapping"),
        ("kind: Deployment\n", "found no ServingPlan but Deployment"),
        ("kind: ServingPlans\n", "did you mean ServingPlan?"),
        ("a: 1\n", "document 1: kind: found nothing"),
        ("kind: A\nb: 1\nb: 2\n", 'spec.yaml:3: found duplicate key "b"'),
        ("a: [1\n", "spec.yaml:2: "),
        ("kind: A\nb: 2024-15-77\n", "allowed YAML"),
        ("[" * 1200, "allowed YAML"),
        ("kind: ServingPlan\nspec: &a {model: *a}\n", "spec.model"),
        ("a: \x07\n", "allowed YAML"),
        ('a: !!int ""\n', "allowed YAML"),
        ("a: !!bool maybe\n", "found 'maybe', allowed YAML"),
        ('kind: "\\e[31mred"\n', r"found no ServingPlan but \u001b[31mred"),
    ],
)
def test_a_file_that_is_no_plan_is_refused_in_words(tmp_path: Path, text: str, part: str) -> None:
    lines = faults_of(tmp_path, text)
    assert any(part in line for line in lines)
    assert not any("http" in line or "Traceback" in line for line in lines)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"gone.yaml: cannot be read: No such file"):
        specfile.load(tmp_path / "gone.yaml")
    (tmp_path / "latin").write_bytes(b"kind: \xff")
    with pytest.raises(InputError, match="not UTF-8"):
        specfile.load(tmp_path / "latin")


def test_shared_parts_do_not_blow_the_check_up(tmp_path: Path) -> None:
    laughs = "\n".join(f"  l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]" for n in range(1, 30))
    lines = faults_of(tmp_path, f"kind: ServingPlan\nmetadata:\n  name: a\n  l0: &l0 [1]\n{laughs}\n")
    assert "spec: found nothing, allowed a mapping with model, nodePools, classes" in lines


def test_merges_of_merges_are_refused_before_they_fill_the_memory(tmp_path: Path) -> None:
    merges = "\n".join(f"l{n}: &l{n}\n  <<: [{', '.join([f'*l{n - 1}'] * 9)}]" for n in range(1, 30))
    (line,) = faults_of(tmp_path, f"kind: ServingPlan\nl0: &l0 {{a: 1, b: 2}}\n{merges}\n")
    assert "more than 10000 merged keys" in line


def test_keys_that_are_no_text_are_named_in_free_mappings_too(tmp_path: Path) -> None:
    lines = faults_of(tmp_path, PLAN.replace("spec:", "spec:\n  engine: {podTemplate: {1: 2}}", 1))
    assert lines == ["spec.engine.podTemplate: found the key 1, allowed text as keys"]


def leaves(schema: dict[str, Any], root: dict[str, Any], seen: set[str]) -> list[dict[str, Any]]:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return [] if name in seen else leaves(root["$defs"][name], root, seen | {name})
    parts = [*schema.get("properties", {}).values(), *schema.get("anyOf", [])]
    parts += [schema[key] for key in ("items", "additionalProperties") if isinstance(schema.get(key), dict)]
    return [schema, *(leaf for part in parts for leaf in leaves(part, root, seen))]


def test_every_pattern_of_the_api_has_words() -> None:
    root = ServingPlan.model_json_schema()
    patterns = {leaf["pattern"] for leaf in leaves(root, root, set()) if "pattern" in leaf}
    assert patterns == set(specfile._PATTERNS)


PLAN_JSON: dict[str, Any] = {
    "version": 1,
    "plan": {"name": "chat", "namespace": "llm"},
    "model": {"name": "m", "servedName": "m", "maxModelLen": 4096},
    "classes": [{"name": "chat", "default": True, "slo": {"ttftSeconds": 1, "tpotSeconds": 0.05}}],
}


def plan_faults(tmp_path: Path, text: str) -> str:
    (tmp_path / "plan.json").write_text(text, encoding="utf-8")
    with pytest.raises(InputError) as caught:
        specfile.load_plan(tmp_path / "plan.json")
    return str(caught.value).replace(f"{tmp_path}/", "")


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_plan_survives_its_way_through_a_file(tmp_path: Path, wrapped: bool) -> None:
    plan = Plan.model_validate(PLAN_JSON)
    (tmp_path / "plan.json").write_text(json.dumps([plan.to_json()] if wrapped else plan.to_json()))
    assert specfile.load_plan(tmp_path / "plan.json") == plan


def test_faults_of_a_plan_name_file_and_field(tmp_path: Path) -> None:
    wrong = {**PLAN_JSON, "model": {**PLAN_JSON["model"], "maxModelLen": 0}, "version": 2}
    assert plan_faults(tmp_path, json.dumps(wrong)).splitlines() == [
        "plan.json: model.maxModelLen: found 0, allowed a whole number above 0",
        "plan.json: version: found 2, allowed 1",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "plan.json:1: "),
        ("[]", "plan.json: found 0 plans, allowed one"),
        ('{"gap": NaN}', "plan.json: found NaN (not a finite number), allowed JSON"),
        ('{"gap": 1, "gap": 2}', 'plan.json: found the key "gap" twice, allowed JSON'),
        ("3", "plan.json: document: found 3, allowed a mapping with plan, model, classes"),
        ("[" * 100_000, "plan.json: found "),
    ],
)
def test_a_file_that_is_no_plan_json_is_refused_in_words(tmp_path: Path, text: str, message: str) -> None:
    assert plan_faults(tmp_path, text).startswith(message)
