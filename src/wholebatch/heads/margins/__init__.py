"""Margins: functions of the angle to the target class's center, by which its logit must exceed the others.

    theta = angle of x and w_y,    logit s phi(theta) of the target class, s cos theta_j of the others

    interface   the input of a margin, the interface, and its optional hooks
    angular     functions of the angle alone: ArcFace, CosFace, SphereFace, NormFace, combined
    norms       functions of the angle and the norm of the embedding: AdaFace, MagFace
    curricular  CurricularFace, which transforms the logits of negatives as well

A new margin needs a module here, its import and its name below, and a row in the tests' table of margins.
"""

from .angular import ArcFace, CombinedMargin, CosFace, NormFace, SphereFace
from .curricular import CurricularFace
from .norms import AdaFace, MagFace

__all__ = [  # the margins that the package ships, under its own name as well
    "AdaFace",
    "ArcFace",
    "CombinedMargin",
    "CosFace",
    "CurricularFace",
    "MagFace",
    "NormFace",
    "SphereFace",
]
