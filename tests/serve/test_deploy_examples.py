"""The files of examples/deployment are what systemd, Docker and Kubernetes read, and call Weft with options it has."""

from __future__ import annotations

import configparser
import json
import re
import shlex
from pathlib import Path
from typing import Any

import click
import pytest
import typer
import yaml

from weft.cli.main import app

ROOT = Path(__file__).parents[2]
FILES = ROOT / "examples" / "deployment"
INSTRUCTIONS = {"COPY", "FROM", "RUN", "USER", "WORKDIR", "VOLUME", "EXPOSE", "ENTRYPOINT"}


def parse(*words: str) -> dict[str, Any]:
    """What Weft makes of a command line; it is not run."""
    group: Any = typer.main.get_command(app)
    context = click.Context(group)
    command = group.get_command(context, words[0])
    assert command is not None, words
    rest = list(words[1:])
    while isinstance(command, click.Group) and rest:
        command = command.get_command(context, rest.pop(0))
    return command.make_context(words[0], rest).params


@pytest.fixture(autouse=True)
def _no_database(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WEFT_DB", "postgresql://weft@db/weft")


def test_unit_when_read_as_systemd_does_then_starts_and_stops_the_service():
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string((FILES / "weft.service").read_text("utf-8"))
    assert unit.sections() == ["Unit", "Service", "Install"]
    service = unit["Service"]
    program, *words = shlex.split(service["ExecStart"])
    assert program.startswith("/"), "systemd wants the whole path"
    assert parse(*words)["data_dir"] == Path("/var/lib") / service["StateDirectory"]
    assert (service["KillMode"], service["Restart"]) == ("mixed", "on-failure")
    assert int(service["TimeoutStopSec"]) > 60, "workers have a minute to give their jobs back"


def test_dockerfile_when_read_then_runs_the_service_as_an_unprivileged_user():
    lines = [line.split(" ", 1) for line in (FILES / "Dockerfile").read_text("utf-8").splitlines()]
    assert {name for name, _ in lines} <= INSTRUCTIONS
    found = dict(lines)
    assert found["USER"] == "weft"
    program, *words = json.loads(found["ENTRYPOINT"])
    options = parse(*words)
    assert program == "weft"
    assert found["WORKDIR"] == "/home/weft", "what is relative to it can be written"
    assert f"install -d -o {found['USER']} {found['VOLUME']}" in found["RUN"], "a volume's first owner is the folder's"
    assert (options["host"], str(options["data_dir"])) == ("0.0.0.0", found["VOLUME"])
    extras = re.search(rf"'{found['COPY'].split()[1]}\[([a-z0-9,]+)\]'", found["RUN"])
    assert extras is not None
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    assert all(re.search(rf"^{extra} = \[", project, re.MULTILINE) for extra in extras[1].split(","))


def test_manifests_when_read_then_are_two_deployments_that_share_database_and_store():
    api, worker = yaml.safe_load_all((FILES / "kubernetes.yaml").read_text("utf-8"))
    stores = []
    for part, command in ((api, ["serve"]), (worker, ["worker"])):
        assert (part["apiVersion"], part["kind"]) == ("apps/v1", "Deployment")
        spec = part["spec"]
        assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
        (container,) = spec["template"]["spec"]["containers"]
        assert container.get("command", ["weft", "serve"]) == ["weft", *command]
        options = parse(*command, *container["args"])
        stores.append((options["store"], options["db"]))
        assert "WEFT_DB" in {entry["name"] for entry in container["env"]}
    assert len(set(stores)) == 1
    pod = worker["spec"]["template"]["spec"]
    (container,), (volume,) = pod["containers"], pod["volumes"]
    assert container["volumeMounts"] == [{"name": volume["name"], "mountPath": str(options["data_dir"])}]
    assert options["data_dir"].is_absolute()
    probes = api["spec"]["template"]["spec"]["containers"][0]
    assert probes["readinessProbe"]["httpGet"]["port"] == probes["ports"][0]["containerPort"] == 8000
    assert worker["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > 60


def test_commands_when_shown_then_have_options_that_weft_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "operating.md").read_text("utf-8")
    shown = [
        line.split(" #")[0].strip()
        for block in re.findall(r"^```bash\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
        for line in block.replace("\\\n", " ").splitlines()
        if line.startswith("weft ")
    ]
    assert len(shown) >= 9
    for line in shown:
        parse(*shlex.split(line)[1:])
