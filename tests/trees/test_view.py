"""The viewer of trees: what it finds, what it serves, and that no text of a tree becomes more than text."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import CHROMIUM, drawn
from hypothesis import given
from hypothesis import strategies as st
from needs import require
from page_blocks import Blocks
from small_tokenizer import small_tokenizer
from tokenizers import Tokenizer
from tree_sessions import call, grow, relaxed

from trees import codec, view
from trees.record import VersionSpan
from trees.tree import Tree
from trees.viewer import page, wording
from trees.viewer.catalogue import Catalogue, PlaceError
from trees.viewer.payload import describe, dumps
from trees.viewer.server import PORTION, ViewServer
from trees.viewer.wording import Wording

HOSTILE = "</script><img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>\u202e"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return small_tokenizer()


def session(tokenizer: Tokenizer, **meta: Any) -> Tree:
    """Two turns, of which the first was tried twice; a tool's answer holds hostile text."""

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    opening = ids("<|im_start|>user\nDo it.<|im_end|>\n<|im_start|>assistant\n")
    heard = ids(f"\n<|im_start|>user\nThe file says: {HOSTILE} é😀<|im_end|>\n<|im_start|>assistant\n")
    lost, first, second = ids("I rea"), ids("I read it.<|im_end|>"), ids("It is done.<|im_end|>")
    tree = grow(
        call(0, None, opening, lost, finish="abort"),
        call(1, None, opening, first, fork="retry", why=HOSTILE),
        call(2, 1, heard, second, versions=(VersionSpan(3, 0, 2), VersionSpan(4, 2, len(second)))),
    )
    tree.meta |= meta
    return tree


@pytest.fixture
def run(tmp_path: Path, tokenizer: Tokenizer) -> Path:
    """A run folder: e0 is in its log, e1 is not yet, e2 is damaged; an evaluation episode has no tree."""
    folder = tmp_path / "run"
    step = folder / "trees" / "step_000003"
    step.mkdir(parents=True)
    for name in ("e0", "e1"):
        tree = session(
            tokenizer, episode=name, step=3, task=HOSTILE, harness="agent_loop", reward=0.5, status="completed"
        )
        (step / f"{name}.tree").write_bytes(codec.encode(tree))
    (step / "e2.tree").write_bytes((step / "e1.tree").read_bytes()[:-9])
    logged = {"id": "e0", "step": 3, "task": "desk", "family": "sum", "status": "completed", "reward": 1.0, "calls": 3}
    logged |= {"leaves": 1, "tokens_prompt": 50, "tokens_sampled": 7, "tokens_trained": 5}
    lines = [json.dumps(logged), json.dumps({"id": "evaluation", "step": 0}), '{"id": "e1", "st']
    (folder / "episodes.jsonl").write_text("\n".join(lines))
    (folder / "checkpoints" / "step_000003").mkdir(parents=True)
    tokenizer.save(str(folder / "checkpoints" / "step_000003" / "tokenizer.json"))
    return folder


