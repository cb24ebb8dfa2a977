"""Trials of Ray Tune that train together on one shared backbone, which an actor has.

    import weft.sweeps.ray_tune
    from ray import tune

    backbone = weft.sweeps.ray_tune.SharedBackbone("tiny", {"train_data": "train.jsonl", "eval_data": 32})
    tune.Tuner(backbone.trainable, param_space={"learning_rate": tune.loguniform(1e-4, 1e-2)}).fit()

Imports neither Ray nor torch: the actor's process imports this package before it sets the number of torch's threads.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from weft.errors import ConfigError, WeftError, needs_extra
from weft.parallel.ray.connect import LOCAL, connect, need_ray, replica_request
from weft.spec.load_sweep import sweep_from_mapping, trial_job

__all__ = ["SharedBackbone"]

NUM_CALLS = 256
"""Trials that can wait for news at the same time."""
TRIAL_BYTES = 2**28
"""Memory that Ray counts for a trial, which uses no processor: it only waits for the backbone."""


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
        """Loads the backbone on a GPU of the cluster, or on a CPU if there is none.

        `job`: settings of a job that all trials share; a trial's configuration is added by the same names. It must have
        `eval_data`, because trials report their evaluations. `settings`: those of a run, such as `capacity` or
        `max_jobs`. A process that is connected to Ray uses that cluster.
        """
        ray = need_ray()
        with needs_extra("tune", "trials of Ray Tune need {}."):
            from weft.sweeps.ray_tune import trial_server as module
        self._trial = module.BackboneTrial
        # A search without a space of its own; Ray Tune has it.
        tree = {"base_model": base_model, "job": dict(job), "space": {"learning_rate": [1e-4]}, **settings}
        spec = sweep_from_mapping(tree, base_dir=Path())
        if trial_job(spec, "trial", {}).eval_data is None:
            raise ConfigError("is missing; trials report their evaluations.", where="job.eval_data")
        self._connection = connect(cluster)
        bundle = replica_request(self._connection.nodes, 1, device=spec.device, gpu_type=None).bundle
        self._server = (
            ray.remote(module.TrialServer)
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
        """The trainable for `ray.tune.Tuner`: each of its trials is a job on this backbone."""
        from ray import tune

        return tune.with_resources(tune.with_parameters(self._trial, server=self._server), {"memory": TRIAL_BYTES})

    def close(self) -> None:
        """Releases the backbone; running trials are saved and end."""
        ray = need_ray()
        with suppress(ray.exceptions.RayError):
            ray.get(self._server.close.remote(), timeout=60)
        ray.kill(self._server)
        self._connection.close()


def _threads() -> dict[str, str | None]:
    from weft.parallel.ray.ray_ranks import TAKEN_OVER

    return {name: os.environ.get(name) for name in TAKEN_OVER}
