"""Runs of insightface's own train_v2.py on CPUs, with a tiny network and random images, from a folder outside.

    WHOLEBATCH_INSIGHTFACE=/path/to/recognition/arcface_torch

The script's text runs as it is, except for the line that imports PartialFC_V2. A shim of device and backend makes calls
of CUDA do nothing, and `nccl` gloo. Packages that the script imports for data sets and logs, and that are not
installed, are empty modules. Runs start from their own checkpoint, so that all have the same weights at the start.
"""

import contextlib
import functools
import importlib.abc
import importlib.machinery
import os
import sys
import types
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
from dual import as_launched, free_port
from torch import nn
from torch.nn import functional as F

from wholebatch.heads.sampling import drawn_classes
from wholebatch.partition import Partition
from wholebatch.testing import run_ranks

FOLDER = os.environ.get("WHOLEBATCH_INSIGHTFACE", "")
IMPORT = "from partial_fc_v2 import PartialFC_V2"
IMPORTS = {
    "theirs": IMPORT,
    "ours": "from wholebatch.integrations.insightface import PartialFC_V2",
    "ours, exact": "from insightface_runs import exact as PartialFC_V2",
    "ours, kept": "from insightface_runs import kept as PartialFC_V2",
    "dense": "from insightface_runs import Dense as PartialFC_V2",
    "dense, exact": "from insightface_runs import DenseExact as PartialFC_V2",
}
CLASSES, EMBEDDING, BATCH, STEPS, SEED = 37, 6, 12, 20, 2048
CONFIG = {
    "margin_list": (1.0, 0.5, 0.0), "network": "tiny", "resume": True, "save_all_states": True,
    "embedding_size": EMBEDDING, "sample_rate": 1, "interclass_filtering_threshold": 0, "fp16": False,
    "optimizer": "sgd", "lr": 0.01, "momentum": 0.9, "weight_decay": 5e-4, "verbose": 10**6, "frequent": 10**6,
    "dali": False, "gradient_acc": 1, "seed": SEED, "num_workers": 0, "using_wandb": False, "rec": "synthetic",
    "num_classes": CLASSES, "num_epoch": 1, "num_image": STEPS * BATCH, "images": STEPS * BATCH,
    "noise": 0.2, "warmup_epoch": 0, "val_targets": [],
}  # fmt: skip
OPTIONAL = ("mxnet", "sklearn", "torchvision", "tensorboard", "easydict", "cv2", "scipy", "timm")


@dataclass
class Run:
    """A finished training: each step's loss, all weights at the end in one vector, and at the start."""

    losses: list[float]
    weights: torch.Tensor
    start: torch.Tensor
    momentum: torch.Tensor | None
    drawn: list[list[int]]

    @property
    def moved(self):
        return (self.weights - self.start).norm()


class Tiny(nn.Module):
    """A network without batch normalization, whose statistics would be those of one process."""

    def __init__(self, num_features):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(12, 10), nn.Tanh(), nn.Linear(10, num_features))

    def forward(self, x):
        return self.layers(x)


class Images(torch.utils.data.Dataset):
    """Images of random classes: an image for each class, and noise."""

    def __init__(self, count, dtype, noise):
        generator = torch.Generator().manual_seed(3)
        self.labels = torch.randint(CLASSES, (count,), generator=generator)
        noises = noise * torch.randn(count, 3, 2, 2, generator=generator, dtype=torch.float64)
        self.images = (of_classes()[self.labels] + noises).to(dtype)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, row):
        return self.images[row], self.labels[row]


