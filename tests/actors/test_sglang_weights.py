"""What an SGLang server is given and what of its answers is believed; without a server."""

import base64
import pickle

import httpx
import pytest
import torch
from tiny_models import make

from actors.engines import sglang_weights, weights
from actors.engines.base import Generate
from actors.engines.sglang import SGLangEngine
from actors.engines.sglang_server import Launch
from actors.engines.sglang_weights import Fitting, Held, buckets


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return folder, make("qwen3", folder, seed=1)


def test_weights_of_the_model_fit_with_and_without_what_is_tied(model, tmp_path):
    folder, own = model
    fitting = Fitting(folder)
    state = own.state_dict()
    whole = weights.publish(state, tmp_path / "whole", 1)
    assert fitting.verified(whole) == whole.resolve()
    bare = weights.publish({name: t for name, t in state.items() if name != "lm_head.weight"}, tmp_path / "bare", 1)
    fitting.verified(bare)
    spelled = weights.publish(state | {"lm_head.weight": state["lm_head.weight"].clone()}, tmp_path / "spelled", 1)
    fitting.verified(spelled)


@pytest.mark.parametrize("change", ["missing", "shape", "unknown"])
def test_weights_of_another_model_do_not(model, tmp_path, change):
    folder, own = model
    state = dict(own.state_dict())
    if change == "missing":
        del state["model.norm.weight"]
    elif change == "shape":
        state["model.norm.weight"] = torch.ones(3)
    else:
        state["model.other.weight"] = torch.ones(3)
    path = weights.publish(state, tmp_path, 1)
    with pytest.raises(ValueError, match=r"do not fit.*(norm|other)"):
        Fitting(folder).verified(path)


def test_the_newest_is_taken_where_it_is_whole(model, tmp_path):
    folder, own = model
    fitting = Fitting(folder)
    assert fitting.newest(Held(0, None)) == Held(0, None)
    first = weights.publish(own.state_dict(), tmp_path, 1)
    held = Held(1, fitting.verified(first))
    second = weights.publish(own.state_dict(), tmp_path, 2)
    assert fitting.newest(held) == Held(2, second.resolve())
    file = second / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-3])
    assert fitting.newest(held) == held


def test_tensors_go_in_portions_and_the_last_is_marked(monkeypatch):
    monkeypatch.setattr(sglang_weights, "_BUCKET_BYTES", 100)
    tensors = {f"w{i}": torch.full((10,), float(i)) for i in range(7)}
    sent = list(buckets(tensors))
    assert [last for last, _ in sent] == [False, False, True]
    back = dict(pair for _, data in sent for pair in pickle.loads(base64.b64decode(data)))
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (200, "<html>"),
        (200, "[]"),
        (200, '{"success": false}'),
        (200, '{"success" : false, "message": ""}'),
        (400, "{}"),
    ],
)
async def test_what_is_no_success_is_a_refusal(model, tmp_path, status, body):
    """Of a page of a proxy in between, too."""
    folder, own = model
    path = weights.publish(own.state_dict(), tmp_path, 1)

    def answer(request):
        if request.url.path == "/server_info":
            return httpx.Response(200, json={"skip_tokenizer_init": True})
        if request.url.path == "/update_weights_from_disk":
            return httpx.Response(status, text=body)
        return httpx.Response(200, json={"status": "ok"})

    engine = SGLangEngine(Launch(folder, folder, tmp_path / "log"), url="http://engine")
    engine._client = httpx.AsyncClient(transport=httpx.MockTransport(answer))
    with pytest.raises(ValueError, match="SGLang refuses /update_weights_from_disk"):
        await engine.load_weights(1, path)
    assert (await engine.health()).version == 0


@pytest.mark.parametrize("said", ["<html>", "{}", '{"skip_tokenizer_init": false}', "[1]"])
async def test_a_url_that_is_no_such_server_is_refused(model, tmp_path, said):
    folder, _ = model
    engine = SGLangEngine(Launch(folder, folder, tmp_path / "log"), url="http://engine")
    engine._client = httpx.AsyncClient(transport=httpx.MockTransport(lambda _: httpx.Response(200, text=said)))
    with pytest.raises(ValueError, match="not SGLang with --skip-tokenizer-init"):
        await engine.generate(Generate([1], 4))
