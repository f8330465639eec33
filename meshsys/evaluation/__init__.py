"""How good a model is on files of text, conversations, or questions with answers."""

from meshsys.evaluation.evaluate import Settings, evaluate
from meshsys.evaluation.results import Result, table, to_json

__all__ = ["Result", "Settings", "evaluate", "table", "to_json"]
