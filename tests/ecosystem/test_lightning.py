"""Lightning's Trainer with a head of sharded classes, on two and three processes: the weights of one process.

make ecosystem
"""

from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from dual import as_launched, free_port
from head_runs import CLASSES, OPTIMIZERS, STEPS, Model, distance, local_batches, make_head, true_weights, whole_vector

import wholebatch as wb
from wholebatch.auditing import presets
from wholebatch.integrations.lightning import ddp_strategy
from wholebatch.testing import RankError, run_ranks

lightning = pytest.importorskip("lightning")
pytestmark = pytest.mark.filterwarnings("default")  # their libraries warn

ROUNDING = 1e-11  # of the distance moved: 20 steps in float64, summed in another order


class Classifier(lightning.LightningModule):
    """The model as a LightningModule; where the head is created depends on `early`."""

    def __init__(self, optimizer="SGD", rate=1.0, early=False, automatic=True, clip=None, classes=CLASSES):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = automatic
        made = Model(rate, classes)
        self.backbone = made.backbone
        self.head = made.head if early else None

    def configure_model(self):
        if self.head is None:
            self.head = make_head(self.hparams.rate, self.hparams.classes)

    def training_step(self, batch, _):
        loss = self.head(self.backbone(batch[0]), batch[1])
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, self.hparams.clip, "norm")
            optimizer.step()
        return loss

    def validation_step(self, batch, _):
        self.log("val_loss", self.head(self.backbone(batch[0]), batch[1]), prog_bar=False)

    def configure_optimizers(self):
        return OPTIMIZERS[self.hparams.optimizer](self.parameters())


def trainer_of(folder=None, epochs=2, strategy=None, **settings):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return lightning.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=ddp_strategy() if strategy is None else strategy,
        max_epochs=epochs,
        use_distributed_sampler=False,
        default_root_dir=folder,
        **quiet,
        **{"enable_checkpointing": False, **settings},
    )


def batches(micro_steps=1):
    return torch.utils.data.DataLoader(local_batches(micro_steps), batch_size=None)


def train(early=False, optimizer="SGD", rate=1.0, micro_steps=1, clip=None, by_value=False, engine=None, manual=False):
    module = Classifier(optimizer, rate, early, not manual, clip)
    trainer = trainer_of(
        strategy=ddp_strategy(**(engine or {})),
        accumulate_grad_batches=micro_steps,
        gradient_clip_val=None if manual else clip,
        gradient_clip_algorithm="value" if by_value else None,
    )
    trainer.fit(module, batches(micro_steps))
    assert trainer.global_step == STEPS
    return whole_vector(module)


JOBS = [
    {},
    {"early": True},
    {"micro_steps": 3},
    {"clip": 0.1},
    {"clip": 0.01, "by_value": True},
    {"clip": 0.1, "micro_steps": 3, "optimizer": "AdamW"},
    {"rate": 0.4, "optimizer": "SparseSGD", "clip": 0.1},
    {"rate": 0.4, "optimizer": "SparseAdamW"},
    {"engine": {"find_unused_parameters": True}},
    {"engine": {"static_graph": True}},
    {"engine": {"gradient_as_bucket_view": True}, "micro_steps": 3},
    {"manual": True, "clip": 0.1},
]


def body(port, jobs):
    as_launched(port)
    return [train(**job) for job in jobs]


@pytest.fixture(scope="module", params=[2, 3])
def found(request):
    return [*zip(*run_ranks(partial(body, free_port(), JOBS), request.param, timeout_s=500), strict=True)]


@pytest.mark.parametrize("number", range(len(JOBS)), ids=lambda number: str(JOBS[number]))
def test_several_processes_end_with_the_weights_of_one(found, number):
    names = ("optimizer", "rate", "micro_steps", "clip", "by_value")
    true = true_weights(**{name: value for name, value in JOBS[number].items() if name in names})
    for of_rank in found[number]:
        assert distance(of_rank, true) < ROUNDING


@pytest.mark.parametrize(
    ("name", "causes"),
    [
        ('Trainer(strategy="ddp"), a replicated head', ()),
        ('Trainer(strategy="ddp"), wholebatch.PartialFC', ("raises",)),
        ("ddp_strategy of wholebatch.integrations, wholebatch.PartialFC", ()),
    ],
)
def test_the_audit_finds_the_gradients_exact(name, causes):
    report = wb.audit(presets.settings("lightning")[name], ranks=(1, 2))
    assert report.causes == causes, report
    assert report.exact is (not causes), report


# Checkpoints: saved after half of the steps, by two processes or by one.

