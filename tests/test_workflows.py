"""The workflows can't run here: that they parse, and that what they call exists, is what can be checked."""

import fnmatch
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

from cutlass_fmha import cli

ROOT = Path(__file__).resolve().parents[1]
TEXTS = {file.stem: file.read_text(encoding="utf-8") for file in (ROOT / ".github" / "workflows").glob("*.yml")}
WORKFLOWS: dict[str, dict[Any, Any]] = {name: yaml.safe_load(text) for name, text in TEXTS.items()}
JOBS = {name: workflow["jobs"] for name, workflow in WORKFLOWS.items()}
TRIGGERS = True  # "on" is a boolean to YAML 1.1
MAKEFILE, PYPROJECT = ((ROOT / name).read_text() for name in ("Makefile", "pyproject.toml"))
(TARGETS,) = re.findall(r"^\.PHONY: (demo .*)$", MAKEFILE, re.MULTILINE)


def steps(name: str) -> list[dict[str, Any]]:
    return [step for job in JOBS[name].values() for step in job.get("steps", ())]


@pytest.mark.parametrize("name", WORKFLOWS)
def test_jobs_have_limits_and_need_and_run_what_there_is(name: str):
    """What a workflow that ours call asks for, the caller has: GitHub refuses the whole file, otherwise. A run waits in
    a group of its own ref alone: GitHub cancels what waits when another comes."""
    commands = "\n".join(step.get("run", "") for step in steps(name))
    assert {*re.findall(r"\bmake (\w[\w-]*)", commands)} <= {*TARGETS.split()}
    assert {*re.findall(r"(?<!dist )\bcutlass-fmha (\w+)", commands)} <= {*cli.COMMANDS}
    paths = re.findall(r"(?<![\w/.])((?:\.ci|tools|requirements)/[\w./-]+)", commands)
    paths += [f"tests/{test}" for test in re.findall(r"\btest_\w+\.py", commands)]
    assert not [path for path in paths if not (ROOT / path).is_file()]
    workflow, jobs = WORKFLOWS[name], JOBS[name]
    assert workflow["permissions"] == {"contents": "read"} and "concurrency" in workflow
    groups = [at["concurrency"]["group"] for at in (workflow, *jobs.values()) if "concurrency" in at]
    assert all("${{ github.ref }}" in group for group in groups)
    for job in jobs.values():
        needs = job.get("needs", [])
        assert set([needs] if isinstance(needs, str) else needs) <= set(jobs)
        if local := job.get("uses"):
            called = Path(local).stem
            assert "workflow_call" in WORKFLOWS[called][TRIGGERS]
            wanted = {scope for each in JOBS[called].values() for scope in each.get("permissions", {})}
            assert wanted <= set(job.get("permissions", ["contents"]))
        else:
            assert 0 < job["timeout-minutes"] <= 360
    for step in steps(name):
        assert ("uses" in step) != ("run" in step)
        assert re.search(r"@(v\d|release/v\d)|:\d+\.\d+\.\d+$", step.get("uses", "x@v1"))


def test_gates_and_a_release_wait_for_every_job_and_the_tests_of_each_wheel_and_no_token_is_kept():
    for name, last in (("ci", "gate"), ("gpu", "gpu-gate"), ("release", "publish")):
        assert set(JOBS[name][last]["needs"]) == set(JOBS[name]) - {last}
        assert last == "publish" or JOBS[name][last]["if"] == "always()"
    publish = JOBS["release"]["publish"]
    assert publish["permissions"]["id-token"] == "write" and publish["environment"] == "pypi"
    assert "secrets." not in TEXTS["release"]
    # All have code for the GPUs that one list names, in pyproject.toml.
    assert "CUDAARCHS = " in PYPROJECT and not any("CUDAARCHS" in text for text in TEXTS.values())
    made, tested = (JOBS["release"][name]["strategy"]["matrix"] for name in ("wheels", "wheel-test"))
    assert [f"cp{python.replace('.', '')}" for python in tested["python"]] == made["python"]
    (listed,) = re.findall(r'^build = "(.*)"$', PYPROJECT, re.MULTILINE)
    assert listed.split() == [f"{python}-*" for python in made["python"]]
    assert tested["runner"] == made["runner"] and tested["torch"] == ["torch"]
    assert [row["torch"] for row in tested["include"]] == ["torch==2.6.0"]
    assert JOBS["release"]["wheel-test"]["needs"] == "wheels"
    lines = "\n".join(step.get("run", "") for step in JOBS["release"]["wheel-test"]["steps"])
    assert re.search(r"^WHEEL=\S+ \.\./\.venv/bin/python -m pytest test_wheel\.py$", lines, re.MULTILINE)


class Context(dict[str, Any]):
    """What an expression looks names up in: one that isn't there is empty."""

    def __getattr__(self, name: str) -> Any:
        found = self.get(name, {})
        return Context(found) if isinstance(found, dict) else found


def value(expression: str, **contexts: Any) -> Any:
    """What GitHub makes of an expression, of the operators and functions that gpu.yml has."""
    python = expression.strip().removeprefix("${{").removesuffix("}}").replace(".labels.*.name", ".labels")
    python = python.replace("needs.*.result", "[job['result'] for job in needs.values()]")
    names = {name: Context(context) for name, context in contexts.items()}
    python = python.replace("&&", " and ").replace("||", " or ").strip()
    return eval(python, {"contains": lambda where, what: what in where, **names})


(FILTER,) = JOBS["gpu"]["changes"]["steps"]
FILTERS = yaml.safe_load(FILTER["with"]["filters"])
PATHS = {"kernels": FILTERS["kernels"], "seen": [*FILTERS["seen"][0], *FILTERS["seen"][1:]]}


