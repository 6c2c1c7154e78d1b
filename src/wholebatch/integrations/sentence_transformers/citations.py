"""BibTeX entries of the papers that define the losses; their trainer writes them into the model card."""

INFO_NCE = """
@misc{oord2018cpc,
    title={Representation Learning with Contrastive Predictive Coding},
    author={van den Oord, Aaron and Li, Yazhe and Vinyals, Oriol},
    year={2018}, eprint={1807.03748}, archivePrefix={arXiv}
}
"""

SYMMETRIC = """
@misc{guenther2023jina2,
    title={Jina Embeddings 2: 8192-Token General-Purpose Text Embeddings for Long Documents},
    author={G{\\"u}nther, Michael and others},
    year={2023}, eprint={2310.19923}, archivePrefix={arXiv}
}
"""

GTE = """
@misc{li2023gte,
    title={Towards General Text Embeddings with Multi-stage Contrastive Learning},
    author={Li, Zehan and Zhang, Xin and Zhang, Yanzhao and Long, Dingkun and Xie, Pengjun and Zhang, Meishan},
    year={2023}, eprint={2308.03281}, archivePrefix={arXiv}
}
"""

GRADIENT_CACHING = """
@misc{gao2021gradcache,
    title={Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup},
    author={Gao, Luyu and Zhang, Yunyi and Han, Jiawei and Callan, Jamie},
    year={2021}, eprint={2101.06983}, archivePrefix={arXiv}
}
"""

GIST = """
@misc{solatorio2024gist,
    title={GISTEmbed: Guided In-sample Selection of Training Negatives for Text Embedding Fine-tuning},
    author={Solatorio, Aivin V.},
    year={2024}, eprint={2402.16829}, archivePrefix={arXiv}
}
"""

MATRYOSHKA = """
@misc{kusupati2022matryoshka,
    title={Matryoshka Representation Learning},
    author={Kusupati, Aditya and others},
    year={2022}, eprint={2205.13147}, archivePrefix={arXiv}
}
"""

MARGIN_MSE = """
@misc{hofstatter2020margin,
    title={Improving Efficient Neural Ranking Models with Cross-Architecture Knowledge Distillation},
    author={Hofst{\\"a}tter, Sebastian and others},
    year={2020}, eprint={2010.02666}, archivePrefix={arXiv}
}
"""

TIGHTLY_COUPLED = """
@misc{lin2020tightly,
    title={Distilling Dense Representations for Ranking using Tightly-Coupled Teachers},
    author={Lin, Sheng-Chieh and Yang, Jheng-Hong and Lin, Jimmy},
    year={2020}, eprint={2010.11386}, archivePrefix={arXiv}
}
"""

COLBERT = """
@misc{khattab2020colbert,
    title={ColBERT: Efficient and Effective Passage Search via Contextualized Late Interaction over BERT},
    author={Khattab, Omar and Zaharia, Matei},
    year={2020}, eprint={2004.12832}, archivePrefix={arXiv}
}
"""
