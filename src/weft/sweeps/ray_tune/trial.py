"""A trial of Ray Tune whose training happens elsewhere: it asks the shared backbone, and reports each evaluation."""

from __future__ import annotations

from typing import Any

import ray
from ray import tune

from weft.sweeps.ray_tune.trial_server import TrialNews


class BackboneTrial(tune.Trainable):  # type: ignore[misc]
    """One job on a shared backbone; an iteration of it is the training up to its next evaluation."""

    def setup(self, config: dict[str, Any], server: Any = None) -> None:
        """Begins the job with the settings of this trial."""
        self._server = server
        self._last: dict[str, Any] = {}
        ray.get(server.submit.remote(self.trial_id, config))

    def step(self) -> dict[str, Any]:
        """What the next evaluation measures; with the last one comes where the adapter is."""
        ray.get(self._server.go_on.remote(self.trial_id))
        news = self._next()
        if news.error is not None:
            raise RuntimeError(news.error)
        self._last |= news.metrics
        return {**self._last, "done": news.is_ended}

    def save_checkpoint(self, checkpoint_dir: str) -> dict[str, Any]:
        """Its weights are in the run directory of the backbone; Tune keeps what it has reported."""
        return self._last

    def load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Goes on from what it has reported."""
        self._last = checkpoint

    def cleanup(self) -> None:
        """Takes the job off, if it is stopped before its end."""
        ray.get(self._server.cancel.remote(self.trial_id))

    def _next(self) -> TrialNews:
        while True:
            news: TrialNews | None = ray.get(self._server.news.remote(self.trial_id))
            if news is not None:
                return news