def filtered(name: str, *paths: str) -> bool:
    return any(fnmatch.fnmatch(path, pattern) for path in paths for pattern in PATHS[name])


def gpu_run(paths: Iterable[str], result: str = "success", **github: Any) -> tuple[bool, str, bool]:
    """A run of gpu.yml, whose GPUs end with ``result``: does it use them, what is its check called, does that pass?"""
    github = {"event_name": "pull_request", "repository": "ours/it", **github}
    changes, wheel, parity, gate = (JOBS["gpu"][name] for name in ("changes", "wheel", "parity", "gpu-gate"))
    needs: dict[str, Any] = {name: {"result": "skipped"} for name in gate["needs"]}
    assert wheel["needs"] == "changes" and parity["needs"] == "wheel" and "if" not in parity
    if value(changes["if"], github=github):
        outputs = {name: str(filtered(name, *paths)).lower() for name in PATHS}
        steps = {"filter": {"outputs": outputs if github["event_name"] == "pull_request" else {}}}
        told = {name: value(text, github=github, steps=steps) for name, text in changes["outputs"].items()}
        needs["changes"] = {"result": "success", "outputs": {name: str(it).lower() for name, it in told.items()}}
        if value(wheel["if"], github=github, needs=needs):
            needs |= {"wheel": {"result": "success"}, "parity": {"result": result}}
    failing = [value(step["if"], needs=needs) for step in gate["steps"]]
    assert all("exit 1" in step["run"] for step in gate["steps"])
    return needs["parity"]["result"] != "skipped", value(gate["name"], github=github), not any(failing)


def event(action: str, *labels: str, repository: str = "ours/it", given: str | None = None) -> dict[str, Any]:
    pull_request = {"labels": list(labels), "head": {"repo": {"full_name": repository}}}
    return {"event": {"action": action, "pull_request": pull_request} | ({"label": {"name": given}} if given else {})}


KERNEL, PYTHON, PAGE = ["src/core/visibility.h", "docs/proof.md"], ["cutlass_fmha/errors.py"], ["docs/proof.md"]
KERNELS = (KERNEL, ["cmake/Wide.cmake"], ["CMakeLists.txt"], ["cutlass_fmha/launch/plan.py"], ["pyproject.toml"])
PUSHES = ("opened", "synchronize", "reopened")
LABELLED = event("labeled", "gpu", given="gpu")
OTHER, FORK = {"given": "question"}, {"repository": "theirs/it"}


def test_who_uses_the_gpus_and_what_the_check_says_then():
    """A change of kernels has to have been there; a fork gets there by a label given anew; another label neither uses
    a GPU nor reports as the required check."""
    for action in PUSHES:
        assert gpu_run(KERNEL, **event(action, "gpu")) == (True, "gpu-gate", True)
        assert gpu_run(KERNEL, **event(action, "gpu", **FORK)) == (False, "gpu-gate", False)
        assert {gpu_run(paths, **event(action)) for paths in KERNELS} == {(False, "gpu-gate", False)}
    for paths in (PYTHON, PAGE, ["tests/test_cpu.py"]):
        assert gpu_run(paths, **event("opened")) == (False, "gpu-gate", True)
        assert gpu_run(paths, **LABELLED) == (paths != PAGE, "gpu-gate", True)
    for repository in ({}, FORK):
        assert gpu_run(KERNEL, **event("labeled", "gpu", given="gpu", **repository)) == (True, "gpu-gate", True)
        other = event("labeled", "gpu", "question", **OTHER, **repository)
        assert gpu_run(KERNEL, **other) == (False, "another label", True)
    for result in ("success", "failure", "cancelled"):
        ended = (True, "gpu-gate", result == "success")
        for name in ("push", "workflow_dispatch"):
            assert gpu_run([], result, event_name=name, event={}) == ended
        assert {gpu_run(x, result, **event("synchronize", "gpu")) for x in (KERNEL, PYTHON)} == {ended}
    group = re.sub(r"^.*(\$\{\{.*\}\})$", r"\1", WORKFLOWS["gpu"]["concurrency"]["group"].replace("github.ref }}", ""))
    for of, own in ((event("labeled", "gpu", **OTHER), "7"), (LABELLED, ""), (event("synchronize"), "")):
        assert value(group, github={**of, "run_id": "7"}) == own


def test_the_gpu_gate_reports_on_every_pull_request_and_knows_what_kernels_depend_on():
    triggers = WORKFLOWS["gpu"][TRIGGERS]
    assert triggers["pull_request"] == {"types": [*PUSHES, "labeled"]}
    narrow = {a for a in PATHS["seen"] for b in PATHS["seen"] if a != b and fnmatch.fnmatch(a, b)}
    assert set(triggers["push"]["paths"]) == set(PATHS["seen"]) - narrow
    ((files, folders),) = re.findall(r"^BUILD_INPUTS := (.*) \$\(shell find (.*) -type f", MAKEFILE, re.MULTILINE)
    inputs = {*files.split(), *(f"{folder}/x" for folder in folders.split())} - {"tools/source_hash.py"}
    launching = (file for file in (ROOT / "cutlass_fmha").rglob("*.py") if "_C.launch(" in file.read_text())
    inputs |= {path.relative_to(ROOT).as_posix() for path in launching}
    inputs -= {"cutlass_fmha/jax/calls.py"}  # there is no JAX on these machines
    assert not [path for path in inputs if not filtered("kernels", path)]
    for path in ("Makefile", ".ci/install_nvcc", ".github/workflows/gpu.yml", "tests/oracle.py"):
        assert filtered("seen", path)
    assert all((ROOT / pattern.removesuffix("/**")).exists() for pattern in PATHS["seen"])
