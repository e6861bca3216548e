"""The index works in a process where other libraries have changed faiss."""

import numpy as np

from bier.search import Index


def test_another_library_may_replace_the_search_of_faiss() -> None:
    import faiss.contrib.torch_utils  # noqa: F401  # pytorch-metric-learning imports this

    vectors = np.random.default_rng(0).standard_normal((500, 16)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    index = Index.build(vectors, kind="hnsw")
    assert index.search(vectors[7], k=1).rows.tolist() == [7]
