"""Schedules found for given costs, links and memory, not written by hand."""

from schedules.search.bounds import lower_bound
from schedules.search.find import ALGORITHM, Answer, search
from schedules.search.question import Question

__all__ = ["ALGORITHM", "Answer", "Question", "lower_bound", "search"]