def of_classes():
    """Return an image for each class."""
    return torch.randn(CLASSES, 3, 2, 2, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


class Dense(nn.Module):
    """The reference: one process, all logits of a step's classes, derivatives by autograd.

    Classes of a sample are those that PartialFC draws, or that a run of theirs has drawn.
    """

    given: list[list[int]] | None = None
    exact = False

    def __init__(self, margin_loss, embedding_size, num_classes, sample_rate, fp16):
        super().__init__()
        self.margin, self.rate, self.step = margin_loss, sample_rate, 0
        self.weight = nn.Parameter(torch.zeros(num_classes, embedding_size))

    def forward(self, embeddings, labels):
        classes = torch.arange(CLASSES)
        if self.given is not None:
            classes = torch.tensor(self.given[self.step])
        elif self.rate < 1:
            drawn = drawn_classes(self.rate, slice(0, CLASSES), seed=SEED, step=self.step, device=torch.device("cpu"))
            drawn[labels] = True
            classes = classes[drawn]
        self.step += 1
        at = torch.searchsorted(classes, labels)
        cosines = F.normalize(embeddings) @ F.normalize(self.weight[classes]).T
        target = F.one_hot(at, len(classes)).bool()
        threshold = self.margin.interclass_filtering_threshold
        if threshold > 0:
            cosines = torch.where((cosines > threshold) & ~target, 0.0, cosines)
        if self.margin.m3 > 0:
            phi = cosines - self.margin.m3
        else:
            phi = (cosines.clamp(-1, 1).acos() + self.margin.m2).cos()
            if not self.exact:
                phi = cosines + (phi - cosines).detach()
        return F.cross_entropy(self.margin.s * torch.where(target, phi, cosines), at)


class DenseExact(Dense):
    """The same with the margin's own derivative."""

    exact = True


def exact(*args):
    """Return our module with the margin's own derivative."""
    from wholebatch.integrations.insightface import PartialFC_V2

    return PartialFC_V2(*args, margin_grad="exact")


def kept(*args):
    """Return our module with memory for exp(S)."""
    from wholebatch.integrations.insightface import PartialFC_V2

    return PartialFC_V2(*args, memory=2**24)


def train(output, ranks, variant, *, dtype=torch.float64, compress=False, given=None, start=None, **config):
    """Train from a common start, or from a folder of checkpoints, and return the run."""
    output = Path(output)
    output.mkdir()
    cfg = CONFIG | {"output": str(output), "batch_size": BATCH // ranks} | config
    if start is None:
        write_start(output, ranks, cfg, dtype)
    else:
        for file in Path(start).glob("checkpoint_gpu_*.pt"):
            (output / file.name).write_bytes(file.read_bytes())
    before = whole(output, ranks)[0]
    # A run of one process has a process of its own, too.
    found = run_ranks(_train, max(ranks, 2), ranks, free_port(), variant, cfg, dtype, compress, given, timeout_s=300)
    weights, momentum = whole(output, ranks)
    by_rank = [of_rank[1] for of_rank in found[:ranks]]
    drawn = [sorted(chain.from_iterable(of_step)) for of_step in zip(*by_rank, strict=True)]
    return Run(found[0][0], weights, before, momentum, drawn)


def initial(dtype):
    """Return the backbone and all centers at the start, near to the embeddings: then margins decide the gradient."""
    generator = torch.Generator().manual_seed(5)
    backbone = Tiny(EMBEDDING).to(dtype)
    with torch.no_grad():
        for p in backbone.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) / 3)
        return backbone, backbone(of_classes().to(dtype))


def write_start(output, ranks, cfg, dtype):
    """Write checkpoints of step 0 as train_v2.py does."""
    backbone, centers = initial(dtype)
    for rank in range(ranks):
        weight = nn.Parameter(centers[Partition.even(CLASSES, ranks).rows(rank)].clone())
        groups = [{"params": backbone.parameters()}, {"params": [weight]}]
        if cfg["optimizer"] == "sgd":
            optimizer = torch.optim.SGD(groups, lr=cfg["lr"], momentum=0.9, weight_decay=cfg["weight_decay"])
        else:
            optimizer = torch.optim.AdamW(groups, lr=cfg["lr"], weight_decay=cfg["weight_decay"])
        for group in optimizer.param_groups:
            group["initial_lr"] = cfg["lr"]
        scheduler = {"last_epoch": 0, "_step_count": 1, "base_lrs": [cfg["lr"]] * 2, "_last_lr": [cfg["lr"]] * 2}
        checkpoint = {
            "epoch": 0, "global_step": 0, "state_dict_backbone": backbone.state_dict(),
            "state_dict_softmax_fc": {"weight": weight.detach()}, "state_optimizer": optimizer.state_dict(),
            "state_lr_scheduler": scheduler,
        }  # fmt: skip
        torch.save(checkpoint, output / f"checkpoint_gpu_{rank}.pt")


def whole(output, ranks):
    """Return all weights in one vector, and the momentum of the centers, from the checkpoints of all ranks."""
    saved = [torch.load(output / f"checkpoint_gpu_{rank}.pt", weights_only=True) for rank in range(ranks)]
    for other in saved[1:]:
        for name, value in saved[0]["state_dict_backbone"].items():
            assert torch.equal(other["state_dict_backbone"][name], value), "the ranks' backbones differ"
    parts = [x.flatten() for x in saved[0]["state_dict_backbone"].values()]
    parts += [of_rank["state_dict_softmax_fc"]["weight"].flatten() for of_rank in saved]
    last = [of_rank["state_optimizer"]["state"].get(4, {}).get("momentum_buffer") for of_rank in saved]
    return torch.cat(parts).double(), None if last[0] is None else torch.cat(last)


