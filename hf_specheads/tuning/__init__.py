"""Finding the fastest draft tree and draft vocabulary on the current machine."""

from .search import OptimalTree, search_tree
from .tune import TuningResult, tune
from .vocabulary import tune_vocabulary

__all__ = ["OptimalTree", "TuningResult", "search_tree", "tune", "tune_vocabulary"]
