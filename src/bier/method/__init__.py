"""The method of the paper. docs/method.md has its equations, numbered; docstrings cite those numbers as Eq. (n).

Paper: M. Opitz, G. Waltner, H. Possegger, H. Bischof, "Deep Metric Learning with BIER: Boosting Independent Embeddings
Robustly", TPAMI 2018, https://arxiv.org/abs/1801.04815
"""
