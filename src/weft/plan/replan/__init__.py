"""Whether a run changes its layout when jobs come and go: forecasts of what is left to train, and the decision."""

from weft.plan.replan.decide import Decision, decide
from weft.plan.replan.types import Forecaster, LayoutForecast, MoveCost, Prediction, RemainingJob

__all__ = ["Decision", "Forecaster", "LayoutForecast", "MoveCost", "Prediction", "RemainingJob", "decide"]