SAVED = {"SGD": 1.0, "AdamW": 1.0, "SparseSGD": 0.4, "SparseAdamW": 0.4}  # optimizer: rate of samples


def save_body(port, folder, plain=False):
    from lightning.pytorch.callbacks import ModelCheckpoint

    as_launched(port)
    for optimizer, rate in SAVED.items():
        keeper = ModelCheckpoint(folder / optimizer, filename="half", save_on_train_epoch_end=True)
        settings = {"strategy": "auto"} if plain else {}
        trainer = trainer_of(epochs=1, callbacks=[keeper], enable_checkpointing=True, **settings)
        trainer.fit(Classifier(optimizer, rate, early=True), batches())
        trainer.save_checkpoint(folder / optimizer / "weights.ckpt", weights_only=True)
        trainer.validate(trainer.lightning_module, batches(), verbose=False)
    return [trainer.callback_metrics["val_loss"].item()]


def resume_body(port, folder, plain=False):
    """Go on from each checkpoint; return the weights of all, and the loss that a loaded module has."""
    as_launched(port)
    settings = {"strategy": "auto"} if plain else {}
    found = {}
    for optimizer, rate in SAVED.items():
        module = Classifier(optimizer, rate)
        trainer_of(**settings).fit(module, batches(), ckpt_path=folder / optimizer / "half.ckpt")
        found[optimizer] = whole_vector(module)
    for file in ("half.ckpt", "weights.ckpt"):
        loaded = Classifier.load_from_checkpoint(folder / optimizer / file)
        trainer = trainer_of(**settings)
        trainer.validate(loaded, batches(), verbose=False)
        found[file] = trainer.callback_metrics["val_loss"].item()
        again = trainer_of(**settings)
        again.validate(Classifier(optimizer, rate), batches(), ckpt_path=folder / optimizer / file, verbose=False)
        assert again.callback_metrics["val_loss"].item() == found[file]
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    losses = run_ranks(partial(save_body, free_port(), folder), 2, timeout_s=240)
    return folder, losses[0][0]


def test_a_checkpoint_holds_all_classes(saved):
    state = torch.load(saved[0] / "SGD" / "half.ckpt", weights_only=True)
    assert state["state_dict"]["head.weight"].shape == (CLASSES, 4)
    assert int(state["state_dict"]["head.first_class"]) == 0
    shapes = [x["momentum_buffer"].shape for x in state["optimizer_states"][0]["state"].values()]
    assert (CLASSES, 4) in shapes


@pytest.mark.parametrize(("world", "plain"), [(1, True), (1, False), (2, False), (3, False)])
def test_two_processes_save_and_any_number_goes_on(saved, world, plain):
    """`plain`: the default strategy of Lightning on one process, without this library's."""
    folder, loss = saved
    for of_rank in run_ranks(partial(resume_body, free_port(), folder, plain), world, timeout_s=240):
        for optimizer, rate in SAVED.items():
            assert distance(of_rank[optimizer], true_weights(optimizer, rate)) < ROUNDING, optimizer
        for file in ("half.ckpt", "weights.ckpt"):
            assert of_rank[file] == pytest.approx(loss, rel=1e-12)


def test_one_process_saves_without_the_strategy_and_three_go_on(tmp_path):
    run_ranks(partial(save_body, free_port(), tmp_path, True), 1, timeout_s=240)
    for of_rank in run_ranks(partial(resume_body, free_port(), tmp_path), 3, timeout_s=240):
        for optimizer, rate in SAVED.items():
            assert distance(of_rank[optimizer], true_weights(optimizer, rate)) < ROUNDING, optimizer


# The way without the strategy: DDP told to leave the head alone, by hand.


class ByHand(Classifier):
    """A module that sets the attribute which DistributedDataParallel reads."""

    def configure_model(self):
        super().configure_model()
        names = [*dict(self.head.named_parameters()), *dict(self.head.named_buffers())]
        self._ddp_params_and_buffers_to_ignore = [f"head.{name}" for name in names]


def by_hand_body(port, folder):
    as_launched(port)
    module = ByHand()
    trainer = trainer_of(strategy="ddp", gradient_clip_val=0.1)
    trainer.fit(module, batches())
    trainer.save_checkpoint(folder / "by_hand.ckpt")
    clipped, module = whole_vector(module), ByHand()
    trainer_of(strategy="ddp").fit(module, batches())
    return clipped, whole_vector(module)


@pytest.fixture(scope="module")
def by_hand(tmp_path_factory):
    folder = tmp_path_factory.mktemp("by_hand")
    return folder, run_ranks(partial(by_hand_body, free_port(), folder), 2, timeout_s=120)


