"""What compiled schedules are measured against: autodiff of a scan over stages, and one device alone."""

from scripts.baselines.accumulate import accumulate
from scripts.baselines.autodiff_scan import autodiff_scan
from scripts.baselines.jobs import Job, Size, accumulate_job, autodiff_job, schedule_job, stage_jobs

__all__ = [
    "Job",
    "Size",
    "accumulate",
    "accumulate_job",
    "autodiff_job",
    "autodiff_scan",
    "schedule_job",
    "stage_jobs",
]
