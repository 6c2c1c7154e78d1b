"""Hugging Face's Trainer on two processes: the mixin and the loss function give the weights of one process.

    make ecosystem; make late, with the oldest transformers that the adapter takes

One process trains in a loop of its own, without a Trainer, with a dense loss of the whole batch, in float64, with the
same number of micro-steps.
"""

import tempfile
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from dual import BATCH, MICRO_STEPS, STEPS, Dual, Pairs, as_launched, free_port, weights
from torch import nn
from torch.nn import functional as F

import wholebatch as wb
from wholebatch._base.third_party import declare_torchvision_operators
from wholebatch.auditing import presets
from wholebatch.testing import run_ranks

pytest.importorskip("transformers")
declare_torchvision_operators()
pytestmark = pytest.mark.filterwarnings("default")  # their libraries warn

ROUNDING = 1e-10  # of the distance moved: 20 steps in float64, summed in another order
FORMS = ("mixin", "mixin, chunks", "function")


class Labeled(Pairs):
    """Pairs with labels, which make the Trainer count items."""

    def __getitem__(self, row):
        return {**super().__getitem__(row), "labels": torch.tensor(row)}


class TakesAnyKeyword(Dual):
    """A model whose forward takes any keyword, as CLIPModel's does."""

    def forward(self, x, y, **_keywords):
        return super().forward(x, y)


class PicturesAndTexts(torch.utils.data.Dataset):
    """Random images and token sequences."""

    def __init__(self, count):
        generator = torch.Generator().manual_seed(1)
        self.images = torch.randn(count, 3, 8, 8, generator=generator, dtype=torch.float64)
        self.tokens = torch.randint(3, 20, (count, 6), generator=generator)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, row):
        return {"pixel_values": self.images[row], "input_ids": self.tokens[row]}


def clip_model():
    from transformers import CLIPConfig, CLIPModel

    torch.manual_seed(0)
    tower = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = tower | {"vocab_size": 20, "max_position_embeddings": 8, "eos_token_id": 2, "bos_token_id": 1}
    config = CLIPConfig(text_config=text, vision_config=tower | {"image_size": 8, "patch_size": 4}, projection_dim=8)
    return CLIPModel(config).double()


def dense(image, text, scale):
    logits = scale * image @ text.T
    at = torch.arange(len(logits))
    return (F.cross_entropy(logits, at) + F.cross_entropy(logits.T, at)) / 2


def setting(kind, micro_steps):
    """Return a model and its data."""
    rows = 2 * BATCH * STEPS * micro_steps
    if kind == "without scale":
        return WithoutScale(), Pairs(rows)
    if kind == "clip":
        return clip_model(), PicturesAndTexts(rows)
    return TakesAnyKeyword() if kind != "dual" else Dual(), (Labeled if kind == "labels" else Pairs)(rows)


def by_hand(kind, micro_steps):
    """Train with a dense loss; return the weights before and after, and the loss of an evaluation."""
    from wholebatch.integrations.transformers import features_of

    model, data = setting(kind, micro_steps)
    start, optimizer = weights(model), torch.optim.SGD(model.parameters(), lr=0.1)
    for number, batch in enumerate(torch.utils.data.DataLoader(data, 2 * BATCH)):
        (dense(*features_of(model, model(**batch))) / micro_steps).backward()
        if (number + 1) % micro_steps == 0:
            optimizer.step()
            optimizer.zero_grad()
    batch = next(iter(torch.utils.data.DataLoader(data, 2 * BATCH)))
    return start, weights(model), dense(*features_of(model, model(**batch))).item()


def train(kind, form, ranks, micro_steps, model=None, batch_loss=None):
    """Train in this process by a Trainer; return the weights before and after, and the loss of an evaluation."""
    from transformers import Trainer, TrainingArguments

    from wholebatch.integrations.transformers import ComputeLoss, WholeBatchTrainerMixin, features_of

    class InOrder(Trainer):
        def _get_train_sampler(self, *_):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    class ContrastiveTrainer(WholeBatchTrainerMixin, InOrder):
        pass

    usual, data = setting(kind, micro_steps)
    model = model or usual
    start = weights(model)
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder,
            per_device_train_batch_size=2 * BATCH // ranks,
            per_device_eval_batch_size=2 * BATCH // ranks,
            gradient_accumulation_steps=micro_steps,
            max_steps=STEPS,
            optim="sgd",
            learning_rate=0.1,
            max_grad_norm=0.0,
            lr_scheduler_type="constant",
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            remove_unused_columns=False,
        )
        if form == "function":
            loss = ComputeLoss(batch_loss or wb.CLIPLoss(), args, model)
            trainer = InOrder(model, args, train_dataset=data, compute_loss_func=loss)
        elif form == "plain function":

            def loss(outputs, labels, num_items_in_batch=None):
                return wb.CLIPLoss()(*features_of(model, outputs))

            trainer = InOrder(model, args, train_dataset=data, compute_loss_func=loss)
        else:
            chunks = 3 if form == "mixin, chunks" else None
            settings = {"batch_loss": batch_loss, "chunk_size": chunks}
            trainer = ContrastiveTrainer(model, args, train_dataset=data, **settings)
        trainer.train()
        part = torch.utils.data.Subset(data, range(2 * BATCH))
        evaluated = None if "function" in form else trainer.evaluate(part)["eval_loss"]
    return start, weights(model), evaluated


