"""BibTeX entries of the papers that define the losses; their trainer writes them into the model card."""

_PAPERS = r"""
oord2018cpc 1807.03748 Representation Learning with Contrastive Predictive Coding
van den Oord, Aaron and Li, Yazhe and Vinyals, Oriol
guenther2023jina2 2310.19923 Jina Embeddings 2: 8192-Token General-Purpose Text Embeddings for Long Documents
G{\"u}nther, Michael and others
li2023gte 2308.03281 Towards General Text Embeddings with Multi-stage Contrastive Learning
Li, Zehan and Zhang, Xin and Zhang, Yanzhao and Long, Dingkun and Xie, Pengjun and Zhang, Meishan
gao2021gradcache 2101.06983 Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup
Gao, Luyu and Zhang, Yunyi and Han, Jiawei and Callan, Jamie
solatorio2024gist 2402.16829 GISTEmbed: Guided In-sample Selection of Training Negatives for Text Embedding Fine-tuning
Solatorio, Aivin V.
kusupati2022matryoshka 2205.13147 Matryoshka Representation Learning
Kusupati, Aditya and others
hofstatter2020margin 2010.02666 Improving Efficient Neural Ranking Models with Cross-Architecture Knowledge Distillation
Hofst{\"a}tter, Sebastian and others
lin2020tightly 2010.11386 Distilling Dense Representations for Ranking using Tightly-Coupled Teachers
Lin, Sheng-Chieh and Yang, Jheng-Hong and Lin, Jimmy
khattab2020colbert 2004.12832 ColBERT: Efficient and Effective Passage Search via Contextualized Late Interaction over BERT
Khattab, Omar and Zaharia, Matei
"""  # noqa: E501


def _entries() -> list[str]:
    """Return an entry for each two lines of the table: key, number in arXiv, title; authors."""
    lines = _PAPERS.strip().splitlines()
    entries = []
    for first, author in zip(lines[::2], lines[1::2], strict=True):
        key, number, title = first.split(maxsplit=2)
        year = f"year={{20{number[:2]}}}, eprint={{{number}}}, archivePrefix={{arXiv}}"
        entries.append(f"\n@misc{{{key},\n    title={{{title}}},\n    author={{{author}}},\n    {year}\n}}\n")
    return entries


INFO_NCE, SYMMETRIC, GTE, GRADIENT_CACHING, GIST, *_others = _entries()
MATRYOSHKA, MARGIN_MSE, TIGHTLY_COUPLED, COLBERT = _others
