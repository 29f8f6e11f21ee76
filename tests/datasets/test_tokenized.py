"""`TokenizedDataset`: the tokenizer's own ids, in the order of the source, in any executor; threads and forks apart."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from busy_support import HANG
from interpreter_support import run
from text_support import END, TEXTS, expected, letters, tokenizer, write_table

import penstock as ps
from penstock.errors import ConfigError, DataFileError, DataFileIOError
from penstock.loader.make import Fetch
from penstock.loader.messages import BatchMetrics, BatchRequest
from penstock.tokens.tokenizer import TextTokenizer, has_rust_threads

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@pytest.fixture
def table(tmp_path: Path) -> ps.TableDataset:
    return ps.TableDataset(write_table(tmp_path / "text.parquet", TEXTS), seed=3)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    tokenizer().save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def lists(dataset: Any) -> list[list[int]]:
    return [item.tolist() for item in dataset]


def flat(batches: Iterable[list[Any]]) -> list[Any]:
    return [item for batch in batches for item in batch]


def test_items_are_the_tokenizers_own_ids() -> None:
    dataset = ps.TokenizedDataset(TEXTS, tokenizer(), append_eos=END)
    assert lists(dataset) == expected(TEXTS)
    assert dataset[11].dtype == torch.int64
    assert [item.tolist() for item in dataset.__getitems__([5, 7, 5])] == expected([TEXTS[5], "", TEXTS[5]])
    assert dataset[-1].tolist() == expected(TEXTS[-1:])[0]


def test_every_form_of_a_tokenizer_gives_the_same(saved: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    for form in (saved, str(saved), saved.parent, PreTrainedTokenizerFast(tokenizer_file=str(saved))):
        assert lists(ps.TokenizedDataset(TEXTS, form)) == expected(TEXTS, end=False)
    assert lists(ps.TokenizedDataset(["ab"], letters, append_eos=3)) == [[97, 98, 3]]


def test_ids_of_a_text_do_not_depend_on_the_batch_around_it(saved: Path) -> None:
    """What a tokenizer.json says of padding and truncation is for batches."""
    made = type(tokenizer()).from_file(str(saved))
    made.enable_padding(length=100)
    made.enable_truncation(3)
    made.save(str(saved))
    assert lists(ps.TokenizedDataset(TEXTS, saved)) == expected(TEXTS, end=False)
    assert len(made.encode("a").ids) == 100, "the caller's own is as it was"


def test_special_tokens_of_the_tokenizers_own(saved: Path) -> None:
    from tokenizers import processors

    made = type(tokenizer()).from_file(str(saved))
    made.post_processor = processors.TemplateProcessing(single=f"{END} $A {END}", special_tokens=[(END, 0)])
    plain = expected(["a text"], end=False)[0]
    assert lists(ps.TokenizedDataset(["a text"], made)) == [[0, *plain, 0]]
    assert lists(ps.TokenizedDataset(["a text"], made, add_special_tokens=False)) == [plain]
    assert lists(ps.TokenizedDataset(["a text"], made, max_length=4)) == [[0, *plain[:2], 0]]
    with pytest.raises(ConfigError, match="decides by itself"):
        ps.TokenizedDataset(TEXTS, letters, add_special_tokens=False)


@pytest.mark.parametrize("form", [letters, "rust"])
def test_max_length_counts_the_end_token(form: Any) -> None:
    form = tokenizer() if form == "rust" else form
    whole = lists(ps.TokenizedDataset(TEXTS, form))
    cut = lists(ps.TokenizedDataset(TEXTS, form, max_length=5, append_eos=1))
    assert cut == [[*ids[:4], 1] for ids in whole]
    with pytest.raises(ConfigError, match="no room"):
        ps.TokenizedDataset(TEXTS, form, max_length=1, append_eos=1)


def test_over_a_data_set_of_ours_order_and_state_are_its_own(table: ps.TableDataset) -> None:
    dataset = ps.TokenizedDataset(table, tokenizer())
    assert lists(dataset) == expected([sample["text"] for sample in table], end=False)
    assert lists(dataset) != expected(TEXTS, end=False), "it is shuffled"
    dataset.set_epoch(4)
    assert (table.epoch, dataset.plan is table.plan) == (4, True)
    wanted = expected([sample["text"] for sample in table], end=False)
    loader = ps.DataLoader(dataset, batch_size=4, collate_fn=list)
    batches = iter(loader)
    begin = flat(lists(next(batches)) for _ in range(3))
    state = json.loads(json.dumps(loader.state_dict()))
    rest = flat(map(lists, batches))
    assert begin + rest == wanted
    other = ps.DataLoader(ps.TokenizedDataset(table, tokenizer()), batch_size=4, collate_fn=list)
    other.load_state_dict(state)
    assert flat(map(lists, other)) == rest


def test_ranks_share_a_users_data_set() -> None:
    shares = []
    for rank in range(2):
        sampler = ps.DistributedSampler(range(len(TEXTS)), num_replicas=2, rank=rank, shuffle=False)
        loader = ps.DataLoader(ps.TokenizedDataset(TEXTS, letters), 4, sampler=sampler, collate_fn=list)
        shares.append([item.tolist() for batch in loader for item in batch])
    assert sorted(flat(shares)) == sorted(map(letters, TEXTS))
    assert not hasattr(ps.TokenizedDataset(TEXTS, letters), "plan")


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_executors_give_the_same(table: ps.TableDataset, executor: str) -> None:
    dataset = ps.TokenizedDataset(table, tokenizer(), append_eos=END)
    options: Any = {"batch_size": 6, "collate_fn": list}
    inline = [lists(batch) for batch in ps.DataLoader(dataset, **options)]
    loader = ps.DataLoader(dataset, num_workers=2, executor=executor, **options)
    assert [lists(batch) for batch in loader] == inline


def test_a_batch_is_encoded_at_once() -> None:
    class Counted(TextTokenizer):
        calls = 0

        def encode(self, texts: Any, **options: Any) -> Any:
            self.calls += 1
            return super().encode(texts, **options)

    dataset = ps.TokenizedDataset(TEXTS, letters)
    dataset.tokenizer = counted = Counted(letters)
    fetch = Fetch(dataset, list, batched=True, seed_globals=False)
    fetch(BatchRequest(list(range(8)), list(range(8))), BatchMetrics())
    assert counted.calls == 1


def draws(item: torch.Tensor) -> int:
    return int(ps.generator().integers(1 << 40))


def test_load_draws_from_the_samples_own_generator(table: ps.TableDataset) -> None:
    dataset = ps.TokenizedDataset(table, letters, load=draws)
    one_by_one = [dataset[k] for k in range(len(dataset))]
    assert len(set(one_by_one)) == len(table)
    loader = ps.DataLoader(dataset, batch_size=7, collate_fn=list)
    assert flat(loader) == one_by_one


def test_dicts_keep_the_other_columns(table: ps.TableDataset) -> None:
    for sample, item in zip(table, ps.TokenizedDataset(table, letters, as_dict=True), strict=True):
        assert item.keys() == {"number", "input_ids"}
        assert (item["number"], item["input_ids"].tolist()) == (sample["number"], letters(sample["text"]))
    assert ps.TokenizedDataset(["a"], letters, as_dict=True)[0].keys() == {"input_ids"}


class Rows:
    """A user's data set, whose samples are dicts."""

    def __init__(self, *samples: Any) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ('{"text": null}', "has NoneType in the column 'text', not text"),
        ('{"body": "c"}', "has no column 'text': the columns are body"),
        ('{"text": "c \\ud800"}', r"is not valid Unicode: character 2 of its text is the lone surrogate '\\ud800'"),
    ],
)
def test_rows_without_text_are_named(row: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(f"{line}\n" for line in ['{"text": "a"}', '{"text": "b"}', row]))
    table = ps.TableDataset(tmp_path / "a.jsonl", seed=1, rank=0, world_size=1)
    for source in (table, ps.Subset(table, [1, 2, 2])):
        with pytest.raises(DataFileError, match=rf"a\.jsonl, line 3 {problem}"):
            ps.TokenizedDataset(source, tokenizer()).__getitems__(range(len(source)))
        with pytest.raises(DataFileError, match=rf"a\.jsonl, line 3 {problem}"):
            ps.tokenize(source, tmp_path / "tokens", tokenizer(), workers=1, progress=False)
    mixture = ps.Mixture([(ps.TokenizedDataset(table, tokenizer()), 1)], rank=0, world_size=1)
    with pytest.raises(DataFileError, match=rf"a\.jsonl, line 3 {problem}"):
        list(mixture)
    texts = Rows({"text": "x"}, json.loads(row))
    with pytest.raises(DataFileError, match=f"sample 1 {problem}"):
        ps.TokenizedDataset(texts, tokenizer()).__getitems__([0, 1])


