"""A mapping is the keywords of a model, or its one argument, as the model's signature says."""

import functools
from collections import UserDict

import pytest
import torch
import torch.distributed as dist
from gradcache_models import Clip, assert_all_same, batch, good_loss, gradients_of, mlp, sharded
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import wholebatch as wb
from wholebatch.gradcache.inputs.trees import takes_mapping
from wholebatch.testing import run_ranks

FEATURES = {"a": 1, "b": 2}


class OneArgument(nn.Module):
    """An encoder whose features are one argument, as a SentenceTransformer's are."""

    def __init__(self):
        super().__init__()
        self.inner = mlp(0)

    def forward(self, input, **options):
        assert not options
        return self.inner(input["a"] + 2 * input["b"])


class Keywords(OneArgument):
    def forward(self, a, b=None):
        return super().forward({"a": a, "b": b})


class Anything(nn.Module):
    def __init__(self, **inside):
        super().__init__()
        for name, module in inside.items():
            setattr(self, name, module)

    def forward(self, *args, **kwargs):
        raise AssertionError("a signature is looked up without a call")


class Called(nn.Module):
    def __call__(self, features):
        return features


class CalledObject:
    def __call__(self, features):
        return features

    def method(self, features):
        return features


def of_keywords(a, b):
    return a + b


def of_anything(*args, **kwargs):
    raise AssertionError("a signature is looked up without a call")


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (OneArgument(), True),
        (Keywords(), False),
        (nn.Sequential(OneArgument()), True),
        (Anything(), False),
        (Anything(module=OneArgument()), True),
        (Anything(module=Keywords()), False),
        (Anything(module=Anything(_orig_mod=OneArgument())), True),
        (Anything(_forward_module=OneArgument()), True),
        (Anything(other=OneArgument()), False),
        (Called(), True),
        (CalledObject(), True),
        (CalledObject().method, True),
        (OneArgument().forward, True),
        (lambda features: features, True),
        (lambda a, b: a, False),
        (lambda a: a, True),
        (lambda a, b, c: a, False),
        (lambda **features: features, False),
        (lambda x, **features: features, True),
        (lambda a, **features: features, False),
        (lambda x, y: x, False),
        (lambda x, y=None: x, True),
        (lambda: None, False),
        (of_keywords, False),
        (of_anything, False),
        (functools.partial(of_keywords, b=1), False),
        (functools.partial(lambda x, y: x, y=1), True),
        (min, False),
        (torch.relu, False),
    ],
)
def test_the_signature_decides(model, expected):
    assert takes_mapping(model, FEATURES) is expected
    assert takes_mapping(model, UserDict(FEATURES)) is expected


def test_keys_that_are_no_names_of_arguments():
    assert not takes_mapping(lambda input: input, {"input": 1})
    assert takes_mapping(lambda input: input, {0: 1})
    assert takes_mapping(lambda a, /: a, {"a": 1}), "a positional-only argument has no keyword"


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")  # from torch's own import
def test_compiled_models():
    assert takes_mapping(torch.compile(OneArgument()), FEATURES)
    assert not takes_mapping(torch.compile(Keywords()), FEATURES)
    assert takes_mapping(torch.compile(lambda features: features), FEATURES)
    model = OneArgument()
    model.compile()
    assert takes_mapping(model, FEATURES)


@pytest.mark.parametrize("form", [dict, UserDict, lambda x: [x]], ids=["dict", "UserDict", "list"])
def test_the_gradient_of_a_model_of_one_mapping(form):
    model, other, loss_fn, (a, b), (y, _) = OneArgument(), mlp(1), Clip(), batch(7), batch(7, seed=1)
    features = {"a": a, "b": b}
    loss_fn(model(features), other(y)).backward()
    true = gradients_of(model, other, loss_fn)
    for encoder in (model, lambda x: model(input=x), model.forward):
        wb.GradCache([encoder, other], 3, loss_fn)(form(features), y)
        assert_all_same(gradients_of(model, other, loss_fn), true)
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        model(**features)


def test_an_error_inside_a_model_of_keywords_stays_its_own():
    """A TypeError of the model's code is no reason to call it in the other form."""
    calls = []

    def encode(a, b):
        calls.append((a, b))
        raise TypeError("encode() got an unexpected keyword argument 'a'")

    a, b = batch(4)
    with pytest.raises(TypeError, match="unexpected keyword argument 'a'"):
        wb.GradCache([encode, mlp(0)], 2, good_loss)({"a": a, "b": b}, a)
    assert len(calls) == 1


def engines_body(engine):
    a, b = batch(4, seed=dist.get_rank())
    alone, plain = OneArgument(), OneArgument()
    model = DistributedDataParallel(plain) if engine == "ddp" else sharded(plain, plain.inner)
    assert takes_mapping(model, {"a": a, "b": b})
    features = [batch(4, seed=rank) for rank in range(2)]
    (torch.cat([alone({"a": a, "b": b}) for a, b in features]).square().sum() / 2).backward()
    wb.GradCache([model], 2, lambda x: x.square().sum())({"a": a, "b": b})
    found = [z.full_tensor() if hasattr(z, "full_tensor") else z for z in gradients_of(plain)]
    assert_all_same(found, [p.grad for p in alone.parameters()])


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_through_engines(engine):
    run_ranks(engines_body, 2, engine, timeout_s=60)
