"""How accurate a finished model is, natural and under attack."""

from generalist.evaluation.accuracy import Accuracy, evaluate_model
from generalist.evaluation.classifier import check_classifier

__all__ = ["Accuracy", "check_classifier", "evaluate_model"]