@pytest.fixture
def served(run: Path, tokenizer: Tokenizer) -> Iterator[ViewServer]:
    with ViewServer(Catalogue(run), Wording(tokenizer), {"place": "run"}) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def get(url: str, **headers: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as answer:
            return answer.status, answer.read().decode("utf-8")
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode("utf-8")


def test_a_row_comes_from_the_log_else_from_the_tree_and_says_when_that_is_damaged(run: Path):
    catalogue = Catalogue(run)
    logged, read, damaged = catalogue.rows()
    assert (logged["episode"], logged["family"]) == ("e0", "sum")
    assert (logged["tokens"], logged["trained"], logged["reward"]) == (57, 5, 1.0)
    counts = catalogue.entry("e1").open().counts()
    assert (read["calls"], read["tokens"], read["trained"], read["reward"]) == (3, counts.tokens, counts.trained, 0.5)
    assert (damaged["episode"], damaged["status"]) == ("e2", "unreadable")
    assert "cut short" in damaged["error"]
    assert catalogue.without_tree == 1


def test_trees_that_come_later_are_found(run: Path):
    catalogue = Catalogue(run)
    shutil.copy(run / "trees/step_000003/e1.tree", run / "trees/step_000003/e3.tree")
    (run / "trees/step_000003/e0.tree").unlink()
    catalogue.scan()
    assert catalogue.names() == ["e1", "e2", "e3"]


def test_a_file_of_several_trees_is_that_many_episodes(tmp_path: Path, tokenizer: Tokenizer):
    path = tmp_path / "calls.tree"
    with path.open("wb") as file:
        codec.write(file, [session(tokenizer, seed=1), session(tokenizer, seed=2)])
    path.write_bytes(path.read_bytes() + b"torn")
    catalogue = Catalogue(path)
    assert catalogue.names() == ["calls:1", "calls:2", "calls:3"]
    assert catalogue.entry("calls:2").open().meta["seed"] == 2
    with pytest.raises(codec.CodecError):
        catalogue.entry("calls:3").open()


def test_a_file_of_a_group_holds_episodes_of_the_log(run: Path, tokenizer: Tokenizer):
    """As a run keeps the steps that lie before a checkpoint."""
    step = run / "trees" / "step_000003"
    for name in ("e0", "e1", "e2"):
        (step / f"{name}.tree").unlink()
    (step / "g0.tree").write_bytes(codec.encode_group([session(tokenizer, episode=name) for name in ("e0", "e1")]))
    catalogue = Catalogue(run)
    assert catalogue.names() == ["e0", "e1"]
    assert [row.get("task") for row in catalogue.rows()] == ["desk", None]
    assert catalogue.entry("e1").open().meta["episode"] == "e1"
    assert catalogue.without_tree == 1


def test_a_file_of_a_group_of_one_holds_the_episode_of_the_log(run: Path, tokenizer: Tokenizer):
    step = run / "trees" / "step_000003"
    for name in ("e0", "e1", "e2"):
        (step / f"{name}.tree").unlink()
    (step / "g0.tree").write_bytes(codec.encode_group([session(tokenizer, episode="e0")]))
    catalogue = Catalogue(run)
    assert catalogue.names() == ["e0"]
    assert catalogue.rows()[0]["task"] == "desk"


def test_equal_file_names_are_told_apart_by_their_folder(tmp_path: Path, tokenizer: Tokenizer):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.tree").write_bytes(codec.encode(session(tokenizer, seed=ord(folder))))
    catalogue = Catalogue(tmp_path)
    assert catalogue.names() == ["a/x", "b/x"]
    assert catalogue.entry("b/x").open().meta["seed"] == ord("b")


def test_a_place_or_an_episode_that_is_not_there_is_told_with_what_is(run: Path, tmp_path: Path):
    with pytest.raises(PlaceError, match=r"expected one of the 3 here, such as \['e0'"):
        Catalogue(run).entry("e00")
    with pytest.raises(PlaceError, match="not there"):
        Catalogue(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(PlaceError, match=r"no \.tree file"):
        Catalogue(tmp_path / "empty")


@relaxed
@given(text=st.text(max_size=40), cuts=st.integers(0, 3))
def test_the_texts_of_tokens_are_the_decoded_text(tokenizer: Tokenizer, text: str, cuts: int):
    words = Wording(tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False).ids[cuts:]
    texts = [words.piece(token) for token in ids]
    for start, length, group in words.groups(ids):
        texts[start : start + length] = [group] + [""] * (length - 1)
    whole = tokenizer.decode(ids, skip_special_tokens=False)
    # How many U+FFFD stand for the rest of a character that is cut is the decoder's own affair.
    told, expected = (re.sub("\ufffd+", "\ufffd", said) for said in ("".join(texts), whole))
    assert told == expected


def test_an_id_beyond_the_vocabulary_is_shown_as_a_number(tokenizer: Tokenizer):
    assert Wording(tokenizer).piece(10**6) == "[1000000?]"


def test_added_words_are_no_marks(tokenizer: Tokenizer):
    marks = {tokenizer.id_to_token(token) for token in Wording(tokenizer).marks}
    assert marks == {"<|im_start|>", "<|im_end|>", "<tool_call>"}


def test_the_tokenizer_is_that_of_the_newest_checkpoint_also_for_one_file_of_the_run(run: Path, tmp_path: Path):
    newer = run / "checkpoints" / "step_000012" / "tokenizer.json"
    newer.parent.mkdir()
    shutil.copy(run / "checkpoints/step_000003/tokenizer.json", newer)
    assert wording.find(run) == newer
    assert wording.find(run / "trees/step_000003/e0.tree") == newer
    shutil.rmtree(run / "checkpoints")
    assert wording.find(run) is None
    model = tmp_path / "model"
    model.mkdir()
    (model / "tokenizer.json").write_text("{}")
    (run / "config.yaml").write_text(f"model: {{path: {model}}}")
    assert wording.find(run) == model / "tokenizer.json"


def test_the_payload_holds_the_tree_exactly_and_only_plain_json(tokenizer: Tokenizer):
    tree = session(tokenizer, seed=2**60, reward=float("nan"), blob=b"\xff", nested={"a": (1, 2)})
    tree.nodes[2].logprobs.setflags(write=True)
    tree.nodes[2].logprobs[0] = np.nan
    told = json.loads(dumps(describe("e", tree, Wording(tokenizer))))
    assert [node["ids"] for node in told["nodes"]] == [node.ids.tolist() for node in tree.nodes]
    assert [node["parent"] for node in told["nodes"]] == [node.parent for node in tree.nodes]
    assert told["nodes"][-1]["versions"][0] == [3, 0, 2]
    assert told["nodes"][2]["logprobs"][0] is None
    assert told["nodes"][2]["logprobs"][1:] == pytest.approx(tree.nodes[2].logprobs[1:], abs=1e-4)
    assert (told["meta"]["seed"], told["meta"]["reward"], told["meta"]["nested"]) == (str(2**60), None, {"a": [1, 2]})
    assert describe("e", tree, None)["words"] is None


def test_the_server_gives_page_list_and_trees(served: ViewServer):
    status, text = get(served.url)
    assert status == 200
    assert text == page.page()
    status, text = get(f"{served.url}episodes?from=0")
    assert [row["episode"] for row in json.loads(text)["rows"]] == ["e0", "e1", "e2"]
    assert json.loads(text)["about"] == {"place": "run", "total": 3, "without_tree": 1}
    status, text = get(f"{served.url}tree?episode=e1")
    assert status == 200
    assert json.loads(text)["meta"]["task"] == HOSTILE


def test_a_damaged_tree_is_an_answer_and_the_rest_goes_on(served: ViewServer):
    status, text = get(f"{served.url}tree?episode=e2")
    assert status == 422
    assert "e2.tree" in json.loads(text)["error"]
    assert "cut short" in json.loads(text)["error"]
    assert get(f"{served.url}tree?episode=e0")[0] == 200


@pytest.mark.parametrize(
    "target",
    [
        *(
            "tree?episode=../checkpoints/step_000003/tokenizer",
            "tree?episode=%2e%2e%2fsecret",
            "tree?episode=/etc/passwd",
        ),
        *("../episodes.jsonl", "%2e%2e/episodes.jsonl", "trees/step_000003/e0.tree", "tree", "page/main.js"),
    ],
)
def test_no_name_reaches_another_file(served: ViewServer, run: Path, target: str):
    (run.parent / "secret.tree").write_bytes((run / "trees/step_000003/e0.tree").read_bytes())
    assert get(served.url + target)[0] == 404


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost:9000", 200), ("127.0.0.1", 200), ("[::1]:80", 200), ("evil.example:80", 403), ("127.0.0.1.evil", 403)],
)
def test_only_names_of_this_machine_are_answered(served: ViewServer, host: str, status: int):
    assert served.server_address[0] == "127.0.0.1"
    assert get(f"{served.url}episodes", Host=host)[0] == status


def test_a_long_list_comes_in_portions(tmp_path: Path, tokenizer: Tokenizer):
    data = codec.encode(session(tokenizer))
    for number in range(PORTION + 5):
        (tmp_path / f"e{number:04d}.tree").write_bytes(data)
    with ViewServer(Catalogue(tmp_path), None, {}) as server:
        first = json.loads(server.answer("/episodes?from=0")[2])
        rest = json.loads(server.answer(f"/episodes?from={first['next']}")[2])
    assert (len(first["rows"]), len(rest["rows"]), rest["next"]) == (PORTION, 5, None)
    assert rest["rows"][-1]["episode"] == f"e{PORTION + 4:04d}"


def test_the_page_allows_its_own_script_and_nothing_else():
    found = Blocks(page.page())
    for part in ("script", "style"):
        digest = base64.b64encode(hashlib.sha256(found.texts[part].encode("utf-8")).digest()).decode("ascii")
        assert f"{part}-src 'sha256-{digest}'" in found.policy
    assert "default-src 'none'" in found.policy
    assert [address for address in found.addresses if not address.startswith("data:")] == []
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", found.texts["script"]
    )