def body(port, jobs):
    as_launched(port)
    return {job: train(*job[:2], 2, job[2]) for job in jobs}


JOBS = [(kind, form, n) for kind in ("dual", "labels", "clip") for form in FORMS for n in (1, MICRO_STEPS)]
AUDITED = presets.settings("transformers")
WRONG = ("labels", "plain function", MICRO_STEPS)


@pytest.fixture(scope="module")
def found():
    return run_ranks(partial(body, free_port(), [*JOBS, WRONG]), 2, timeout_s=500)


@pytest.fixture(scope="module")
def true():
    return {(kind, n): by_hand(kind, n) for kind in ("dual", "labels", "clip") for n in (1, MICRO_STEPS)}


def distance(run, true):
    return ((run[1] - true[1]).norm() / (true[1] - true[0]).norm()).item()


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_two_processes_end_with_the_weights_of_one(found, true, job):
    expected = true[job[0], job[2]]
    for of_rank in found:
        assert distance(of_rank[job], expected) < ROUNDING
        assert torch.equal(of_rank[job][1], found[0][job][1])
        if of_rank[job][2] is not None:
            assert of_rank[job][2] == pytest.approx(expected[2], rel=1e-6)


def test_a_plain_loss_function_ends_elsewhere(found, true):
    """The Trainer multiplies it by the number of processes, and does not divide it by the number of micro-steps."""
    assert distance(found[0][WRONG], true["labels", MICRO_STEPS]) > 0.1


@pytest.mark.parametrize(("name", "exact"), [(name, "wholebatch" in name or "chunk" in name) for name in AUDITED])
def test_the_audit_finds_the_gradients_exact(name, exact):
    report = wb.audit(presets.settings("transformers")[name], ranks=(1, 2))
    assert report.exact is exact, report


class WithoutScale(Dual):
    """A model that leaves the scale to the loss."""

    def forward(self, x, y):
        return super().forward(x, y)[:2]


def losses_with_a_scale():
    """Return losses that train a scale which is no part of the model: in a module, and in a function."""
    scale = wb.Scale(5.0).double()
    return {
        "logit_scale.log_scale": wb.CLIPLoss(logit_scale=scale),
        r"a tensor of shape \(1,\)": lambda x, y: wb.functional.clip_loss(x, y, scale()),
    }


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", losses_with_a_scale())
def test_a_loss_with_a_parameter_of_its_own_is_refused(name, form):
    """The Trainer would neither train it nor save it."""
    with pytest.raises(ValueError, match=f"must train no parameters but the model's, got {name}: .* wb.Scale"):
        train("without scale", form, 1, 1, batch_loss=losses_with_a_scale()[name])


@pytest.mark.parametrize("form", FORMS)
def test_a_loss_may_use_a_parameter_of_the_model(form):
    """The loss alone uses the scale, which is trained as where the model returns its value."""
    model = WithoutScale()
    loss = wb.CLIPLoss(logit_scale=model.scale)
    assert distance(train("without scale", form, 1, 1, model, loss), by_hand("dual", 1)) < ROUNDING


@pytest.mark.parametrize("form", FORMS)
def test_a_loss_of_ones_own_in_whole_batch(form):
    assert distance(train("dual", form, 1, 1, batch_loss=wb.WholeBatch(dense)), by_hand("dual", 1)) < ROUNDING


def test_the_model_of_a_function_is_named_where_a_loss_uses_its_parameters():
    from wholebatch.integrations.transformers import ComputeLoss

    scale = wb.Scale(5.0)
    with pytest.raises(ValueError, match="If it is the model's, pass the model to ComputeLoss as well"):
        ComputeLoss(wb.CLIPLoss(logit_scale=scale), None)((torch.eye(3), torch.eye(3)))


EXAMPLES, KS = 13, (1, 5, 10)  # no multiple of the rows of a batch on 1, 2 or 3 processes


class WithEqualTexts(Pairs):
    """Pairs of which some have the same y: their similarities are ties."""

    def __init__(self):
        super().__init__(EXAMPLES)
        self.y[4:9] = self.y[3]


def figures(x, y, *, ties_count_for=False):
    """Return recall@k and MRR of pairs from the whole matrix."""
    similarity = x @ y.T
    own = similarity.diagonal()[:, None]
    before = (similarity > own if ties_count_for else similarity >= own - 1e-12) & ~torch.eye(len(x), dtype=torch.bool)
    rank = 1 + before.sum(1).double()
    return [*((rank <= k).double().mean().item() for k in KS), (1 / rank).mean().item()]


