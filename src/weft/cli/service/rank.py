"""`weft rank` is one replica of a run, or one process of its layout; `weft train --replicas` starts ranks by itself,
`--listen` waits for others'."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from weft.errors import ConfigError
from weft.processes import end_with_parent

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

RETRY_S = 0.5


def rank(
    connect: Annotated[str, typer.Option(help="Where the controller listens: HOST:PORT, or a socket's path.")],
    wait: Annotated[float, typer.Option(help="Seconds to wait for a controller to answer.", min=0)] = 60.0,
) -> None:
    """Be one replica of a run that another process controls, and train the jobs it is given."""
    from weft.parallel.replicas.connections import JOINS_AGAIN, KEY_VARIABLE, address_of

    key = os.environ.pop(KEY_VARIABLE, "")
    if not key:
        raise ConfigError("is not set; it holds the key of the run's controller.", where=KEY_VARIABLE)
    address = address_of(connect, "--connect")
    own = os.getpid()
    while True:
        connection = _connection(address, key, time.monotonic() + (0.0 if isinstance(address, str) else wait))
        # Over a network a child is the rank, so that a stage can begin again in a new process.
        child = 0 if isinstance(address, str) else os.fork()
        if not child:
            break
        connection.close()
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code not in (JOINS_AGAIN, -signal.SIGKILL):
            sys.exit(code if code >= 0 else 128 - code)
    if not isinstance(address, str):
        end_with_parent(own)
    from weft.parallel.replicas.rank import run_rank

    run_rank(connection)


def _connection(address: str | tuple[str, int], key: str, until_s: float) -> Connection:
    """The connection to a controller, which may not be there yet."""
    from multiprocessing import AuthenticationError

    from weft.parallel.replicas.connections import connect

    where = f"--connect {address if isinstance(address, str) else ':'.join(map(str, address))}"
    while True:
        try:
            return connect(address, key)
        except AuthenticationError:
            raise ConfigError("the controller there has another WEFT_RANK_KEY.", where=where) from None
        except (OSError, EOFError) as error:
            if time.monotonic() >= until_s:
                raise ConfigError(f"no controller answers there ({error}).", where=where) from None
            time.sleep(RETRY_S)
