"""Tiny models of transformers with random weights, saved as their users save them."""

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertModel,
    CLIPConfig,
    CLIPModel,
    GPT2Config,
    GPT2Model,
    PreTrainedTokenizerFast,
    ResNetConfig,
    ResNetModel,
    RobertaConfig,
    RobertaModel,
    SiglipConfig,
    SiglipModel,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTModel,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.convnext.image_processing_pil_convnext import ConvNextImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [
    "latin",
    "cyrillic",
    "greek",
    "small",
    "capital",
    "letter",
    "with",
    "tonos",
    "alpha",
    "beta",
    "one",
    "two",
    "three",
    "words",
    "an",
    "example",
]
LETTERS = [chr(code) for code in range(ord("a"), ord("z") + 1)]
VOCABULARY = [*SPECIAL, *WORDS, *LETTERS[1:], *(f"##{letter}" for letter in LETTERS)]
LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "hidden_size": 32}
PIXELS = {**LAYERS, "image_size": 32, "patch_size": 8}
_RATE = {"hidden_dropout_prob": 0.5, "attention_probs_dropout_prob": 0.5}
_SQUARE = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}


def save_tokenizer(folder, tokens):
    """Save a WordPiece tokenizer that starts with [CLS] and ends with [SEP], for texts of up to so many tokens."""
    vocabulary = {word: index for index, word in enumerate(dict.fromkeys(VOCABULARY))}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
    ends = [("[CLS]", 2), ("[SEP]", 3)]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    names = {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=tokens, **names).save_pretrained(folder)
    return len(vocabulary)


def save_text(folder, name):
    """Save a model of texts: "bert", "roberta", "gpt2" or "t5"."""
    torch.manual_seed(0)
    words = save_tokenizer(folder, 10**30 if name == "roberta" else 32)
    sizes = {"vocab_size": words, **LAYERS}
    model = {
        "bert": lambda: BertModel(BertConfig(**sizes, **_RATE, max_position_embeddings=48)),
        "roberta": lambda: RobertaModel(RobertaConfig(**sizes, max_position_embeddings=34, pad_token_id=1)),
        "gpt2": lambda: GPT2Model(GPT2Config(vocab_size=words, n_embd=32, n_layer=2, n_head=2, n_positions=32)),
        "t5": lambda: T5ForConditionalGeneration(
            T5Config(vocab_size=words, d_model=32, d_ff=64, num_layers=2, num_heads=2, d_kv=16)
        ),
    }[name]()
    model.save_pretrained(folder)
    return folder


def save_image(folder, name):
    """Save a model of pictures: "vit", or "resnet", which has batch norm."""
    torch.manual_seed(1)
    if name == "vit":
        ViTModel(ViTConfig(**PIXELS, **_RATE)).save_pretrained(folder)
        ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(folder)
    else:
        ResNetModel(ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1])).save_pretrained(folder)
        ConvNextImageProcessorPil(size={"shortest_edge": 64}).save_pretrained(folder)
    return folder


def save_both(folder, name):
    """Save a model of images and texts: "clip" or "siglip"."""
    torch.manual_seed(2)
    words = save_tokenizer(folder, 16)
    texts = {"vocab_size": words, **LAYERS, "max_position_embeddings": 16}
    if name == "clip":
        ends = {"bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0}
        config = CLIPConfig(text_config={**texts, **ends}, vision_config=PIXELS, projection_dim=24)
        CLIPModel(config).save_pretrained(folder)
        CLIPImageProcessorPil(**_SQUARE).save_pretrained(folder)
    else:
        SiglipModel(SiglipConfig(text_config=texts, vision_config=PIXELS)).save_pretrained(folder)
        SiglipImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(folder)
    return folder
