"""What a network retrieves on data sets: they are described once, then ranked with each refinement asked for."""

from distap.evaluation.describing import Describing
from distap.evaluation.ground_truth import JudgedEvaluation, JudgedSet
from distap.evaluation.labelled import LabelledEvaluation, LabelledSet, refuse_seen_classes
from distap.evaluation.sets import Evaluation, EvaluationSet, compared, open_set

__all__ = [
    "Describing",
    "Evaluation",
    "EvaluationSet",
    "JudgedEvaluation",
    "JudgedSet",
    "LabelledEvaluation",
    "LabelledSet",
    "compared",
    "open_set",
    "refuse_seen_classes",
]
