"""Which weights of heads are matrices to the optimiser of the shipped pair, and which are tables of tokens."""

from __future__ import annotations

import pytest

from hf_specheads import AutoDraftHead
from hf_specheads.trainer.shipped_pair.optimizer import MatrixMomentum

MARKOV = {"markov_head.markov_w1.weight", "markov_head.markov_w2.weight"}
TABLES = {"eagle": set(), "eagle3": {"lm_head.weight"}, "dspark": MARKOV}
OPTIONS = {
    "eagle3": {"feature_layers": (0, 1, -1)},
    "dspark": {"block_size": 4, "feature_layers": [1], "mask_token_id": 3},
}


@pytest.mark.parametrize("method", TABLES)
def test_tables_of_tokens_are_no_matrices(target, method: str) -> None:
    heads = AutoDraftHead.from_target(target, method, **OPTIONS.get(method, {}))
    names = {id(p): name for name, p in heads.named_parameters()}
    orthogonal, others = MatrixMomentum(heads).param_groups
    found = {names[id(p)] for p in others["params"] if p.ndim == 2}
    assert found == TABLES[method]
    assert any("self_attn" in names[id(p)] for p in orthogonal["params"])
    assert not {names[id(p)] for p in orthogonal["params"]} & TABLES[method]
