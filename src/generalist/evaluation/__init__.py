"""How accurate a finished model is, natural and under attack."""

from generalist.evaluation.accuracy import Accuracy
from generalist.evaluation.classifier import check_classifier
from generalist.evaluation.suite import evaluate_model
from generalist.evaluation.summary import Evaluation

__all__ = ["Accuracy", "Evaluation", "check_classifier", "evaluate_model"]