def test_a_row_of_parquet_without_text_is_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a", None]}), tmp_path / "a.parquet")
    table = ps.TableDataset(tmp_path / "a.parquet", seed=1, rank=0, world_size=1)
    with pytest.raises(DataFileError, match=r"a\.parquet, row 1 has NoneType"):
        list(ps.TokenizedDataset(table, tokenizer()))


def test_errors(table: ps.TableDataset, saved: Path) -> None:
    with pytest.raises(ConfigError, match="columns are text, number"):
        ps.TokenizedDataset(table, letters, column="body")
    with pytest.raises(DataFileError, match="sample 0 has no column 'body': the columns are content"):
        ps.TokenizedDataset(Rows({"content": "a"}), letters, column="body")[0]
    with pytest.raises(DataFileError, match=r"sample 1 has NoneType in the column 'text'"):
        ps.TokenizedDataset(Rows({"text": "a"}, {"text": None}), letters).__getitems__([0, 1])
    with pytest.raises(ConfigError, match="sample 0 is int"):
        ps.TokenizedDataset([1], letters)[0]
    with pytest.raises(DataFileIOError, match=r"nowhere\.json"):
        ps.TokenizedDataset(TEXTS, "nowhere.json")
    saved.write_text('{"model": 1}')
    with pytest.raises(DataFileError, match=r"tokenizer\.json is not"):
        ps.TokenizedDataset(TEXTS, saved)
    with pytest.raises(ConfigError, match="takes the path of a tokenizer"):
        ps.TokenizedDataset(TEXTS, 3)
    with pytest.raises(ConfigError, match="is no token of this tokenizer"):
        ps.TokenizedDataset(TEXTS, tokenizer(), append_eos="<end>")
    with pytest.raises(ConfigError, match="no tokens by name"):
        ps.TokenizedDataset(TEXTS, letters, append_eos="<end>")
    with pytest.raises(DataFileError, match="ids are integers"):
        ps.TokenizedDataset(TEXTS, lambda text: [0.5])[0]
    with pytest.raises(ConfigError, match="needs a dataset"):
        ps.TokenizedDataset(3, letters)
    with pytest.raises(ConfigError, match="load= takes a function"):
        ps.TokenizedDataset(TEXTS, letters, load=3)  # type: ignore[arg-type]


