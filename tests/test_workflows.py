"""The workflows can't run here: that they parse, and that what they call exists, is what can be checked."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable
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


def test_workflows_that_others_call_may_ask_for_no_more_than_the_caller_has():
    """GitHub refuses the whole file, otherwise."""
    for name in WORKFLOWS:
        for caller in load(name)["jobs"].values():
            if "uses" in caller:
                called = load(Path(caller["uses"]).stem)["jobs"].values()
                wanted = {scope for job in called for scope in job.get("permissions", {})}
                assert wanted <= set(caller.get("permissions", ["contents"]))


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_run_is_cancelled_by_runs_of_its_own_ref_alone(name: str):
    """GitHub cancels what waits in a group when another comes: a release's parity, by a pull request's."""
    workflow = load(name)
    groups = [at["concurrency"] for at in (workflow, *workflow["jobs"].values()) if "concurrency" in at]
    assert all("${{ github.ref }}" in group["group"] for group in groups)


def test_each_wheel_of_a_release_is_tested_on_its_machine_before_it_is_published():
    jobs = load("release")["jobs"]
    made, tested = (jobs[name]["strategy"]["matrix"] for name in ("wheels", "wheel-test"))
    assert [f"cp{python.replace('.', '')}" for python in tested["python"]] == made["python"]
    listed = re.search(r'^build = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert listed and listed[1].split() == [f"{python}-*" for python in made["python"]]
    assert tested["runner"] == made["runner"] and tested["torch"] == ["torch"]
    assert [row["torch"] for row in tested["include"]] == ["torch==2.6.0"]
    assert "wheel-test" in jobs["publish"]["needs"] and jobs["wheel-test"]["needs"] == "wheels"
    lines = "\n".join(step.get("run", "") for step in jobs["wheel-test"]["steps"])
    assert re.search(r"^WHEEL=\S+ \.\./\.venv/bin/python -m pytest test_wheel\.py$", lines, re.MULTILINE)
    assert "_x86_64" not in (ROOT / "tests" / "test_wheel.py").read_text()


def value(expression: str, **contexts: Any) -> Any:
    """What GitHub makes of an expression, of the operators and functions that gpu.yml has."""

    def look(name: str) -> Any:
        found: Any = contexts
        for part in name.removesuffix(".*.name").removesuffix(".*.result").split("."):
            found = found.get(part) if isinstance(found, dict) else None
        if name.endswith(".*.result"):
            return [job["result"] for job in found.values()]
        return found

    def word(match: re.Match[str]) -> str:
        if match[0][0] == "'":
            return match[0]
        if match[0] in operators:
            return operators[match[0]]
        return match[0] if match[0] in functions else f"look({match[0]!r})"

    operators = {"&&": " and ", "||": " or "}
    functions = {"contains": lambda where, what: what in (where or ()), "always": lambda: True}
    inner = re.sub(r"^\$\{\{(.*)\}\}$", r"\1", expression.strip())
    python = re.sub(r"'[^']*'|&&|\|\||[a-z][\w.*-]*", word, inner)
    return eval(python, {**functions, "look": look})


def gpu_run(paths: Iterable[str], result: str = "success", **github: Any) -> tuple[bool, str, bool]:
    """A run of gpu.yml, whose GPUs end with ``result``: does it use them, what is its check called, does that pass?"""
    github = {"event_name": "pull_request", "repository": "ours/it", **github}
    jobs = load("gpu")["jobs"]
    needs: dict[str, Any] = {name: {"result": "skipped"} for name in jobs["gpu-gate"]["needs"]}
    assert jobs["gpu-gate"]["if"] == "always()" and set(needs) == set(jobs) - {"gpu-gate"}
    assert jobs["wheel"]["needs"] == "changes" and jobs["parity"]["needs"] == "wheel" and "if" not in jobs["parity"]
    if value(jobs["changes"]["if"], github=github):
        outputs = {name: str(any(map(match, paths))).lower() for name, match in gpu_filters().items()}
        steps = {"filter": {"outputs": outputs if github["event_name"] == "pull_request" else {}}}
        told = {name: value(text, github=github, steps=steps) for name, text in jobs["changes"]["outputs"].items()}
        needs["changes"] = {"result": "success", "outputs": {name: str(it).lower() for name, it in told.items()}}
        if value(jobs["wheel"]["if"], github=github, needs=needs):
            needs |= {"wheel": {"result": "success"}, "parity": {"result": result}}
    failing = [value(step["if"], needs=needs) for step in jobs["gpu-gate"]["steps"]]
    assert all("exit 1" in step["run"] for step in jobs["gpu-gate"]["steps"])
    return needs["parity"]["result"] != "skipped", value(jobs["gpu-gate"]["name"], github=github), not any(failing)


def gpu_paths() -> dict[str, list[str]]:
    (step,) = load("gpu")["jobs"]["changes"]["steps"]
    filters = yaml.safe_load(step["with"]["filters"])
    nested = filters["seen"][0]
    return {"kernels": filters["kernels"], "seen": [*nested, *filters["seen"][1:]]}


def gpu_filters() -> dict[str, Any]:
    paths = gpu_paths()
    return {name: lambda path, of=of: any(fnmatch.fnmatch(path, one) for one in of) for name, of in paths.items()}


def event(action: str, *labels: str, repository: str = "ours/it", given: str | None = None) -> dict[str, Any]:
    pull_request = {"labels": list(labels), "head": {"repo": {"full_name": repository}}}
    return {"event": {"action": action, "pull_request": pull_request} | ({"label": {"name": given}} if given else {})}


KERNEL, PYTHON, PAGE = ["src/core/visibility.h", "docs/proof.md"], ["cutlass_fmha/errors.py"], ["docs/proof.md"]
FORK = "theirs/it"


def test_a_change_of_kernels_has_to_have_been_on_the_gpus():
    for action in ("opened", "synchronize", "reopened"):
        assert gpu_run(KERNEL, **event(action)) == (False, "gpu-gate", False)
        assert gpu_run(KERNEL, **event(action, "gpu")) == (True, "gpu-gate", True)
    for result in ("failure", "cancelled"):
        assert gpu_run(KERNEL, result, **event("synchronize", "gpu")) == (True, "gpu-gate", False)
        assert gpu_run(PYTHON, result, **event("synchronize", "gpu")) == (True, "gpu-gate", False)
    assert gpu_run(KERNEL, **event("labeled", "gpu", given="gpu")) == (True, "gpu-gate", True)
    for path in ("cmake/Wide.cmake", "CMakeLists.txt", "cutlass_fmha/launch/plan.py", "pyproject.toml"):
        assert gpu_run([path], **event("opened")) == (False, "gpu-gate", False)


def test_other_changes_pass_at_once_and_go_there_when_labelled():
    for paths in (PYTHON, PAGE, ["tests/test_cpu.py"]):
        assert gpu_run(paths, **event("opened")) == (False, "gpu-gate", True)
    assert gpu_run(PYTHON, **event("labeled", "gpu", given="gpu")) == (True, "gpu-gate", True)
    assert gpu_run(PAGE, **event("labeled", "gpu", given="gpu")) == (False, "gpu-gate", True)


def test_a_fork_reaches_our_own_machines_by_a_label_given_anew():
    for action in ("opened", "synchronize", "reopened"):
        assert gpu_run(KERNEL, **event(action, "gpu", repository=FORK)) == (False, "gpu-gate", False)
    assert gpu_run(KERNEL, **event("labeled", "gpu", repository=FORK, given="gpu")) == (True, "gpu-gate", True)
    for name in WORKFLOWS:  # and by no other workflow
        own = [job for job in load(name)["jobs"].values() if "self-hosted" in str(job.get("runs-on"))]
        assert not own or name == "gpu"


def test_another_label_changes_nothing_of_what_a_commit_has():
    """Neither does its run use a GPU, nor cancel one that does, nor report as the required check."""
    for repository in ("ours/it", FORK):
        given = event("labeled", "gpu", "question", repository=repository, given="question")
        assert gpu_run(KERNEL, **given) == (False, "another label", True)
    group = re.sub(r"^.*(\$\{\{.*\}\})$", r"\1", load("gpu")["concurrency"]["group"].replace("github.ref }}", ""))
    assert value(group, github={**event("labeled", given="question"), "run_id": "7"}) == "7"
    assert value(group, github={**event("labeled", given="gpu"), "run_id": "7"}) == ""
    assert value(group, github={**event("synchronize"), "run_id": "7"}) == ""


def test_pushes_dispatches_and_releases_go_to_the_gpus():
    for name in ("push", "workflow_dispatch"):
        assert gpu_run([], event_name=name, event={}) == (True, "gpu-gate", True)
        assert gpu_run([], "failure", event_name=name, event={}) == (True, "gpu-gate", False)


def test_the_gpu_gate_reports_on_every_pull_request_and_knows_what_kernels_depend_on():
    triggers = load("gpu")[True]
    assert triggers["pull_request"] == {"types": ["opened", "synchronize", "reopened", "labeled"]}
    paths = gpu_paths()
    narrow = {a for a in paths["seen"] for b in paths["seen"] if a != b and fnmatch.fnmatch(a, b)}
    assert set(triggers["push"]["paths"]) == set(paths["seen"]) - narrow
    (listed,) = re.findall(r"^BUILD_INPUTS := (.*) \$\(shell find (.*) -type f", (ROOT / "Makefile").read_text(), re.M)
    inputs = {*listed[0].split(), *(f"{folder}/x" for folder in listed[1].split())} - {"tools/source_hash.py"}
    launching = (file for file in (ROOT / "cutlass_fmha").rglob("*.py") if "_C.launch(" in file.read_text())
    inputs |= {path.relative_to(ROOT).as_posix() for path in launching}
    inputs -= {"cutlass_fmha/jax/calls.py"}  # there is no JAX on these machines
    assert not [path for path in inputs if not gpu_filters()["kernels"](path)]
    for path in ("Makefile", ".ci/install_nvcc", ".github/workflows/gpu.yml", "tests/oracle.py"):
        assert gpu_filters()["seen"](path)
    for pattern in paths["seen"]:
        assert (ROOT / pattern.removesuffix("/**")).exists()


def test_the_guide_names_both_required_checks():
    said = " ".join((ROOT / "CONTRIBUTING.md").read_text().split())
    assert "required checks are `gate` (" in said and "and `gpu-gate` (" in said
    assert "always fit for a release" not in said and "need not pass between releases" in said


def test_the_linter_of_workflows_knows_the_labels_of_our_own_machines():
    (lint,) = (step for step in steps("ci") if "actionlint" in step.get("uses", ""))
    assert lint["with"]["args"] == "-ignore sm_[0-9]+"
    assert load("gpu")["jobs"]["parity"]["strategy"]["matrix"]["arch"] == ["sm_89", "sm_120", "sm_90"]
