"""The right answers of validation and test: the pairs that a table states, not its groups; and mined negatives."""

import hashlib
import json
import math
from dataclasses import replace

import pytest
import torch
from data_sets import write_pictures

from wholebatch._base.user_error import UserError
from wholebatch.app.tensors import first_ranks, same_places
from wholebatch.app.tensors import search_figures as figures
from wholebatch_train.config import ModelConfig, TrainConfig
from wholebatch_train.data.from_table import FalseNegatives
from wholebatch_train.data.load import load_data, table_pairs
from wholebatch_train.data.open_table import open_table
from wholebatch_train.data.pairs import Pairs, pairs_of_ids, stated_of_groups, stated_pairs
from wholebatch_train.tasks.batches import PairBatches, rows_of_chunks
from wholebatch_train.tasks.evaluation import chance, features_of_rows
from wholebatch_train.tasks.make import make_task

MODEL = ModelConfig(embedding_size=16, image_width=8, text_width=16, text_buckets=256)


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def brute_force(similarity, right):
    """Return the figures of (n, m) similarities and sets of right candidates, by sorting each row; a tie is a loss."""
    found = dict.fromkeys(("recall@1", "recall@5", "recall@10", "mrr", "ndcg@10"), 0.0)
    for row, answers in zip(similarity.tolist(), right, strict=True):
        order = sorted(range(len(row)), key=lambda j: (-row[j], j in answers))
        ranks = [place for place, j in enumerate(order, 1) if j in answers]
        for k in (1, 5, 10):
            found[f"recall@{k}"] += any(rank <= k for rank in ranks)
        found["mrr"] += 1 / ranks[0]
        gain = sum(1 / math.log2(1 + rank) for rank in ranks if rank <= 10)
        found["ndcg@10"] += gain / sum(1 / math.log2(1 + rank) for rank in range(1, min(10, len(answers)) + 1))
    return {name: pytest.approx(value / len(right)) for name, value in found.items()}


def as_pairs(right):
    return torch.tensor([(i, j) for i, answers in enumerate(right) for j in sorted(answers)]).T.contiguous()


@pytest.mark.parametrize("tile", [40, 2**24])
def test_figures_are_those_of_a_sorted_list(monkeypatch, tile):
    monkeypatch.setattr("wholebatch._base.search._TILE", tile)
    random = torch.Generator().manual_seed(0)
    queries, candidates = (torch.randint(-1, 2, (n, 3), generator=random).float() for n in (25, 19))  # with many ties
    right = [
        set(torch.randperm(19, generator=random)[: 1 + int(torch.randint(0, 13, (), generator=random))].tolist())
        for _ in range(25)
    ]
    similarity = queries @ candidates.T
    assert figures(queries, candidates, as_pairs(right)) == brute_force(similarity, right)
    assert figures(queries, queries) == brute_force(queries @ queries.T, [{i} for i in range(25)])
    best = similarity.masked_fill(~mask_of(right, 19), -9).amax(1, keepdim=True)
    expected = ((similarity >= best) & ~mask_of(right, 19)).sum(1)
    assert first_ranks(queries, candidates, as_pairs(right)).tolist() == expected.tolist()
    with pytest.raises(ValueError, match="query 24 has no right candidate"):
        figures(queries, candidates, as_pairs(right[:-1]))


def mask_of(right, candidates):
    return torch.tensor([[j in answers for j in range(candidates)] for answers in right])


def test_items_and_pairs_are_those_of_the_rows():
    numbers = {"a": torch.tensor([7, 7, 3, 9, 3, 7, 9]), "b": torch.tensor([2, 2, 5, 5, 4, 4, 0])}
    pairs = Pairs.grouped({"a": None, "b": None}, torch.zeros(7), numbers=numbers)
    found = stated_pairs(pairs, torch.tensor([5, 4, 2, 1, 0]))
    assert [rows.tolist() for rows in found.rows] == [[0, 2], [0, 2, 4]]
    assert found.right.T.tolist() == [[0, 0], [0, 2], [1, 1], [1, 2]]
    assert found.back.T.tolist() == [[0, 0], [1, 1], [2, 0], [2, 1]]
    assert stated_pairs(replace(pairs, numbers={}), torch.tensor([4, 2])).right.T.tolist() == [[0, 0], [1, 1]]


