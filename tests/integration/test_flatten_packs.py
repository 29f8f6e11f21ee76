"""`flatten_packs` beside the collator of Transformers, and a model of Transformers on its batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import penstock as ps
from penstock.errors import ConfigError
from penstock.integrations.packing import flatten_packs

CAPACITY = 32


@pytest.fixture(scope="module")
def packs() -> ps.PackedDataset:
    """Lengths of 1 to 75: single tokens, documents that are cut, and a last pack that is not full."""
    generator = torch.Generator().manual_seed(0)
    lengths = [1, 1, 75, 32, *torch.randint(2, 40, (30,), generator=generator).tolist()]
    documents = [torch.randint(1, 60, (length,), generator=generator) for length in lengths]
    return ps.PackedDataset(documents, CAPACITY, lengths=lengths, seed=0, rank=0, world_size=1)


def documents_of(packs: list[Any]) -> list[torch.Tensor]:
    return [
        pack["input_ids"][pack["document_ids"] == number]
        for pack in packs
        for number in range(int(pack["document_ids"].max()) + 1)
    ]


def test_is_what_transformers_makes_of_the_documents(packs: ps.PackedDataset) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    batches = list(ps.DataLoader(packs, batch_size=4, collate_fn=list))
    padded = 0
    for batch in batches:
        expected = theirs([{"input_ids": document} for document in documents_of(batch)])
        found = flatten_packs(batch)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            if isinstance(value, torch.Tensor):
                assert found[name].dtype == value.dtype, name
                assert torch.equal(found[name], value), name
            else:
                assert found[name] == value, name
        padded += found["input_ids"].shape[1] < len(batch) * CAPACITY
    assert 0 < padded < len(batches), "both kinds of batches were to be there"


def test_a_model_of_transformers_sees_each_document_alone(packs: ps.PackedDataset) -> None:
    """Its loss, too, is the mean over the tokens that a document has before them."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=60, use_cache=False, **sizes)).eval()
    batch = next(iter(ps.DataLoader(packs, batch_size=4, collate_fn=list)))
    documents = documents_of(batch)
    with torch.no_grad():
        found = model(**flatten_packs(batch))
        alone = [model(input_ids=document[None]).logits[0] for document in documents]
        losses = [
            cross_entropy(logits[:-1], tokens[1:], reduction="sum")
            for logits, tokens in zip(alone, documents, strict=True)
        ]
    torch.testing.assert_close(found.logits[0], torch.cat(alone), atol=1e-5, rtol=1e-4)
    targets = sum(len(document) - 1 for document in documents)
    torch.testing.assert_close(found.loss, sum(losses) / targets, atol=1e-5, rtol=1e-5)


def test_an_item_that_is_no_pack() -> None:
    with pytest.raises(ConfigError, match="dicts with input_ids, position_ids, document_ids; this is a tuple without"):
        flatten_packs([({"input_ids": torch.zeros(3)}, 0)])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="this is a dict without position_ids"):
        flatten_packs([{"input_ids": torch.zeros(3)}])