def _train(ranks, port, variant, cfg, dtype, compress, given):
    """Run their script in this process; return the losses of the steps and the classes that theirs has drawn."""
    as_launched(port)
    rank = dist.get_rank()
    dist.destroy_process_group()  # the script makes its own
    if rank >= ranks:
        return None
    os.environ["WORLD_SIZE"] = str(ranks)
    torch.set_default_dtype(dtype)
    Dense.given = given
    _as_on_gpus(compress)
    sys.path.insert(0, FOLDER)
    sys.meta_path.append(_Missing())
    sys.modules["torch.utils.tensorboard"] = _Empty("tensorboard")
    import easydict

    if isinstance(easydict, _Empty):
        easydict.EasyDict = _Attributes
    config = types.ModuleType("configs.tiny")
    config.config = easydict.EasyDict(cfg)
    sys.modules["configs.tiny"] = config
    import backbones
    import dataset
    from utils import utils_logging

    backbones.get_model = lambda name, num_features, **_: Tiny(num_features).to(dtype)
    dataset.SyntheticDataset = functools.partial(Images, cfg["images"], dtype, cfg["noise"])
    losses, drawn = [], []
    utils_logging.AverageMeter.update = lambda self, value, n: losses.append(value)
    if variant == "theirs":
        _record_draws(drawn)
    text = (Path(FOLDER) / "train_v2.py").read_text()
    assert text.count(IMPORT) == 1
    sys.argv = ["train_v2.py", "configs/tiny.py"]
    exec(compile(text.replace(IMPORT, IMPORTS[variant]), "train_v2.py", "exec"), {"__name__": "__main__"})
    dist.destroy_process_group()
    return losses, drawn


def _record_draws(drawn):
    """Record the classes of each sample."""
    import partial_fc_v2

    sample = partial_fc_v2.PartialFC_V2.sample

    def recorded(self, labels, index_positive):
        weight = sample(self, labels, index_positive)
        drawn.append((self.weight_index + self.class_start).tolist())
        return weight

    partial_fc_v2.PartialFC_V2.sample = recorded


class _Attributes(dict):
    """A dictionary whose items are attributes, as EasyDict."""

    __getattr__, __setattr__ = dict.__getitem__, dict.__setitem__


class _Empty(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": lambda self, *_args, **_keywords: None})


class _Missing(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """An empty module for each package that is not installed, with any attribute."""

    def find_spec(self, name, path=None, target=None):
        known = name.split(".")[0] in OPTIONAL
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if known else None

    def create_module(self, spec):
        return _Empty(spec.name)

    def exec_module(self, module):
        pass


def _as_on_gpus(compress):
    """Make calls of CUDA do nothing on CPUs, NCCL gloo, and leave out gradients in float16."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    for owner in (torch.Tensor, nn.Module):
        owner.cuda = lambda self, *_args, **_keywords: self
    to, tensor, make = torch.Tensor.to, torch.tensor, dist.init_process_group

    def to_here(self, *args, **keywords):
        if isinstance(keywords.get("device"), int):
            return self
        return to(self, *args, **keywords)

    torch.Tensor.to = to_here
    torch.tensor = lambda *a, device=None, **k: tensor(*a, device=None if device == "cuda" else device, **k)
    dist.init_process_group = lambda *_args, **_keywords: make("gloo")
    torch.cuda.set_device = lambda *_: None
    torch.cuda.Stream = lambda *_: None
    torch.cuda.stream = lambda *_: contextlib.nullcontext()
    torch.cuda.current_stream = lambda *_: types.SimpleNamespace(wait_stream=lambda _: None)
    torch.cuda.amp.grad_scaler.GradScaler = functools.partial(torch.amp.GradScaler, "cpu")
    wrap = nn.parallel.DistributedDataParallel.__init__

    def on_cpus(self, *args, device_ids=None, **keywords):
        wrap(self, *args, **keywords)

    nn.parallel.DistributedDataParallel.__init__ = on_cpus
    if not compress:
        default_hooks.fp16_compress_hook = default_hooks.allreduce_hook
    scheduler = torch.optim.lr_scheduler.LRScheduler.__init__

    def quiet(self, *args, verbose=False, **keywords):  # torch 2.13 takes no `verbose`, which their scheduler passes
        scheduler(self, *args, **keywords)

    torch.optim.lr_scheduler.LRScheduler.__init__ = quiet
