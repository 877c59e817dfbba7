"""Files for other programs: workflows, issue forms, containers, Kubernetes.

They do not run here, so what they name is compared with what is there: targets of make, paths,
flags, images' extras, secrets' keys.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from modelmill.cli import serve
from modelmill.cli.options import collect_cli_parameters

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
ISSUE_TEMPLATES = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))
MANIFESTS = sorted((ROOT / "deploy/kubernetes").glob("*.yaml"))
DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
OTHERS = [*(ROOT / "docker").rglob("*.y*ml"), ROOT / ".pre-commit-config.yaml"]
MAKE_TARGETS = set(re.findall(r"^([a-z-]+)(?: [a-z-]+)*:", (ROOT / "Makefile").read_text(), re.M))
SERVE_FLAGS = {f"--{name}" for flag in collect_cli_parameters(serve.Args) for name in flag.names}


@pytest.mark.parametrize(
    "path", [*WORKFLOWS, *ISSUE_TEMPLATES, *MANIFESTS, *OTHERS], ids=lambda p: p.name
)
def test_every_file_is_valid_yaml(path: Path) -> None:
    assert all(yaml.safe_load_all(path.read_text()))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda p: p.name)
def test_what_a_workflow_calls_is_there(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert "runs-on" in job
        for step in job["steps"]:
            command = step.get("run", "")
            for target in re.findall(r"\bmake ([a-z-]+)", command):
                assert target in MAKE_TARGETS, target
            for script in re.findall(r"(?:python |^)([\w./-]+\.py|\.ci/\w+)", command):
                assert (ROOT / script).exists(), script
            assert "uses" in step or command


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda p: p.name)
def test_actions_of_workflows_are_pinned_by_commit(path: Path) -> None:
    used = re.findall(r"uses: (\S+)(.*)", path.read_text())
    branches = [name for name, _ in used if not re.search(r"@[0-9a-f]{40}$", name)]
    # PyPA asks for its branch, which follows the formats of metadata
    assert set(branches) <= {"pypa/gh-action-pypi-publish@release/v1"}
    assert all(re.fullmatch(r" # v[\d.]+", note) for name, note in used if name not in branches)


def test_the_workflows_cover_lint_tests_docs_release_and_gpu() -> None:
    names = {path.stem for path in WORKFLOWS}
    assert {"lint", "tests", "docs", "release", "nightly-gpu", "versions"} <= names


@pytest.mark.parametrize("path", ISSUE_TEMPLATES, ids=lambda p: p.name)
def test_issue_forms_have_fields_with_labels(path: Path) -> None:
    template = yaml.safe_load(path.read_text())
    for item in template.get("body", []):
        assert item["type"] in ("input", "textarea", "markdown", "dropdown", "checkboxes")
        assert item["attributes"]["label"]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda p: p.name)
def test_what_an_image_copies_and_installs_is_there(path: Path) -> None:
    text = path.read_text()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for source in re.findall(r"^COPY (?!--from)(\S+)", text, re.M):
        assert (ROOT / source).exists()
    named = re.findall(r"\[([a-z,]+)\]\"|EXTRAS=([a-z,]+)", text)
    assert named
    for group in named:
        assert set("".join(group).split(",")) <= extras.keys()
    assert "torch==2.13.0" in text
    assert re.search(r"^USER 10001$", text, re.M), "a server does not run as root"


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda p: p.name)
def test_the_user_of_an_image_owns_its_cache_and_runs_the_pods(path: Path) -> None:
    before_volume, _, _ = path.read_text().partition("VOLUME")
    _, _, as_user = before_volume.partition("USER 10001")
    assert "RUN mkdir /home/modelmill/cache" in as_user
    (user_id,) = re.findall(r"useradd .*--uid (\d+) modelmill", before_volume)
    for name in ("front.yaml", "node.yaml"):
        (deployment,) = [each for each in _documents(name) if each["kind"] == "Deployment"]
        context = deployment["spec"]["template"]["spec"]["securityContext"]
        assert context["runAsUser"] == int(user_id)


def _serve_words() -> Iterator[tuple[str, list[str]]]:
    compose = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())
    yield "compose", compose["services"]["modelmill"]["command"][1:]
    shell = " ".join(_containers("front.yaml")[0]["args"])
    yield "kubernetes", shell.partition("modelmill serve ")[2].split()


@pytest.mark.parametrize(("name", "words"), _serve_words(), ids=lambda value: str(value)[:12])
def test_the_flags_of_the_server_are_known(name: str, words: list[str]) -> None:
    flags = [word.partition("=")[0] for word in words if word.startswith("--")]
    assert flags, name
    assert set(flags) <= SERVE_FLAGS


def test_what_compose_mounts_is_there() -> None:
    services = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())["services"]
    for service in services.values():
        for volume in service["volumes"]:
            source = (
                volume.rsplit("/", volume.count(":"))[0] if "$" in volume else volume.split(":")[0]
            )
            if source.startswith("."):
                assert (ROOT / "docker" / source).exists(), source
    assert services["modelmill"]["build"]["dockerfile"] == "docker/cpu.Dockerfile"
    dashboard = json.loads((ROOT / "docs/grafana.json").read_text())
    assert dashboard["title"]


def _documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((ROOT / "deploy/kubernetes" / name).read_text()))


def _containers(name: str) -> list[dict[str, Any]]:
    (deployment,) = [each for each in _documents(name) if each["kind"] == "Deployment"]
    return list(deployment["spec"]["template"]["spec"]["containers"])


@pytest.mark.parametrize("name", ["front.yaml", "node.yaml"])
def test_labels_volumes_and_secrets_fit_together(name: str) -> None:
    (deployment,) = [each for each in _documents(name) if each["kind"] == "Deployment"]
    spec = deployment["spec"]
    pod = spec["template"]["spec"]
    assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
    volumes = {volume["name"] for volume in pod["volumes"]}
    claims = {each["metadata"]["name"] for each in _documents("engines.yaml")}
    for volume in pod["volumes"]:
        if "persistentVolumeClaim" in volume:
            assert volume["persistentVolumeClaim"]["claimName"] in claims
    for container in pod["containers"]:
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
        modes = {each["name"]: each for each in container["env"]}
        assert modes["RAY_AUTH_MODE"]["value"] == "token"
        assert modes["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"]["key"] == "ray-token"
    assert pod["securityContext"]["runAsNonRoot"]


def test_services_select_the_front_and_name_its_ports() -> None:
    (container,) = _containers("front.yaml")
    ports = {port["name"] for port in container["ports"]}
    services = [each for each in _documents("front.yaml") if each["kind"] == "Service"]
    for service in services:
        assert service["spec"]["selector"] == {"app": "modelmill", "part": "front"}
        assert all(port["targetPort"] in ports for port in service["spec"]["ports"])
    names = {service["metadata"]["name"] for service in services}
    assert "modelmill-ray" in names
    assert "--address=modelmill-ray:6379" in _containers("node.yaml")[0]["command"]


def test_the_version_has_one_source() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" not in project["project"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "modelmill.__version__"}
