"""The workflows can't run here: that they parse, and that what they call exists, is what can be checked."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from cutlass_fmha import cli

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = {file.stem: file for file in (ROOT / ".github" / "workflows").glob("*.yml")}
TARGETS = re.search(r"^\.PHONY: (demo .*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)


def load(name: str) -> dict[Any, Any]:
    return yaml.safe_load(WORKFLOWS[name].read_text(encoding="utf-8"))


def steps(name: str) -> list[dict[str, Any]]:
    return [step for job in load(name)["jobs"].values() for step in job.get("steps", ())]


def commands(name: str) -> list[str]:
    return [line.strip() for step in steps(name) for line in step.get("run", "").splitlines()]


@pytest.mark.parametrize("name", WORKFLOWS)
def test_what_a_workflow_runs_exists(name: str):
    assert TARGETS is not None
    for command in commands(name):
        for target in re.findall(r"\bmake (\w[\w-]*)", command):
            assert target in TARGETS[1].split(), command
        for asked in re.findall(r"\bcutlass-fmha (\w+)", command.replace("find-links dist cutlass-fmha", "")):
            assert asked in cli.COMMANDS, command
        for path in re.findall(r"(?<![\w/.])((?:\.ci|tools|requirements)/[\w./-]+)", command):
            assert (ROOT / path).is_file(), command
        for test in re.findall(r"\btest_\w+\.py", command):
            assert (ROOT / "tests" / test).is_file(), command


@pytest.mark.parametrize("name", WORKFLOWS)
def test_jobs_have_limits_and_need_what_there_is(name: str):
    workflow = load(name)
    assert workflow["permissions"] == {"contents": "read"} and "concurrency" in workflow
    jobs = workflow["jobs"]
    for job in jobs.values():
        needs = job.get("needs", [])
        assert set([needs] if isinstance(needs, str) else needs) <= set(jobs)
        if local := job.get("uses"):
            assert "workflow_call" in load(Path(local).stem)[True]  # "on" is a boolean to YAML 1.1
        else:
            assert 0 < job["timeout-minutes"] <= 360
    for step in steps(name):
        assert ("uses" in step) != ("run" in step)
        assert re.search(r"@(v\d|release/v\d)|:\d+\.\d+\.\d+$", step.get("uses", "x@v1"))


def test_the_gate_waits_for_every_job():
    jobs = load("ci")["jobs"]
    assert set(jobs["gate"]["needs"]) == set(jobs) - {"gate"} and jobs["gate"]["if"] == "always()"


def test_a_release_waits_for_everything_and_keeps_no_token():
    jobs = load("release")["jobs"]
    publish = jobs["publish"]
    assert set(publish["needs"]) == set(jobs) - {"publish"}
    assert publish["permissions"]["id-token"] == "write" and publish["environment"] == "pypi"
    assert "secrets." not in WORKFLOWS["release"].read_text()


def test_wheels_of_all_workflows_have_code_for_the_same_gpus():
    """One list, in pyproject.toml, for pull requests, parity runs and the release."""
    listed = re.findall(r"CUDAARCHS = \"([\d;]+)\"", (ROOT / "pyproject.toml").read_text())
    texts = {name: file.read_text() for name, file in WORKFLOWS.items() if "cibuildwheel" in file.read_text()}
    assert listed == ["80;89;90;120"] and set(texts) == {"ci", "gpu", "release"}
    assert not any("CUDAARCHS" in text for text in texts.values())


def test_pull_requests_reach_our_own_machines_with_a_label_alone():
    for name in WORKFLOWS:
        own = [job for job in load(name)["jobs"].values() if "self-hosted" in str(job.get("runs-on"))]
        assert not own or (name == "gpu" and load(name)[True]["pull_request"] == {"types": ["labeled"]})
