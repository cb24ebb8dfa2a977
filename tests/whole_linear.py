"""A linear that is a place for adapters by itself: all of it is on one device."""

from __future__ import annotations

from torch import nn

from weft.adapters.place_share import PlaceShare


class WholeLinear(nn.Linear):
    """What methods may ask of it, without slots."""

    @property
    def share(self) -> PlaceShare:
        """All of it."""
        return PlaceShare.whole(self.out_features, self.in_features)
