import errno
import os
import signal

import pytest

from weft.errors import ConfigError
from weft.store import faults
from weft.store.faults import FaultPlan


@pytest.fixture(autouse=True)
def _disarmed():
    yield
    faults.disarm()


def test_point_when_disarmed_then_does_nothing_and_counts_nothing():
    faults.arm(FaultPlan("raise", 1))
    faults.disarm()
    faults.point("file.write")
    assert faults.hits() == 0


@pytest.mark.parametrize(("action", "code"), [("raise", errno.EIO), ("enospc", errno.ENOSPC)])
def test_point_when_armed_then_only_the_nth_hit_fails(action, code):
    faults.arm(FaultPlan(action, 2))
    faults.point("file.write")
    with pytest.raises(OSError, match=r"file\.fsync") as caught:
        faults.point("file.fsync")
    assert caught.value.errno == code
    faults.point("file.rename")
    assert faults.hits() == 3


def test_point_when_plan_names_it_then_other_points_do_not_count():
    faults.arm(FaultPlan("raise", 2, "b"))
    for name in ("a", "b", "a", "a"):
        faults.point(name)
    assert faults.hits() == 1
    with pytest.raises(OSError, match="at b"):
        faults.point("b")


def test_arm_when_repeated_then_counting_starts_again():
    faults.arm(FaultPlan("raise", 9))
    faults.point("a")
    faults.arm(FaultPlan("raise", 9))
    assert faults.hits() == 0


@pytest.mark.faults
@pytest.mark.parametrize(("action", "sign"), [("kill", signal.SIGKILL), ("stop", signal.SIGSTOP)])
def test_point_when_it_signals_then_the_process_is_killed_or_stopped(action, sign):
    child = os.fork()
    if child == 0:
        faults.arm(FaultPlan(action, 1))
        faults.point("a")
        os._exit(7)
    _, status = os.waitpid(child, os.WUNTRACED)
    if action == "kill":
        assert os.WIFSIGNALED(status)
        assert os.WTERMSIG(status) == sign
        return
    assert os.WIFSTOPPED(status)
    assert os.WSTOPSIG(status) == sign
    os.kill(child, signal.SIGCONT)
    _, status = os.waitpid(child, 0)
    assert os.WEXITSTATUS(status) == 7, "a stopped process goes on where it was"


@pytest.mark.parametrize(
    ("text", "plan"),
    [
        ("kill@17", FaultPlan("kill", 17)),
        ("enospc@3:checkpoint.write", FaultPlan("enospc", 3, "checkpoint.write")),
        ("stop@1:dir.fsync", FaultPlan("stop", 1, "dir.fsync")),
    ],
)
def test_parse_when_text_is_a_plan_then_returns_it(text, plan):
    assert faults.parse(text) == plan


@pytest.mark.parametrize("text", ["", "kill", "kill@", "kill@x", "kill@0", "kill@-1", "burn@1", "kill@1:", "kill@1 "])
def test_parse_when_text_is_no_plan_then_reports_it(text):
    with pytest.raises(ConfigError):
        faults.parse(text)
