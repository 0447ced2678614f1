"""The viewer with files that change under it and trees that nobody would expect."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from tree_sessions import call, grow

from trees import codec, view
from trees.viewer import wording
from trees.viewer.catalogue import Catalogue
from trees.viewer.payload import describe, dumps
from trees.viewer.server import ViewServer


def tree(episode: str | None = None, **meta):
    grown = grow(call(0, None, [1, 2], [3, 4]), call(1, 0, [5], [6]))
    grown.meta |= ({} if episode is None else {"episode": episode}) | meta
    return grown


def served(place: Path, target: str):
    with ViewServer(Catalogue(place), None, {}) as server:
        status, _, text = server.answer(target)
    return int(status), json.loads(text)


def test_a_tree_is_found_again_where_its_file_was_written_anew(tmp_path):
    """As when a run gathers a group behind an open page."""
    for name in "ab":
        (tmp_path / f"{name}.tree").write_bytes(codec.encode(tree(name)))
    catalogue = Catalogue(tmp_path)
    (tmp_path / "g.tree").write_bytes(codec.encode_group([tree("a"), tree("b")]))
    for name in "ab":
        (tmp_path / f"{name}.tree").unlink()
    assert catalogue.open("b").meta["episode"] == "b"
    (tmp_path / "g.tree").write_bytes(codec.encode_group([tree("0"), tree("a"), tree("b")]))
    assert catalogue.open("a").meta["episode"] == "a"


def test_no_tree_hides_another_of_its_name(tmp_path):
    for run in ("A", "B"):
        (tmp_path / run).mkdir()
        (tmp_path / run / "g.tree").write_bytes(codec.encode_group([tree("a", run=run), tree("b", run=run)]))
    (tmp_path / "A" / "a.tree").write_bytes(codec.encode(tree("a", run="again")))
    catalogue = Catalogue(tmp_path)
    names = catalogue.names()
    assert sorted(names) == ["A/a", "A/g:a", "A/g:b", "B/g:a", "B/g:b"]
    assert [catalogue.open(name).meta["run"] for name in sorted(names)] == ["again", "A", "A", "B", "B"]


def test_a_file_of_many_is_read_once(tmp_path, monkeypatch):
    (tmp_path / "g.tree").write_bytes(codec.encode_group([tree(f"e{n}") for n in range(50)]))
    reads = []
    read = codec.read
    monkeypatch.setattr(codec, "read", lambda file: reads.append(file) or read(file))
    assert len(Catalogue(tmp_path).rows()) == 50
    assert len(reads) == 1


@pytest.mark.parametrize(
    "line",
    [
        '{"id": [1]}',
        "[" * 5000,
        "9" * 5000,
        '{"id": "e", "tokens_prompt": "5"}',
        '{"id": "e", "status": {"a": 1}}',
        "5",
    ],
)
def test_odd_lines_of_a_log_cost_nothing_else(tmp_path, line):
    (tmp_path / "e.tree").write_bytes(codec.encode(tree("e")))
    (tmp_path / "episodes.jsonl").write_text(line + "\n")
    status, portion = served(tmp_path, "/episodes")
    assert (status, [row["episode"] for row in portion["rows"]]) == (200, ["e"])


def test_odd_files_beside_the_trees_cost_nothing_else(tmp_path):
    (tmp_path / "e.tree").write_bytes(codec.encode(tree("e")))
    (tmp_path / "y.tree").mkdir()
    (tmp_path / "z.tree").symlink_to("nowhere")
    assert Catalogue(tmp_path).names() == ["e"]
    assert served(tmp_path, "/episodes?from=" + "9" * 5000)[0] == 200


@pytest.mark.parametrize("text", ["model: gpt", "- a", "model: {path: 5}", "a: [1", "\tx", ""])
def test_somebody_elses_settings_name_no_tokenizer(tmp_path, text):
    (tmp_path / "config.yaml").write_text(text)
    assert wording.find(tmp_path) is None


def test_what_json_cannot_hold_is_told_otherwise():
    deep: list = []
    for _ in range(2000):
        deep = [deep]
    odd = grow(call(0, None, [1], [2], temperature=math.inf), call(1, 0, [3], [4], temperature=math.nan))
    odd.meta["deep"] = deep
    nodes = json.loads(dumps(describe("e", odd, None)))["nodes"]
    assert [node["temperature"] for node in nodes if node["sampled"]] == [None, None]


def test_a_tree_is_never_written_over(tmp_path, capsys):
    path = tmp_path / "e.tree"
    path.write_bytes(codec.encode(tree("e")))
    before = path.read_bytes()
    assert view.main([str(path), "--html", str(path)]) == 2
    assert "one of the trees" in capsys.readouterr().err
    assert path.read_bytes() == before
    assert view.main([str(path), "--html", str(tmp_path / "out.html")]) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["e.tree", "out.html"]
