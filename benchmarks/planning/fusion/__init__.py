"""What of fusion no command executes yet: chunks of one length."""

from benchmarks.planning.fusion.align import align

__all__ = ["align"]
