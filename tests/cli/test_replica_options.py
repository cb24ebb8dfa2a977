"""Options about replicas on the command line become hosts for them, or one error sentence."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from weft.cli.main import app
from weft.cli.options import ReplicaOptions
from weft.errors import ConfigError
from weft.parallel.replicas.hosts import rank_variables
from weft.spec import BackboneSpec

CPU, ANY = BackboneSpec(base_model="tiny", device="cpu"), BackboneSpec(base_model="tiny")


@pytest.fixture
def _two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-ab")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"replicas": "0"}, "--replicas: got '0'; accepted are auto and numbers from 1 to 1024."),
        ({"replicas": "-1"}, "--replicas: got '-1'; accepted are auto and numbers from 1 to 1024."),
        ({"replicas": "1000000000"}, "--replicas: got '1000000000'; accepted are auto and numbers from 1 to 1024."),
        pytest.param({"replicas": "9" * 5000}, "--replicas: got '9999", id="5000 digits"),
        ({"replicas": "two"}, "--replicas: got 'two'; accepted are auto and numbers from 1 to 1024."),
        ({"devices": "0"}, "--devices: are for GPUs, and this run is on a CPU; use --replicas."),
        ({"listen": "0.0.0.0:1"}, "--listen: needs --replicas with the number of ranks that will join."),
        ({"listen": "0.0.0.0:1", "replicas": "auto"}, "--listen: needs --replicas with the number of ranks"),
        ({"listen": "here", "replicas": "2"}, "--listen: got 'here'; accepted is HOST:PORT."),
        ({"listen": "here:x", "replicas": "2"}, "--listen: got 'here:x'; accepted is HOST:PORT."),
        ({"listen": "here:99999", "replicas": "2"}, "--listen: got 'here:99999'; accepted is HOST:PORT."),
        ({"listen": "a:1", "replicas": "2", "devices": "0"}, "--devices: are the GPUs here; with --listen others"),
        ({"listen": "a:1", "replicas": "2", "cluster": "auto"}, "--cluster: starts ranks itself; with --listen"),
        ({"gpu_type": "H100"}, "--gpu-type: is for a cluster; give --cluster, or use --devices."),
    ],
)
def test_options_when_they_cannot_be_then_refused_in_one_sentence(given, message):
    with pytest.raises(ConfigError) as error:
        ReplicaOptions(**given).hosts(CPU)
    assert str(error.value).startswith(message)


@pytest.mark.usefixtures("_two_gpus")
@pytest.mark.parametrize(
    ("replicas", "devices", "message"),
    [
        ("3", None, "--replicas: got 3; there are 2 GPUs."),
        ("2", "1", "--replicas: got 2; there is 1 GPU."),
        (None, "0,2", "--devices: got '2'; accepted are numbers from 0 to 1."),
        (None, "0,", "--devices: got ''; accepted are numbers from 0 to 1."),
    ],
)
def test_options_when_there_are_fewer_gpus_then_reports_how_many(replicas, devices, message):
    with pytest.raises(ConfigError) as error:
        ReplicaOptions(replicas, devices).hosts(ANY)
    assert str(error.value) == message


@pytest.mark.usefixtures("_two_gpus")
@pytest.mark.parametrize(
    ("replicas", "devices", "seen"),
    [("auto", None, ["4", "GPU-ab"]), ("1", None, ["4"]), (None, "1", ["GPU-ab"]), (None, "0,0", ["4", "4"])],
)
def test_ranks_when_gpus_are_chosen_then_each_sees_its_own(replicas, devices, seen):
    """GPUs are counted among those that this process may use."""
    assert rank_variables(replicas, devices, ANY) == [{"CUDA_VISIBLE_DEVICES": name} for name in seen]


def test_options_when_one_replica_is_enough_then_no_process_is_started():
    assert ReplicaOptions().hosts(CPU) is None
    assert ReplicaOptions("1").hosts(CPU) is None
    assert ReplicaOptions("auto").hosts(CPU) is None


def test_options_when_ranks_are_to_join_then_the_way_to_start_them_is_reported(monkeypatch):
    monkeypatch.setenv("WEFT_RANK_KEY", "known")
    hosts = ReplicaOptions("2", listen="10.0.0.1:7070").hosts(CPU)
    assert hosts is not None
    assert hosts.invitation == "start 2 of them with: weft rank --connect 10.0.0.1:7070"
    monkeypatch.delenv("WEFT_RANK_KEY")
    hosts = ReplicaOptions("2", listen="10.0.0.1:7070").hosts(CPU)
    assert hosts is not None and "with: WEFT_RANK_KEY=" in hosts.invitation


@pytest.mark.parametrize(
    ("words", "key", "message"),
    [
        (["--connect", "localhost:7070"], "", "WEFT_RANK_KEY: is not set; it holds the key of the run's controller."),
        (["--connect", "localhost:x"], "key", "--connect: got 'localhost:x'; accepted is HOST:PORT."),
        (["--connect", "localhost:1", "--wait", "0"], "key", "--connect localhost:1: no controller answers there"),
        (["--connect", "no/such/socket"], "key", "--connect no/such/socket: no controller answers there"),
    ],
)
def test_rank_when_there_is_no_controller_then_reports_it(words, key, message):
    done = CliRunner().invoke(app, ["rank", *words], env={"WEFT_RANK_KEY": key})
    assert isinstance(done.exception, ConfigError) and str(done.exception).startswith(message)
