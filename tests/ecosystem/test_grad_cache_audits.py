"""The audit of a cached step: grad_cache's loss gives 1/W of the gradient, and ours all of it.

    WHOLEBATCH_GRAD_CACHE=folder make ecosystem ARGS=tests/ecosystem/test_grad_cache_audits.py

The folder is a checkout of github.com/luyug/GradCache.
"""

import grad_cache_audits
import pytest
from tevatron_runs import folder_of

import wholebatch as wb


def test_the_audit_finds_the_gradients_exact():
    wb.testing.assert_exact(grad_cache_audits.ours, ranks=(1, 2, 3))


@pytest.mark.skipif(
    folder_of("WHOLEBATCH_GRAD_CACHE") is None, reason="WHOLEBATCH_GRAD_CACHE names no checkout of GradCache"
)
def test_the_audit_finds_that_of_grad_cache_too_small():
    report = wb.audit(grad_cache_audits.theirs, ranks=(1, 2))
    assert report.causes == ("gather-without-gradient",)
