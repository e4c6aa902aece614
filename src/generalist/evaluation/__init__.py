"""How accurate a finished model is, natural and under attack."""

from generalist.evaluation.accuracy import Accuracy, evaluate_model

__all__ = ["Accuracy", "evaluate_model"]