def test_what_is_pure(table: ps.TableDataset) -> None:
    made = type(tokenizer()).from_str(tokenizer().to_str())
    assert ps.TokenizedDataset(table, made).pure
    assert ps.TokenizedDataset(table, letters).pure
    assert not ps.TokenizedDataset(table, lambda text: [1]).pure
    assert not ps.TokenizedDataset(table, made, load=draws).pure
    made.model.dropout = 0.5
    assert not ps.TokenizedDataset(table, made).pure


def test_a_pickle_needs_no_file(saved: Path) -> None:
    dataset = ps.TokenizedDataset(TEXTS, saved, append_eos=END)
    fingerprint = dataset.tokenizer.fingerprint
    data = pickle.dumps(dataset)
    saved.unlink()
    again = pickle.loads(data)
    assert lists(again) == expected(TEXTS)
    assert again.tokenizer.fingerprint == fingerprint
    assert again.tokenizer.fingerprint != TextTokenizer(tokenizer()).fingerprint, "the end token belongs to it"


AFTER_A_FORK = """
import multiprocessing, os, sys
sys.path.insert(0, {folder!r})
os.environ["TOKENIZERS_PARALLELISM"] = "true"    # so tokenizers itself does not look after forks
import penstock as ps
from text_support import TEXTS, expected, tokenizer
from penstock.tokens.tokenizer import has_rust_threads
assert has_rust_threads()
dataset = ps.TokenizedDataset(TEXTS, tokenizer())
assert [item.tolist() for item in dataset.__getitems__(range(40))] == expected(TEXTS, end=False)
loader = ps.DataLoader(dataset, 10, num_workers=2, executor="process", multiprocessing_context="fork",
                       collate_fn=list)
assert [item.tolist() for batch in loader for item in batch] == expected(TEXTS, end=False)
assert os.environ["TOKENIZERS_PARALLELISM"] == "true"
reading, writing = os.pipe()
pid = os.fork()
if not pid:
    assert not has_rust_threads()
    os.write(writing, str([item.tolist() for item in dataset.__getitems__(range(40))]).encode())
    os._exit(0)
os.close(writing)
with open(reading) as pipe:
    assert pipe.read() == str(expected(TEXTS, end=False))
assert os.waitpid(pid, 0)[1] == 0
print("done")
"""


