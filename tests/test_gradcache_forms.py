"""A deferred step does all that a step which goes backward itself does: the other tests, with a deferred form.

`wb.GradCache` is replaced by a class that makes a deferred loss and calls its backward pass, as a framework would. The
tests of engines take minutes; `make deferred` runs them too (WHOLEBATCH_TEST_DEFERRED=all).
"""

import os

import pytest
import test_gradcache_engines
import test_gradcache_errors
import test_gradcache_exactness
import test_gradcache_hidden_models
import test_gradcache_memory
import test_gradcache_passed_by
import test_gradcache_replay

import wholebatch as wb

GradCache = wb.GradCache


class Deferred(GradCache):
    """Takes the arguments of a step that goes backward itself, and is one, as far as its callers see."""

    def __init__(self, models, chunk_sizes, loss_fn, split=None, get_rep=None, fp16=False, scaler=None, **options):
        names = {"split_input_fn": split, "get_rep_fn": get_rep} | {
            name: options.pop(name) for name in ("split_input_fn", "get_rep_fn") if name in options
        }
        super().__init__(models, chunk_sizes, loss_fn, fp16=fp16, deferred=True, **names, **options)
        self.given_scaler = scaler

    def cache_step(self, *model_inputs, **kwargs):
        loss = super().cache_step(*model_inputs, **kwargs)
        (loss if self.given_scaler is None else self.given_scaler.scale(loss)).backward()
        return loss.detach()


def as_deferred(body, *args):
    """Run the body of a rank with deferred steps."""
    wb.GradCache = Deferred
    try:
        return body(*args)
    finally:
        wb.GradCache = GradCache


MODULES = [test_gradcache_exactness, test_gradcache_replay, test_gradcache_memory]
if os.environ.get("WHOLEBATCH_TEST_DEFERRED") == "all":
    MODULES += [test_gradcache_engines, test_gradcache_errors, test_gradcache_hidden_models, test_gradcache_passed_by]
# These state what holds without a deferred form only; tests/test_gradcache_deferred_backward.py has their counterparts.
WITHOUT = (
    "test_a_step_needs_gradients",
    "test_a_step_needs_gradients_on_all_ranks",
    "test_a_wrong_setting_is_refused_by_the_constructor",
    "test_an_engine_that_is_not_known_raises",  # which has both forms itself
    "test_a_wrong_call_on_one_rank_raises_on_all_ranks",  # a rank's loss that ignores a model is another loss
)
_run_ranks = wb.testing.run_ranks


def run_deferred(body, world_size, *args, **options):
    return _run_ranks(as_deferred, world_size, body, *args, **options)


@pytest.fixture(autouse=True)
def _deferred(monkeypatch):
    monkeypatch.setattr(wb, "GradCache", Deferred)
    for module in MODULES:
        if hasattr(module, "run_ranks"):
            monkeypatch.setattr(module, "run_ranks", run_deferred)


for _module in MODULES:
    for _name, _test in vars(_module).items():
        if _name.startswith("test_") and callable(_test) and _name not in WITHOUT:
            globals()[f"{_name}_of_{_module.__name__.removeprefix('test_gradcache_')}"] = _test