def test_one_file_holds_everything_and_no_text_in_it_is_markup(run: Path, tmp_path: Path, capsys):
    out = tmp_path / "out.html"
    assert view.main([str(run), "--html", str(out)]) == 0
    assert "3 episodes" in capsys.readouterr().out
    found = Blocks(out.read_text(encoding="utf-8"))
    assert found.tags.count("script") == 5
    assert "img" not in found.tags
    rows = json.loads(found.texts["rows"])["rows"]
    assert [row["episode"] for row in rows] == ["e0", "e1", "e2"]
    assert rows[1]["task"] == HOSTILE
    trees = [json.loads(zlib.decompress(base64.b64decode(found.texts[f"tree-{number}"]))) for number in range(3)]
    assert trees[1]["nodes"][-1]["ids"] == Catalogue(run).entry("e1").open().nodes[-1].ids.tolist()
    assert "cut short" in trees[2]["error"]


def test_one_episode_alone_is_a_smaller_file(run: Path, tmp_path: Path):
    whole, one = tmp_path / "whole.html", tmp_path / "one.html"
    view.main([str(run), "--html", str(whole)])
    assert view.main([str(run), "e1", "--html", str(one)]) == 0
    assert [row["episode"] for row in json.loads(Blocks(one.read_text()).texts["rows"])["rows"]] == ["e1"]
    assert one.stat().st_size < whole.stat().st_size


