"""`weft rank` is one replica of a run; `weft train --replicas` starts ranks by itself."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from weft.errors import ConfigError


def rank(
    connect: Annotated[str, typer.Option(help="Where the controller listens: a socket's path, or HOST:PORT.")],
    index: Annotated[int, typer.Option(min=0, help="Which of the run's ranks this is, from 0.")] = 0,
) -> None:
    """Be one replica of a run that another process controls, and train the jobs it is given."""
    from multiprocessing import AuthenticationError
    from multiprocessing.connection import Client

    from weft.replicas.rank import run_rank
    from weft.replicas.rank_pool import KEY_VARIABLE

    key = os.environ.pop(KEY_VARIABLE, "")
    if not key:
        raise ConfigError("is not set; it holds the key of the run's controller.", where=KEY_VARIABLE)
    host, _, port = connect.rpartition(":")
    try:
        connection = Client((host, int(port)) if host and port.isdecimal() else connect, authkey=key.encode())
    except (OSError, AuthenticationError) as error:
        raise ConfigError(f"no controller answers there ({error}).", where=f"--connect {connect}") from None
    run_rank(connection, index)
