"""Gradient caching with models and engines of other libraries: the gradient is that of the same chunks with graphs.

    make ecosystem

Models are small, with random weights, in float64 and with dropout: the reference draws the same masks.
"""

import copy

import pytest
import torch
import torch.distributed as dist
from ddp import counting
from dual import as_launched, free_port
from torch import nn
from torch.nn.functional import normalize

import wholebatch as wb
from wholebatch.gradcache.inputs.parts import split_tree
from wholebatch.partition import Partition
from wholebatch.testing import run_ranks

pytestmark = pytest.mark.filterwarnings("default")  # these libraries warn of each other's deprecations

WORDS = "[PAD] [UNK] sort find read write open close list file line word number sum"
TEXTS = ["open file", "read line", "find word in list", "sum number", "sort list", "write line to file", "close file"]
OTHERS = ["file open", "line", "list find", "number sum number", "list", "file write line", "file"]


def bert():
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(WORDS.split()), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    return BertModel(config).double().train()


def tokenize(texts):
    """Return a padded BatchEncoding."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({word: k for k, word in enumerate(WORDS.split())}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="[PAD]", unk_token="[UNK]")
    return tokenizer(texts, padding=True, return_tensors="pt")


def pooled(output):
    return output.last_hidden_state.mean(1)


def loss_fn(x, y):
    return wb.functional.clip_loss(normalize(x, dim=1), normalize(y, dim=1), 5.0)


def graphed(model, encodings, size, seed=0):
    """Return the representations of the same chunks with the same masks, with all graphs kept."""
    torch.manual_seed(seed)
    towers = []
    for encoding in encodings:
        rows = len(encoding["input_ids"])
        parts = [{name: x[k : k + size] for name, x in encoding.items()} for k in range(0, rows, size)]
        towers.append(torch.cat([pooled(model(**part)) for part in parts]))
    return towers


def gradients(model):
    """Return the gradients by name, and clear them."""
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def assert_same(found, true):
    assert found.keys() == true.keys()
    largest = max(z.norm() for z in true.values())
    for name, z in true.items():
        assert (found[name] - z).norm() <= 1e-10 * largest, name


def check(model, keep=0, **options):
    encodings = [tokenize(TEXTS), tokenize(OTHERS)]
    loss_fn(*graphed(model, encodings, 3)).backward()
    true = gradients(model)
    torch.manual_seed(0)
    wb.GradCache([model, model], 3, loss_fn, get_rep_fn=pooled, keep_graphs=keep, **options)(*encodings)
    found = gradients(model)
    assert_same(found, true)
    return found


@pytest.mark.parametrize("keep", [0, 2, 1.0, "auto"])
def test_batch_encodings_and_model_outputs(keep):
    assert len(check(bert(), keep)) > 30


def test_chunks_of_a_batch_encoding_are_batch_encodings():
    whole = tokenize(TEXTS)
    parts = [part.tree for part in split_tree(whole, 3, "the input")]
    assert {type(part) for part in parts} == {type(whole)}
    assert [len(part.input_ids) for part in parts] == [3, 3, 1]
    assert torch.equal(torch.cat([part.attention_mask for part in parts]), whole.attention_mask)


def test_activation_checkpointing_of_transformers():
    model = bert()
    model.activation_checkpointing_enable()
    check(model, 1)


def test_adapters_of_peft_on_a_frozen_model():
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    model = get_peft_model(bert(), LoraConfig(r=2, target_modules=["query", "value"], lora_dropout=0.2)).double()
    found = check(model, 1)
    assert found
    assert all("lora" in name for name in found)


@pytest.mark.parametrize("form", [lambda features: [features], lambda features: features], ids=["list", "mapping"])
def test_modules_of_sentence_transformers(form):
    """These modules write into the mapping that they receive, which is their one argument."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    class Transformer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = bert()

        def forward(self, features, **_):
            states = self.inner(features["input_ids"], features["attention_mask"]).last_hidden_state
            features["token_embeddings"] = states
            return features

    model = SentenceTransformer(modules=[Transformer(), Pooling(16, "mean")], device="cpu").double().train()
    encodings = [dict(tokenize(texts)) for texts in (TEXTS, OTHERS)]
    torch.manual_seed(0)
    parts = [
        [model({name: x[k : k + 3] for name, x in encoding.items()})["sentence_embedding"] for k in (0, 3, 6)]
        for encoding in encodings
    ]
    loss_fn(*map(torch.cat, parts)).backward()
    true = gradients(model)
    torch.manual_seed(0)
    step = wb.GradCache([model, model], 3, loss_fn, get_rep_fn=lambda features: features["sentence_embedding"])
    step(*map(form, encodings))
    assert_same(gradients(model), true)