def test_forks_after_rust_threads_were_used() -> None:
    """Without care the forked workers hang: the threads that they would wait for are the parent's."""
    program = AFTER_A_FORK.format(folder=str(Path(__file__).parents[1] / "support"))
    done = run(["-c", program], timeout=HANG)
    assert done.stdout == "done\n", done.stderr


def test_no_environment_variable_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    before = dict(os.environ)
    lists(ps.TokenizedDataset(TEXTS, tokenizer()))
    assert dict(os.environ) == before


@pytest.mark.parametrize("value", ["false", "0", "OFF", ""])
def test_batches_without_threads_give_the_same(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forked workers encode batches then, as fast as this process, and must not wait for its threads."""
    encoder = TextTokenizer(tokenizer())
    encoder.encode(TEXTS, threads=True)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", value)
    assert [ids.tolist() for ids in encoder.encode(TEXTS, threads=False)] == expected(TEXTS, end=False)
    assert encoder.encode([]) == []
    loader = ps.DataLoader(
        ps.TokenizedDataset(TEXTS, tokenizer()),
        *(10, False),
        num_workers=2,
        executor="process",
        multiprocessing_context="fork",
        collate_fn=list,
    )
    with loader:
        assert [item.tolist() for item in flat(loader)] == expected(TEXTS, end=False)


def _says(pipe: Any) -> None:
    pipe.send(has_rust_threads())


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_worker_processes_have_no_rust_threads(method: str) -> None:
    context: Any = multiprocessing.get_context(method)
    here, there = context.Pipe()
    process = context.Process(target=_says, args=(there,))
    process.start()
    assert here.recv() is False
    process.join()


def test_a_fork_while_other_threads_encode() -> None:
    """Whatever lock of the tokenizer another thread holds at that moment, the fork's copy works."""
    dataset = ps.TokenizedDataset(TEXTS, tokenizer())
    dataset.__getitems__(range(40))
    ends = threading.Event()

    def encode() -> None:
        while not ends.is_set():
            dataset.tokenizer.encode(TEXTS, threads=False)

    threads = [threading.Thread(target=encode) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        context: Any = multiprocessing.get_context("fork")
        processes = [context.Process(target=lists, args=(dataset,)) for _ in range(5)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(HANG)
        assert [process.exitcode for process in processes] == [0] * 5
    finally:
        ends.set()
        for thread in threads:
            thread.join()


def test_arrays_of_ids_are_ids() -> None:
    dataset = ps.TokenizedDataset(["ab", ""], lambda text: np.array(letters(text), np.uint16))
    assert lists(dataset) == [[97, 98], []]
    assert dataset[0].dtype == torch.int64


class Drawing:
    """Texts with a random letter, read together."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> str:
        return f"{index} {ps.generator().integers(1 << 30)}"

    def __getitems__(self, indices: list[int]) -> list[str]:
        return [self[index] for index in indices]


def test_random_texts_do_not_depend_on_the_batch() -> None:
    tokens = ps.TokenizedDataset(Drawing(), letters)
    found = [
        [item.tolist() for item in flat(ps.DataLoader(tokens, batch_size=size, seed=0, collate_fn=list))]
        for size in (1, 5)
    ]
    assert found[0] == found[1]
