"""`weft rank` is one replica of a run; `weft train --replicas` starts ranks by itself, `--listen` waits for others'."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Annotated

import typer

from weft.errors import ConfigError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

RETRY_S = 0.5


def rank(
    connect: Annotated[str, typer.Option(help="Where the controller listens: HOST:PORT, or a socket's path.")],
    wait: Annotated[float, typer.Option(help="Seconds to wait for a controller to answer.", min=0)] = 60.0,
) -> None:
    """Be one replica of a run that another process controls, and train the jobs it is given."""
    from weft.parallel.replicas.connections import KEY_VARIABLE, address_of

    key = os.environ.pop(KEY_VARIABLE, "")
    if not key:
        raise ConfigError("is not set; it holds the key of the run's controller.", where=KEY_VARIABLE)
    address = address_of(connect, "--connect")
    connection = _connection(address, key, time.monotonic() + (0.0 if isinstance(address, str) else wait))
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