def test_clipping_without_the_strategy_ends_elsewhere_and_ranks_drift_apart(by_hand):
    one, two = by_hand[1]
    assert distance(one[1], true_weights()) < ROUNDING, "without clipping both ways are exact"
    assert distance(one[0], true_weights(clip=0.1)) > 0.01
    assert (one[0][: len(two[0])] - two[0]).norm() > 1e-3 * two[0].norm(), "the backbones of the ranks"


def test_a_checkpoint_without_the_strategy_lacks_classes_and_is_refused(by_hand):
    file = by_hand[0] / "by_hand.ckpt"
    state = torch.load(file, weights_only=True)
    assert len(state["state_dict"]["head.weight"]) == 4 < CLASSES
    for world in (1, 2):
        run_ranks(partial(refused_body, free_port(), file), world, timeout_s=120)


def refused_body(port, file):
    as_launched(port)
    with pytest.raises(ValueError, match=r"a state_dict holds one rank's part of a head|another rank's centers"):
        trainer_of().fit(Classifier(), batches(), ckpt_path=file)


# A gradient that overflows in one rank's part of the head.


def overflow_body(port):
    """Rank 1's part overflows in the second step: both ranks skip it, and halve the scale."""
    as_launched(port)
    from lightning.pytorch.plugins import MixedPrecision

    class Overflows(Classifier):
        def on_after_backward(self):
            if self.global_step == 1 and dist.get_rank() == 1:
                self.head.weight.grad[0, 0] = float("inf")

        def on_before_zero_grad(self, optimizer):
            steps.append(self.backbone[0].weight.detach().clone())

    steps = []
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    plugin.forward_context = lambda: torch.autocast("cpu", enabled=False)  # in float64; the scaler is what is tested
    trainer = trainer_of(plugins=[plugin], max_steps=5, gradient_clip_val=0.1)
    trainer.fit(Overflows(), batches())
    return scaler.get_scale(), [torch.equal(a, b) for a, b in pairwise(steps)], steps[-1]


def test_all_ranks_skip_a_step_that_overflows_on_one():
    one, two = run_ranks(partial(overflow_body, free_port()), 2, timeout_s=120)
    assert one[0] == two[0] == 2.0**3
    assert one[1] == two[1]
    assert sum(one[1]) == 1
    assert torch.equal(one[2], two[2])


# Without the strategy, and what it refuses.


def errors_body(port, folder):
    as_launched(port)
    from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
    from torch.distributed.optim import ZeroRedundancyOptimizer

    with pytest.raises(ValueError, match=r"has wrapped the head.*lightning\.ddp_strategy\(\)"):
        trainer_of(strategy="ddp").fit(Classifier(classes=8), batches())
    for callback in (WeightAveraging(), StochasticWeightAveraging(0.1)):
        with pytest.raises(ValueError, match=r"callbacks must not contain .*WeightAveraging with a head"):
            trainer_of(callbacks=[callback]).fit(Classifier(), batches())
    with pytest.raises(ValueError, match=r"model_averaging_period must be None .*, got 4"):
        trainer_of(strategy=ddp_strategy(model_averaging_period=4)).fit(Classifier(), batches())
    OPTIMIZERS["sharded"] = lambda parameters: ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match=r"optimizer must not be sharded .*, got ZeroRedundancyOptimizer"):
        trainer_of().fit(Classifier("sharded"), batches())
    module = Classifier()
    module.head = make_head(group=wb.comm.LocalCommunicator())
    with pytest.raises(ValueError, match=r"group of the head 'head' must be all 2 processes .*, got a group of 1"):
        trainer_of().fit(module, batches())
    OPTIMIZERS["factored"] = lambda parameters: torch.optim.Adafactor(parameters, lr=0.1)
    trainer = trainer_of(epochs=1)
    trainer.fit(Classifier("factored"), batches())
    with pytest.raises(ValueError, match=r"must have a row for each class, got .* of Adafactor; use wholebatch"):
        trainer.save_checkpoint(folder / "factored.ckpt")


def test_mistakes_raise_on_all_ranks(tmp_path):
    run_ranks(partial(errors_body, free_port(), tmp_path), 2, timeout_s=240)


def uneven_body(port):
    as_launched(port)
    trainer_of(strategy="ddp").fit(Classifier(), batches())


def test_without_the_strategy_parts_of_different_sizes_end_in_an_error():
    """Parts of 4 and 3 classes: DDP compares the shapes and raises on rank 1 alone, whose end has to end rank 0."""
    with pytest.raises(RankError, match="to match sizes of the same param in process 0"):
        run_ranks(partial(uneven_body, free_port()), 2, timeout_s=60)