# Engines in wrappers, on two ranks with different numbers of chunks.
COUNTS, SIZE = (5, 2), 2


def engine_in(wrapped):
    return next(m for m in wrapped.modules() if isinstance(m, nn.parallel.DistributedDataParallel))


def accelerated(model):
    from accelerate import Accelerator

    return Accelerator(cpu=True).prepare(model)


def fabricated(model):
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy="ddp")
    fabric.launch()
    return fabric.setup(model)


def wrapped_body(wrap, port, keep):
    as_launched(port)
    rank, rows = dist.get_rank(), Partition(COUNTS)
    model = bert()
    model.pooler = None  # DDP waits for gradients of all parameters
    alone = copy.deepcopy(model)
    encodings = [tokenize(texts) for texts in (TEXTS, OTHERS)]
    local = [{name: x[rows.rows(rank)] for name, x in encoding.items()} for encoding in encodings]
    wrapped = wrap(model)
    reduced = counting(engine_in(wrapped))
    torch.manual_seed(rank)
    wb.GradCache([wrapped, wrapped], SIZE, loss_fn, get_rep_fn=pooled, keep_graphs=keep)(*local)

    of_ranks = [
        graphed(alone, [{n: x[rows.rows(r)] for n, x in e.items()} for e in encodings], SIZE, seed=r) for r in (0, 1)
    ]
    x, y = (torch.cat(parts) for parts in zip(*of_ranks, strict=True))
    wb.reference.clip_loss(normalize(x, dim=1), normalize(y, dim=1), 5.0).backward()
    assert_same(gradients(model), gradients(alone))
    return len(reduced)


@pytest.mark.parametrize("keep", [0, 2])
@pytest.mark.parametrize("wrap", [accelerated, fabricated])
def test_engines_in_wrappers(wrap, keep):
    assert run_ranks(wrapped_body, 2, wrap, free_port(), keep, timeout_s=120) == [1, 1]


# Lightning's trainer wraps the module; `self` is the wrapped module and bypasses the engine.
def trained_body(port, through_the_engine):
    import lightning

    as_launched(port)
    rows = Partition(COUNTS).rows(dist.get_rank())
    local = [{name: x[rows] for name, x in tokenize(texts).items()} for texts in (TEXTS, OTHERS)]

    class Trained(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.net = bert()
            self.net.pooler = None

        def forward(self, **encoding):
            return self.net(**encoding)

        def training_step(self, *_):
            model = self.trainer.strategy.model if through_the_engine else self.net
            loss = wb.GradCache([model, model], SIZE, loss_fn, get_rep_fn=pooled)(*local)
            self.optimizers().step()
            self.optimizers().zero_grad()
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def train_dataloader(self):
            return torch.utils.data.DataLoader(range(4 * dist.get_world_size()))

    module = Trained()
    trainer = lightning.Trainer(
        accelerator="cpu", devices=dist.get_world_size(), strategy="ddp", max_steps=4, logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    if not through_the_engine:
        with pytest.raises(ValueError, match="must reach its parameters through the DistributedDataParallel"):
            trainer.fit(module)
        return
    trainer.fit(module)
    assert trainer.global_step == 4


@pytest.mark.parametrize("through_the_engine", [False, True])
def test_a_lightning_module(through_the_engine):
    run_ranks(trained_body, 2, free_port(), through_the_engine, timeout_s=120)