# Whole tables.
def write_table(folder, lines):
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def word(text):
    """Return a text that resembles no other one."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def chained(count):
    """Return rows of queries and positives, and the group of each text: a chain; one row is there twice."""
    rows, group_of = [], {}
    for group in range(count):
        names = [(word(f"q{group} {i // 2}"), word(f"d{group} {(i + 1) // 2}")) for i in range(9)]
        group_of |= dict.fromkeys((text for both in names for text in both), group)
        rows += [*names, names[3]]
    return [{"query": query, "positive": positive} for query, positive in rows], group_of


def features(task, name, texts):
    prepare = task._encoder.encoder(name).prepare
    with torch.no_grad():
        return task._encoder.encode(name, prepare(texts))


def check_examples(task, rows, held_out):
    """Examples and mistakes are those of the search of the figures: among all documents, and back among queries."""
    galleries = {gallery.title: gallery for gallery in task.evidence().galleries}
    there, back = galleries["Queries → documents"], galleries["Documents → queries"]
    assert "12 of 15 held-out queries" in there.note
    assert "5 most similar of 45 documents" in there.note
    assert "12 of 15 held-out documents" in back.note
    assert "5 most similar of 15 queries" in back.note
    everything = [*dict.fromkeys(row["positive"] for row in rows)]
    documents = [*dict.fromkeys(row["positive"] for row in held_out)]
    stated = {(row["query"], row["positive"]) for row in held_out}
    y = features(task, "document", everything)
    among_held_out = 0
    for query in (*there.queries, *galleries["Worst mistakes, queries → documents"].queries):
        asked = query.item.text
        similarity = dict(zip(everything, (features(task, "query", [asked]) @ y.T)[0].tolist(), strict=True))
        best = max(value for text, value in similarity.items() if (asked, text) in stated)
        above = [text for text, value in similarity.items() if value >= best and (asked, text) not in stated]
        assert query.rank == 1 + len(above), asked
        among_held_out += query.rank == 1 + len({*above} & {*documents})
        assert {similarity[each.item.text] for each in query.candidates} == {*sorted(similarity.values())[-5:]}
    shown = {each.item.text for query in there.queries for each in query.candidates}
    assert shown - {*documents}, "documents of training are candidates"
    assert among_held_out < len(there.queries), "a search among held-out documents alone would have other ranks"
    assert {query.item.text for query in back.queries} <= {*documents}, "documents of training do not ask"


def test_queries_with_documents_are_tested_by_the_pairs_of_the_table(tmp_path):
    """A chain q0-d0, q0-d1, q1-d1, ... is one group of the split, but q0 has two right answers, not all."""
    rows, group_of = chained(9)
    path = write_table(tmp_path, rows)
    config = TrainConfig(data=str(path), model=MODEL, batch_size=4, validation_texts=2, test_texts=3, workers=0)
    config, (pairs, split) = load_data(config, 1)
    assert len(pairs) == 9
    task = make_task(config, (pairs, split), torch.device("cpu"), rank=0, size=1)
    report, validation = task.test(), task.validate()
    everything = [*dict.fromkeys(row["positive"] for row in rows)]
    for part, found in ((split.test, report), (split.validation, validation)):
        held_out = [row for row in rows if group_of[row["query"]] in part.tolist()]
        stated = {(row["query"], row["positive"]) for row in held_out}
        queries, documents = ([*dict.fromkeys(row[name] for row in held_out)] for name in ("query", "positive"))
        assert len(queries) == len(documents) == 5 * len(part)
        more = [text for text in everything if text not in documents] if found is report else []
        candidates = [*documents, *more]
        x, y, z = (features(task, name, texts) for name, texts in
                   (("query", queries), ("document", documents), ("document", candidates)))  # fmt: skip
        right = [{j for j, text in enumerate(candidates) if (query, text) in stated} for query in queries]
        back = [{j for j, query in enumerate(queries) if (query, text) in stated} for text in documents]
        ways = ("query_to_document", "document_to_query")
        for way, expected in zip(ways, (brute_force(x @ z.T, right), brute_force(y @ x.T, back)), strict=True):
            for name, value in expected.items():
                assert (found is validation and name not in found[way]) or found[way][name] == value, (way, name)
        by_group = [{j for j, text in enumerate(candidates) if group_of[text] == group_of[query]} for query in queries]
        wrong = brute_force(x @ z.T, by_group)
        assert found[ways[0]]["recall@5"] != wrong["recall@5"], "groups would count chains as right answers"
        if found is report:
            chances = chance(45, torch.tensor([len(answers) for answers in right]))
    there, back = report["query_to_document"], report["document_to_query"]
    assert (there["queries"], there["candidates"]) == (15, 45)
    assert (back["queries"], back["candidates"]) == (15, 15)
    assert there["chance"] == pytest.approx(chances)
    title, columns, lines = task.table(report)
    assert "15 queries among 45 documents, and 15 documents among 15 queries" in title
    assert [line[0] for line in lines] == ["query -> document", "chance", "document -> query", "chance"]
    assert all(len(line) == len(columns) for line in lines)
    check_examples(task, rows, [row for row in rows if group_of[row["query"]] in split.test.tolist()])
    assert "among 10" in task.headline(validation)


def test_captions_of_a_picture_and_pictures_of_a_caption_are_all_tested(tmp_path):
    """Picture 2i has two captions, and the second of them is that of picture 2i + 1, too."""
    names = write_pictures(tmp_path, 24)
    rows = [
        {"image": names[2 * i + picture], "text": f"text {i} {caption}"}
        for i in range(12)
        for picture, caption in ((0, 0), (0, 1), (1, 1))
    ]
    path = write_table(tmp_path, rows)
    config = TrainConfig(
        data=str(path), model=MODEL, batch_size=4, validation_texts=2, test_texts=6, workers=0, image_size=16,
        image_channels=3,
    )  # fmt: skip
    config, (pairs, split) = load_data(config, 1)
    task = make_task(config, (pairs, split), torch.device("cpu"), rank=0, size=1)
    report = task.test()
    stated = stated_of_groups(pairs, split.test)
    images, texts = (side.items(at) for side, at in zip(pairs.sides.values(), stated.rows, strict=True))
    assert (len(images), len(texts)) == (12, 12)
    held_out = [row for row in rows if int(row["text"].split()[1]) in split.test.tolist()]
    assert set(texts) == {row["text"] for row in held_out}
    x, y = (features_of_rows(task._encoder, name, side, at, torch.device("cpu"))
            for (name, side), at in zip(pairs.sides.items(), stated.rows, strict=True))  # fmt: skip
    files = [rows[row]["image"] for row in stated.rows[0].tolist()]
    right = [{texts.index(row["text"]) for row in held_out if row["image"] == file} for file in files]
    back = [{files.index(row["image"]) for row in held_out if row["text"] == text} for text in texts]
    assert sorted(len(each) for each in right) == [1] * 6 + [2] * 6
    for way, similarity, answers in (("image_to_text", x @ y.T, right), ("text_to_image", y @ x.T, back)):
        for name, value in brute_force(similarity, answers).items():
            assert report[way][name] == value
    group_of = [text.split()[1] for text in texts]
    by_group = [{j for j, group in enumerate(group_of) if group in {group_of[t] for t in each}} for each in right]
    assert [len(each) for each in by_group] == [2] * 12, "groups would give a picture the other one's caption"


# Mined negatives.
def test_no_stated_positive_of_a_query_is_its_negative():
    """Compare with a search of the rows, over random tables in which queries have several positives."""
    random = torch.Generator().manual_seed(1)
    seen = 0
    for _ in range(20):
        queries, positives = (torch.randint(0, 12, (20,), generator=random) for _ in range(2))
        positives = positives + 12
        groups = torch.arange(20)  # by search: rows that share a query or a positive
        for _ in range(20):
            for values in (queries, positives):
                for value in values.unique():
                    groups[values == value] = groups[values == value].min()
        rows = torch.tensor([
            int((groups == g).nonzero()[:, 0][torch.randint(0, int((groups == g).sum()), (), generator=random)])
            for g in groups.unique()[torch.randperm(len(groups.unique()), generator=random)][:5]
        ])  # fmt: skip
        negatives = torch.randint(0, 30, (40,), generator=random)
        ids = FalseNegatives(queries, positives, groups).ids(negatives, rows, groups[rows])
        stated = set(zip(queries.tolist(), positives.tolist(), strict=True))
        for number, found in zip(negatives.tolist(), ids.tolist(), strict=True):
            for row in rows.tolist():
                is_excluded = found == groups[row]
                assert is_excluded == ((int(queries[row]), number) in stated)
                seen += is_excluded and number != positives[row]
    assert seen > 10, "positives beyond that of the row in the batch are among them"


ROWS = [
    {"query": "red fox", "positive": "a fox", "negatives": ["another fox", "two trees"]},
    {"query": "red fox", "positive": "another fox", "negatives": ["a dog"]},
    {"query": "boat", "positive": "two trees", "negatives": ["a fox", "another fox"]},
    {"query": "ship", "positive": "two trees", "negatives": ["a hull"]},
    {"query": "ship", "positive": "a hull", "negatives": []},
    *({"query": f"q{i}", "positive": f"p{i}", "negatives": [f"p{i + 1}", "a hull", f"q{i + 2}"]} for i in range(12)),
]


def test_negatives_of_a_batch_by_the_table(tmp_path):
    """The second positive of "red fox" is left out; "a hull" is no positive of "boat", in whose group it is."""
    config = TrainConfig(
        data=str(write_table(tmp_path, ROWS)), model=MODEL, batch_size=8, validation_texts=1, test_texts=1, workers=0
    )
    config, (pairs, split) = load_data(config, 1)
    readers = dict.fromkeys(pairs.sides, Reads())
    stated = {(row["query"], row["positive"]) for row in ROWS}
    names = {name: numbers.tolist() for name, numbers in pairs.numbers.items()}
    both = (set(), set())
    for size, parts in ((1, [slice(0, 8)]), (2, [slice(0, 4), slice(4, 8)])):
        for step in range(12):
            batches = []
            for rows in parts:
                chunks = rows_of_chunks(rows, config, len(parts))
                batches.append(PairBatches(pairs, split.train, readers, config, rows, chunks)(step))
            queries = [text for batch in batches for chunk in batch.chunks for text in chunk.first]
            groups = torch.cat([batch.names for batch in batches]).tolist()
            for batch in batches:
                texts = [text for chunk in batch.chunks for text in chunk.negatives or []]
                for text, found in zip(texts, batch.negative_names.tolist(), strict=True):
                    for query, group in zip(queries, groups, strict=True):
                        assert (found == group) == ((query, text) in stated), (size, query, text)
                        both[found == group].add((query, text))
    assert {("red fox", "another fox"), ("ship", "a hull")} <= both[True]
    assert ("boat", "a hull") in both[False]
    assert names.keys() == {"query", "document"}


class Reads:
    """Texts as they are, in place of the inputs of an encoder."""

    def prepare(self, texts):
        return texts

    def __call__(self, side, rows):
        return side.items(rows)


def test_texts_of_held_out_rows_are_no_negatives_in_training(tmp_path):
    said = []
    path = write_table(tmp_path, ROWS)
    config = TrainConfig(data=str(path), model=MODEL, batch_size=8, validation_texts=2, test_texts=3, workers=0)
    _, (pairs, split) = load_data(config, 1, said.append)
    held_out = torch.isin(pairs.group_of, torch.cat([split.validation, split.test])).nonzero()[:, 0]
    texts = {text for side in pairs.sides.values() for text in side.items(held_out)}
    everything = torch.arange(len(ROWS))
    left, before = (set(negatives.of(everything)[0]) for negatives in
                    (pairs.negatives, table_pairs(open_table(str(path)), config).negatives))  # fmt: skip
    assert before == {text for row in ROWS for text in row["negatives"]}
    assert before & texts, "a case to leave out"
    assert left == before - texts
    for row, given in enumerate(ROWS):
        assert pairs.negatives.of(torch.tensor([row]))[0] == [text for text in given["negatives"] if text in left]
    (line,) = [line for line in said if "left out" in line]
    count = sum(text in texts for row in ROWS for text in row["negatives"])
    assert line == f"{count} mined negatives are left out: texts of held-out rows"


def test_a_run_whose_negatives_are_all_held_out_trains_without_them(tmp_path):
    rows = [{"query": f"q{i}", "positive": f"p{i}", "negatives": [f"p{i}"]} for i in range(6)]
    rows = [row | {"negatives": ["p0"]} for row in rows]
    data = str(write_table(tmp_path, rows))
    for seed in range(20):
        config = TrainConfig(
            data=data, model=MODEL, batch_size=4, validation_texts=1, test_texts=1, workers=0, seed=seed
        )
        config, (pairs, split) = load_data(config, 1)
        if not len(pairs.negatives):
            break
    assert not len(pairs.negatives)
    task = make_task(config, (pairs, split), torch.device("cpu"), rank=0, size=1)
    assert math.isfinite(task.add_gradients(0).item())


def test_chance_of_one_right_answer_each():
    assert chance(2, torch.tensor([1, 1]))["mrr"] == 0.75
    assert chance(40, torch.ones(7, dtype=torch.int64))["recall@10"] == pytest.approx(0.25)
    assert same_places(3).T.tolist() == [[0, 0], [1, 1], [2, 2]]


def test_ids_of_classes_are_refused_before_their_pairs_fill_the_memory():
    assert len(pairs_of_ids(torch.arange(4) // 2, 4)[0]) == 8
    with pytest.raises(UserError, match=r"--columns group: 11,000 rows have one value, .* classes\)$"):
        pairs_of_ids(torch.cat([torch.zeros(11_000, dtype=torch.int64), 1 + torch.arange(9)]), 11_009)


@pytest.mark.parametrize("held_out", ["validation", "test"])
def test_ids_of_classes_are_refused_before_anything_is_trained(tmp_path, monkeypatch, held_out):
    """In the first validation it would be late, and in the test all would be lost."""
    monkeypatch.setattr("wholebatch_train.data.pairs._MOST", 20)
    path = tmp_path / "rows.csv"
    path.write_text("query,positive,id\n" + "".join(f"q{i},p{i},{i % 10}\n" for i in range(40)))
    config = TrainConfig(data=str(path), columns="group=id", validation_texts=1, test_texts=1)
    load_data(config, 1)
    more = {f"{held_out}_texts": 2}  # ids of four rows: 32 pairs
    with pytest.raises(UserError, match=r"--columns group: 4 rows have one value"):
        load_data(replace(config, **more), 1)