def test_wrong_arguments_say_what_is_expected(run: Path, tmp_path: Path, capsys):
    assert view.main([str(tmp_path / "nowhere")]) == 2
    assert view.main([str(run), "e9"]) == 2
    assert view.main([str(run), "--tokenizer", str(tmp_path)]) == 2
    assert view.main([str(run), "--tokenizer", str(run / "episodes.jsonl")]) == 2
    assert view.main([str(run), "--html", str(tmp_path / "nowhere" / "out.html")]) == 2
    assert view.main([str(run), "--port", "99999", "--no-browser"]) == 2
    told = capsys.readouterr().err.splitlines()
    expected = ("run folder", "'e0'", "no tokenizer.json there", "expected a tokenizer", "out.html", "--port 99999")
    assert len(told) == len(expected)
    assert all(words in line for words, line in zip(expected, told, strict=True)), told


def test_the_command_prints_its_address_and_ends_cleanly(run: Path):
    command = [sys.executable, "-m", "trees.view", str(run), "e1", "--no-browser"]
    # A shell without job control has what it starts in the background ignore the signal, and so would the viewer.
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, preexec_fn=heard) as process:
        line = process.stdout.readline()
        url = re.search(r"http://127\.0\.0\.1:\d+/#episode=e1", line)
        assert url, line
        assert get(url[0].split("#")[0])[0] == 200
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=20)
    assert (process.returncode, told) == (0, "")


def test_the_viewer_needs_no_ray_and_no_torch():
    code = "import sys, trees.view; sys.exit(bool({'ray', 'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.harness
@pytest.mark.parametrize("where", ["server", "file"])
def test_a_browser_draws_the_tree_and_runs_nothing_of_it(served: ViewServer, run: Path, tmp_path: Path, where: str):
    require(CHROMIUM is not None, "apt-get install chromium")
    out = tmp_path / "out.html"
    view.main([str(run), "--html", str(out)])
    address = served.url if where == "server" else out.as_uri()

    listed = drawn(address, tmp_path / "list")
    assert re.findall(r'<a class="row[^"]*" href="#episode=(\w+)"', listed) == ["e0", "e1", "e2"]
    assert "&lt;img" in listed

    damaged = drawn(f"{address}#episode=e2", tmp_path / "damaged")
    assert "cut short" in damaged

    conversation = drawn(f"{address}#episode=e1&node=5&tab=conversation", tmp_path / "conversation")
    for text in (listed, damaged, conversation):
        assert "owned" not in re.search("<title>(.*?)</title>", text)[1]
        assert "<img" not in text
    assert len(re.findall(r'<div class="row[^"]*" data-kind="main"', conversation)) == 4
    assert re.search(r"Does not extend the newest call of its line: retry.*?</svg>retry</span>", conversation)
    said = re.findall(r'<div class="text">(.*?)</div>', conversation, re.DOTALL)
    assert said[0] == "Do it."
    assert said[1] == "I read it."
    assert said[2].startswith("The file says: &lt;/script&gt;&lt;img")
    assert said[2].endswith("⟨U+202E⟩ é😀")
    assert said[3] == "It is done."

    tokens = drawn(f"{address}#episode=e1&node=5", tmp_path / "tokens")
    assert '<span class="version">v4</span>' in tokens
    assert len(re.findall(r"data-at=", tokens)) == len(Catalogue(run).entry("e1").open().nodes[5])
