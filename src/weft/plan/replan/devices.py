"""Forecasts for the devices of one machine, among which `--layout auto` chooses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from weft.plan.choose_layout import LayoutChoice, LayoutJob, choose_layout
from weft.plan.cost.analytic import AnalyticCost
from weft.plan.cost.types import slot_seconds
from weft.plan.layout import Layout
from weft.plan.replan.types import LayoutForecast, Prediction, RemainingJob, phases


@dataclass(frozen=True)
class DeviceForecaster:
    """What layouts over so many devices make of jobs."""

    cost_for: Callable[[Sequence[RemainingJob]], AnalyticCost]
    """That of the backbone on one of them, with the adapters of these jobs."""
    capacity: int
    num_devices: int
    memory_bytes: int
    """Of a device."""

    def __call__(self, jobs: Sequence[RemainingJob], now: Layout) -> LayoutForecast:
        """The layout of now and the best one; PlanError if no layout holds the jobs."""
        parts = [(self._choice(own), self._whole_s(own), steps) for own, steps in phases(jobs)]
        planned = _predict(parts[0][0].chosen.layout, parts)
        assert planned is not None, "what is chosen fits, and fewer jobs need no more room"
        tokens = sum(job.step_tokens for job in jobs)
        return LayoutForecast(_predict(now, parts), planned, tokens, max(job.longest for job in jobs))

    def _choice(self, jobs: Sequence[RemainingJob]) -> LayoutChoice:
        known = [LayoutJob(round(job.step_tokens), job.rank, job.is_any_order) for job in jobs]
        return choose_layout(self.cost_for(jobs), known, self.capacity, self.num_devices, self.memory_bytes)

    def _whole_s(self, jobs: Sequence[RemainingJob]) -> float:
        """A global batch of every job on one device."""
        cost = self.cost_for(jobs)
        return slot_seconds(cost, 1, [self.capacity]) * sum(job.step_tokens for job in jobs) / self.capacity


def _predict(layout: Layout, parts: Sequence[tuple[LayoutChoice, float, int]]) -> Prediction | None:
    """What a layout makes of all phases; None if it is none of those that fit."""
    steps: list[tuple[float, int]] = []
    for choice, whole_s, num_steps in parts:
        fitting = (option for option in choice.options if option.device_bytes <= choice.memory_bytes)
        option = next((option for option in fitting if option.layout == layout), None)
        if option is None:
            return None
        steps.append((whole_s / option.speed, num_steps))
    return Prediction(layout, steps[0][0], sum(step_s * num_steps for step_s, num_steps in steps))
