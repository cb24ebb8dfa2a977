"""A linear that is a place for adapters by itself: all of it is on one device."""

from __future__ import annotations

from torch import nn

from weft.adapters.devices import SiteShare


class WholeLinear(nn.Linear):
    """What methods may need of it, without slots."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.out_features, self.in_features

    @property
    def share(self) -> SiteShare:
        """All of it."""
        return SiteShare.whole(self.out_features, self.in_features)
