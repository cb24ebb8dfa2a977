"""Gives every job one colour that it keeps in all charts, readable on white and on near-black."""

from __future__ import annotations

import colorsys

CALM = (
    "#4a7fb5",  # blue
    "#d98a3d",  # orange
    "#4b9b78",  # green
    "#c65d5d",  # red
    "#8c70b8",  # violet
    "#3a9fae",  # teal
    "#c4a234",  # gold
    "#c272a0",  # pink
    "#84964a",  # olive
    "#97765f",  # brown
)
GOLDEN_ANGLE = 0.618034
"""Turning the hue by this much never comes close to an earlier hue soon."""


def job_colours(num_jobs: int) -> list[str]:
    """One `#rrggbb` per job: ten picked ones, then hues far from their forerunners."""
    return [CALM[i] if i < len(CALM) else _further(i) for i in range(num_jobs)]


def faint(colour: str, alpha: float) -> str:
    """The colour as CSS with an alpha."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha:g})"


def _further(index: int) -> str:
    lightness = (0.46, 0.60, 0.53)[index % 3]
    channels = colorsys.hls_to_rgb(index * GOLDEN_ANGLE % 1.0, lightness, 0.42)
    return "#" + "".join(f"{round(255 * channel):02x}" for channel in channels)