def evaluate(port):
    """Evaluate and predict in this process; return the metrics of both, and the shapes of the predictions."""
    from transformers import Trainer, TrainingArguments

    from wholebatch.integrations.transformers import WholeBatchTrainerMixin, retrieval_metrics

    class ContrastiveTrainer(WholeBatchTrainerMixin, Trainer):
        pass

    as_launched(port)
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(folder, per_device_eval_batch_size=2, report_to=[], use_cpu=True, disable_tqdm=True)
        data = WithEqualTexts()
        trainer = ContrastiveTrainer(Dual(), args, eval_dataset=data, compute_metrics=retrieval_metrics)
        metrics, predicted = trainer.evaluate(), trainer.predict(data)
    return metrics, predicted.metrics, [x.shape for x in predicted.predictions]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_metrics_of_an_evaluation_are_those_of_all_pairs(ranks):
    data = WithEqualTexts()
    with torch.no_grad():
        x, y, _ = Dual()(data.x, data.y)

    def both_ways(rows, **ties):
        return torch.tensor([figures(x[rows], y[rows], **ties), figures(y[rows], x[rows], **ties)]).flatten()

    repeated = torch.arange(EXAMPLES + -EXAMPLES % (2 * ranks)) % EXAMPLES  # as their sampler makes batches even
    local = [repeated[torch.arange(len(repeated)) // 2 % ranks == rank] for rank in range(ranks)]
    every = torch.arange(EXAMPLES)
    expected = pytest.approx(both_ways(every).tolist(), abs=1e-6)
    wrong = [both_ways(every, ties_count_for=True), both_ways(repeated)]
    wrong += [sum(both_ways(rows) for rows in local) / ranks] if ranks > 1 else []
    assert all(values.tolist() != expected for values in wrong)
    names = [f"{prefix}{name}" for prefix in ("", "reverse_") for name in (*(f"recall@{k}" for k in KS), "mrr")]
    for metrics, predicted, shapes in run_ranks(partial(evaluate, free_port()), ranks, timeout_s=300):
        assert shapes == [(EXAMPLES, 4)] * 2
        assert [metrics[f"eval_{name}"] for name in names] == expected
        assert [predicted[f"test_{name}"] for name in names] == expected


def test_metrics_of_other_features_are_refused(monkeypatch):
    from transformers import EvalPrediction

    from wholebatch.integrations import transformers

    def metrics(*predictions, **more):
        return transformers.retrieval_metrics(EvalPrediction(predictions=predictions, label_ids=None), **more)

    x = torch.eye(3).numpy()
    with pytest.raises(ValueError, match="must be called by a Trainer with WholeBatchTrainerMixin"):
        metrics(x, x)
    monkeypatch.setattr(transformers, "_in_mixin", SimpleNamespace(get=lambda: True))
    assert metrics(x, x)["mrr"] == 1
    for predictions in ((x,), (x, x[:2]), (x, x, x), (x[None], x[None]), ()):
        with pytest.raises(ValueError, match=r"predictions must be the features of both sides of the pairs, .* got"):
            metrics(*predictions)
    with pytest.raises(ValueError, match="batch_eval_metrics must be False"):
        metrics(x, x, compute_result=False)


def test_mistakes_are_refused():
    from transformers import PretrainedConfig, Trainer, TrainingArguments

    from wholebatch.integrations.transformers import WholeBatchTrainerMixin, features_of

    with pytest.raises(ValueError, match="compute_loss_func must be None beside WholeBatchTrainerMixin"):
        WholeBatchTrainerMixin(compute_loss_func=dense)

    class Mixed(WholeBatchTrainerMixin, Trainer):
        pass

    with pytest.raises(TypeError, match=r"write class Wrong\(WholeBatchTrainerMixin, Trainer\)"):
        type("Wrong", (Trainer, WholeBatchTrainerMixin), {})
    model = Dual()
    model.config = PretrainedConfig()
    with pytest.raises(ValueError, match=r"batch_loss must be a loss or a function, .* pass CLIPLoss\(\)"):
        Mixed(model, batch_loss=wb.CLIPLoss)
    smoothed = TrainingArguments(tempfile.gettempdir(), use_cpu=True, report_to=[], label_smoothing_factor=0.5)
    with pytest.raises(ValueError, match=r"label_smoothing_factor must be 0 .* got 0\.5; pass it to the loss"):
        Mixed(model, smoothed)
    with pytest.raises(
        TypeError, match=r"outputs must be a tuple of tensors, or have image_embeds .* got dict of Linear"
    ):
        features_of(nn.Linear(1, 1), {"loss": 1})


def test_a_siglip_model_gives_its_own_loss():
    from transformers import SiglipConfig, SiglipModel

    from wholebatch.integrations.transformers import features_of

    torch.manual_seed(0)
    tower = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = tower | {"vocab_size": 20, "max_position_embeddings": 8, "projection_size": 16}
    config = SiglipConfig(text_config=text, vision_config=tower | {"image_size": 8, "patch_size": 4})
    model = SiglipModel(config).double().eval()
    with torch.no_grad():
        model.logit_scale.fill_(1.3)
        model.logit_bias.fill_(-2.0)
    batch = torch.utils.data.default_collate([PicturesAndTexts(5)[row] for row in range(5)])
    outputs = model(**batch, return_loss=True)
    assert wb.SigLIPLoss()(*features_of(model, outputs)).item() == pytest.approx(outputs.loss.item(), rel=1e-12)
