"""Runs of ms-swift's own `swift sft` with a tiny Qwen3 and random words, in one process or on two.

Weights are made float64 after loading, because ms-swift's options have no float64. The global batch of a step is the
same on one process and on two: ms-swift's sampler gives rank r each second row from r on.
"""

import json
import os
import random
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from dual import as_launched, free_port
from sentence_runs import WORDS

from wholebatch.testing import run_ranks

ROWS, STEPS = 8, 20
END = "<|endoftext|>"


@dataclass
class Case:
    """ms-swift's options and environment variables, negatives of the queries, and whose loss."""

    options: tuple = ()
    variables: dict = field(default_factory=dict)
    negatives: str = "two"  # the name of a data file
    ours: bool = True
    micro_steps: int = 1
    model: str = "qwen3"


@dataclass
class Run:
    """The weights before and after training, and the logged losses."""

    start: torch.Tensor
    weights: torch.Tensor
    losses: list


MODELS = {"qwen3": "qwen3_emb", "bert": "modern_bert_gte"}


def make_files(folder, rows=ROWS * STEPS * 2):
    """Write random models with a tokenizer, and queries with a positive and none to three negatives."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import ModernBertConfig, ModernBertModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    vocabulary = [END, "[UNK]", "[CLS]", "[SEP]", *WORDS]
    inner = Tokenizer(models.WordLevel({word: k for k, word in enumerate(vocabulary)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": END, "eos_token": END, "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, model_max_length=64, **special)
    size = {"vocab_size": len(vocabulary), "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    size |= {"intermediate_size": 32, "max_position_embeddings": 64, "initializer_range": 0.5}
    tokens = {"pad_token_id": 0, "eos_token_id": 0, "bos_token_id": None, "tie_word_embeddings": True}
    torch.manual_seed(0)
    qwen3 = Qwen3ForCausalLM(Qwen3Config(**size, **tokens, num_key_value_heads=2, head_dim=8))
    bert = ModernBertModel(ModernBertConfig(**size, pad_token_id=0, eos_token_id=0, bos_token_id=0, cls_token_id=2))
    for name, model in (("qwen3", qwen3), ("bert", bert)):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    chance = random.Random(1)

    def message():
        return [{"role": "user", "content": " ".join(chance.choices(WORDS, k=chance.randint(2, 7)))}]

    def row(negatives):
        found = {"messages": message(), "positive_messages": [message()]}
        return found | {"negative_messages": [message() for _ in range(negatives)]}

    counts = {"two": lambda k: 2, "one": lambda k: 1, "none": lambda k: 0, "uneven": lambda k: (2, 0, 3, 1, 2)[k % 5]}
    for name, count in counts.items():
        text = "\n".join(json.dumps(row(count(k))) for k in range(rows))
        (folder / f"{name}.jsonl").write_text(text)


def truth(case):
    """Return the case of ms-swift's own loss in one process, on the whole batch."""
    return replace(case, ours=False)


def run(folder, cases, ranks):
    """Run `swift sft` for each case, one after the other; return the runs by case."""
    found = run_ranks(_train, ranks, free_port(), str(folder), cases, timeout_s=500)[0]
    return dict(zip(map(repr, cases), found, strict=True))


def arguments(folder, case, ranks, out):
    micro = ROWS // ranks // case.micro_steps
    return [
        "--task_type", "embedding", "--model", f"{folder}/{case.model}", "--model_type", MODELS[case.model],
        "--dataset", f"{folder}/{case.negatives}.jsonl", "--loss_type", "infonce", "--tuner_type", "full",
        "--torch_dtype", "float32", "--attn_impl", "eager", "--max_steps", str(STEPS), "--output_dir", out,
        "--per_device_train_batch_size", str(micro), "--gradient_accumulation_steps", str(case.micro_steps),
        "--learning_rate", "0.02", "--optim", "sgd", "--max_grad_norm", "0", "--lr_scheduler_type", "constant",
        "--warmup_ratio", "0", "--weight_decay", "0", "--logging_steps", "1", "--save_strategy", "no",
        "--dataloader_num_workers", "0", "--dataset_num_proc", "1", "--split_dataset_ratio", "0",
        "--report_to", "none", "--load_from_cache_file", "false", "--use_hf", "true",
        "--check_model", "false", "--use_cpu", "true", *case.options,
    ]  # fmt: skip


def _train(port, folder, cases):
    as_launched(port)
    os.environ |= {"HF_HUB_OFFLINE": "1", "MODELSCOPE_CACHE": f"{folder}/cache"}
    return [train(folder, case, dist.get_world_size(), f"{folder}/out{k}") for k, case in enumerate(cases)]


def train(folder, case, ranks, out, *, double=True):
    """Return what one `swift sft` does in this process."""
    from swift.pipelines import SwiftSft

    from wholebatch.integrations import ms_swift

    class Kept(SwiftSft):
        def _prepare_model_tokenizer(self, **kwargs):
            super()._prepare_model_tokenizer(**kwargs)
            if double:
                self.model.double()
            self.start = weights(self.model)

        def train(self, trainer):
            super().train(trainer)
            losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
            return Run(self.start, weights(self.model), list(map(float, losses)))

    plugin = ["--external_plugins", ms_swift.plugin_path()] if case.ours else []
    os.environ |= case.variables
    try:
        if case.ours:
            ms_swift.enable()  # the plugin's second import in one process has no effect
        return Kept([*arguments(folder, case, ranks, out), *plugin]).main()
    finally:
        ms_swift.disable()
        for name in case.variables:
            del os.environ[name]


def weights(model):
    return torch.cat([parameter.detach().double().flatten().clone() for parameter in model.parameters()])
