"""late-interaction-kernels: the scores of its reference give the loss of `max_sim_loss`; masked tokens are left out.

    make late

Its kernels run on GPUs only.
"""

import pytest
import torch
from late_interaction import Batch, as_sentence_transformers, assert_same_loss, of_both, unit
from torch.nn.functional import cross_entropy


@of_both
def test_late_interaction_kernels(ours):
    """Its scores on a CPU, by its own reference, give the same loss: masked tokens are left out."""
    reference = pytest.importorskip("late_interaction_kernels.reference")

    batch = Batch()

    def theirs(queries, documents):
        scores = reference.maxsim_reference(
            unit(queries), unit(documents), q_mask=batch.query_mask, d_mask=batch.document_mask
        )
        return cross_entropy(3.0 * scores, batch.n * torch.arange(batch.b))

    assert_same_loss(as_sentence_transformers(ours, batch, logit_scale=3.0), theirs, batch)
