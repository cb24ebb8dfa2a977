"""The Python of the page about Ray runs as written; the files for KubeRay and SkyPilot call Weft with its options."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from weft.cli.main import VERBS, main
from weft.parallel.ray.connect import need_ray

ROOT = Path(__file__).parents[3]


def recipe(name: str) -> dict[str, Any]:
    return yaml.safe_load((ROOT / "examples" / "deployment" / name).read_text("utf-8"))


def check_command(line: str) -> None:
    """A `weft` command has a verb that there is, and options that this verb has."""
    words = shlex.split(line, comments=True)
    assert words[0] == "weft"
    known = {option for parameter in VERBS[words[1]].command(words[1], "weft.cli").params for option in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= known


def test_kuberay_recipe_then_requests_as_many_replicas_as_it_starts_gpus():
    spec = recipe("kuberay.yaml")["spec"]
    check_command(spec["entrypoint"])
    (workers,) = spec["rayClusterSpec"]["workerGroupSpecs"]
    (container,) = workers["template"]["spec"]["containers"]
    gpus = workers["replicas"] * int(container["resources"]["limits"]["nvidia.com/gpu"])
    assert f"--replicas {gpus} " in spec["entrypoint"]
    mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounted == {"/shared"} and "--out /shared/" in spec["entrypoint"]


def test_skypilot_recipe_then_its_script_is_bash_and_its_command_fits_its_machines():
    task = recipe("skypilot.yaml")
    subprocess.run(["bash", "-n"], input=task["run"], text=True, check=True)
    (line,) = [line for line in task["run"].splitlines() if line.startswith("weft ")]
    check_command(line)
    gpus = task["num_nodes"] * int(task["resources"]["accelerators"].partition(":")[2])
    assert f"--replicas {gpus} " in line


@pytest.fixture
def ray_program(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A program's own Ray, small and quiet, whatever it requests."""
    ray = need_ray()
    init, settings = (
        ray.init,
        {"address": "local", "num_cpus": 3, "include_dashboard": False, "object_store_memory": 80 * 2**20},
    )
    monkeypatch.setattr(ray, "init", lambda: init(log_to_driver=False, logging_level="ERROR", **settings))
    yield
    ray.shutdown()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_python_of_the_page_when_run_then_trains_on_the_programs_own_cluster(
    ray_program, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["weft", "init"])
    with pytest.raises(SystemExit):
        main()
    jobs = Path("jobs.yaml")
    jobs.write_text(jobs.read_text().replace("max_steps: 60", "max_steps: 4"))
    page = (ROOT / "docs" / "ray.md").read_text("utf-8")
    within, tuned = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(compile(within, "ray.md", "exec"), {})
    assert "'shout': <JobState.SUCCEEDED" in capsys.readouterr().out
    assert need_ray().is_initialized(), "the program goes on using Ray"
    exec(compile(tuned.replace('"max_steps": 40, "eval_steps": 10', '"max_steps": 8, "eval_steps": 4'), "", "exec"), {})
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert last.startswith("{'learning_rate': 0.01, 'r': 4}") and last.endswith("/adapter")
    ended = [json.loads(path.read_text()) for path in Path("runs/tuned").glob("*/status.json")]
    assert {(status["state"], status["step"]) for status in ended} <= {("succeeded", 8), ("cancelled", 4)}
