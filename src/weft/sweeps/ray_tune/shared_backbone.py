"""A backbone in an actor that all trials of a Ray Tune search share."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from weft.errors import ConfigError, MissingExtraError, WeftError, install_command
from weft.parallel.ray.connect import LOCAL, connect, need_ray
from weft.parallel.ray.resources import replica_request
from weft.spec.load_sweep import sweep_from_mapping, trial_job
from weft.sweeps.ray_tune.trial_server import TrialServer

NUM_CALLS = 256
"""Trials that can wait for news at a time."""
TRIAL_BYTES = 2**28
"""The memory that Ray counts for a trial; of the processors it takes none, since it only waits for the backbone."""


class SharedBackbone:
    """Trains the trials of Ray Tune together, each with the bits it would have alone."""

    def __init__(
        self,
        base_model: str,
        job: Mapping[str, Any],
        *,
        out: Path | str = "runs/tune",
        cluster: str = LOCAL,
        **settings: Any,
    ) -> None:
        """Loads the backbone on a GPU of the cluster, or on a CPU where there is none.

        `job` has the settings that all trials share, of a job in a jobs file; a trial's configuration comes on top, by
        the same names. It must have `eval_data`: what a trial reports are its evaluations. `settings` are those of a
        run, such as `capacity` or `max_jobs`. A process that is connected to Ray uses that cluster.
        """
        ray = need_ray()
        self._trial = _trial_class()
        # A search without a space of its own: Tune has that.
        tree = {"base_model": base_model, "job": dict(job), "space": {"learning_rate": [1e-4]}, **settings}
        spec = sweep_from_mapping(tree, base_dir=Path())
        if trial_job(spec, "trial", {}).eval_data is None:
            raise ConfigError("is missing; trials report their evaluations.", where="job.eval_data")
        self._connection = connect(cluster)
        bundle = replica_request(self._connection.nodes, 1, device=spec.device, gpu_type=None).bundle
        self._server = (
            ray.remote(TrialServer)
            .options(num_cpus=bundle.get("CPU", 0), num_gpus=bundle.get("GPU", 0), max_concurrency=NUM_CALLS)
            .remote(spec, Path(out).absolute(), Path.cwd(), _threads())
        )
        try:
            ray.get(self._server.wait_until_loaded.remote())
        except ray.exceptions.RayTaskError as error:
            self.close()
            raise (error.cause if isinstance(error.cause, WeftError) else error) from None

    @property
    def trainable(self) -> Any:
        """What `ray.tune.Tuner` is given: each of its trials is a job on this backbone."""
        from ray import tune

        return tune.with_resources(tune.with_parameters(self._trial, server=self._server), {"memory": TRIAL_BYTES})

    def close(self) -> None:
        """Lets go of the backbone; trials that still train are saved and end."""
        ray = need_ray()
        with suppress(ray.exceptions.RayError):
            ray.get(self._server.close.remote(), timeout=60)
        ray.kill(self._server)
        self._connection.close()


def _threads() -> dict[str, str | None]:
    from weft.parallel.ray.ray_ranks import TAKEN_OVER

    return {name: os.environ.get(name) for name in TAKEN_OVER}


def _trial_class() -> Any:
    try:
        from weft.sweeps.ray_tune.trial_server import BackboneTrial
    except ImportError as error:
        hint = f"Install it: {install_command('tune')}."
        raise MissingExtraError(f"trials of Ray Tune need {error.name}.", hint=hint) from None
    return BackboneTrial
