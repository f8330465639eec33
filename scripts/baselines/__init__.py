"""What the compiled schedules are measured against: autodiff of a scan over stages, and one device alone."""

from scripts.baselines.accumulate import accumulate
from scripts.baselines.autodiff_scan import autodiff_scan

__all__ = ["accumulate", "autodiff_scan"]
