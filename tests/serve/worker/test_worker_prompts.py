"""Prompts are answered while jobs train: by any adapter, in one batch, without a bit of difference to the training."""

from __future__ import annotations

import contextlib
import http.client
import json
import shutil
import sys
import threading
import zipfile

import fsspec
import httpx
import pytest
from small_model import small_model
from tiny_models import random_backbone
from worker_bench import PATIENCE_S, Bench, wait_until

from weft.data.chats import Rendered
from weft.data.load import prompt_of_chat
from weft.data.tokenise import tokenise_prompt
from weft.engine.inference.attach import StoredAdapter, attach_adapter
from weft.engine.inference.generate import Request, generate
from weft.errors import WeftError
from weft.serve.adapter_folders import adapter_at
from weft.serve.db.adapters import short_name, source_of, source_of_job
from weft.serve.worker import prompt_inputs, prompt_server
from weft.serve.worker.prompt_inputs import AdapterCache
from weft.spec import AdapterSpec
from weft.spec.sampling import Decoding
from weft.store.peft_files import read_adapter, write_adapter

CHAT = [{"role": "user", "content": "heddle"}]


def send_prompt(worker, **question):
    headers = {"X-Weft-Token": question.pop("token", worker._server.token)}
    return httpx.post(f"{worker.address}/generate", json=question, headers=headers, timeout=PATIENCE_S)


@contextlib.contextmanager
def prompted(folder, backbone):
    """A bench with three adapters of some effect, their blobs, and a worker that has nothing else to do."""
    bench = Bench.at(folder, backbone=backbone)
    ids = [bench.submit(tenant, seed=seed, learning_rate=0.05) for seed, tenant in enumerate(("ash", "birch", "cedar"))]
    with bench.worker() as worker:
        bench.wait(*ids)
        yield bench, ids, [blob_of(bench, id) for id in ids], worker
    bench.database.close()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """On the embedded backbone, which writes text."""
    with prompted(tmp_path_factory.mktemp("prompts"), "tiny") as made:
        yield made


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """On a random backbone, whose steps are short."""
    with prompted(tmp_path_factory.mktemp("small"), str(small_model())) as made:
        yield made


def blob_of(bench, id):
    from weft.serve.db.files import get_model

    job = bench.job(id)
    with bench.database.read() as tx:
        return get_model(tx, job["tenant"], job["fine_tuned_model"])["blob"]


def expected(bench, blob, tokens, decoding):
    """What the adapter writes on a backbone of its own."""
    from weft.model.load import load_backbone
    from weft.spec import BackboneSpec

    backbone = load_backbone(BackboneSpec(bench.backbone, device="cpu"))
    folder = bench.folder / f"expected-{blob.replace('/', '-')}"
    if not folder.exists():
        with bench.blobs.open(blob) as stream, zipfile.ZipFile(stream) as archive:
            archive.extractall(folder)
    slot = attach_adapter(backbone, StoredAdapter("a", folder, *read_adapter(folder)[:2], None))
    return generate(backbone, [Request(tokens, slot)], decoding)[0]


def test_prompt_when_the_token_is_wrong_then_is_refused(trained):
    *_, worker = trained
    assert send_prompt(worker, prompt="x", token="guess").status_code == 401
    assert send_prompt(worker, prompt="x", token="").status_code == 401


def test_prompts_when_sent_together_then_each_adapter_answers_as_if_alone(trained):
    bench, _, blobs, worker = trained
    answers: dict[str | None, dict] = {}

    def one(blob):
        answers[blob] = send_prompt(worker, model_blob=blob, messages=CHAT, max_tokens=12, temperature=0).json()

    threads = [threading.Thread(target=one, args=(blob,)) for blob in [None, *blobs]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tokenizer = worker.engine.executor.tokenizer
    prompt = prompt_of_chat(CHAT, tokenizer).tokens.tolist()
    for blob in blobs:
        tokens = expected(bench, blob, prompt, Decoding(12))
        answer = answers[blob]
        assert answer["text"] == tokenizer.decode(tokens, skip_special_tokens=True)
        assert (answer["prompt_tokens"], answer["completion_tokens"]) == (len(prompt), len(tokens))
        assert answer["finish_reason"] == ("length" if len(tokens) == 12 else "stop")
    assert len({answer["text"] for answer in answers.values()}) > 1, "the adapters have no effect"


def test_prompt_when_streamed_then_the_pieces_are_the_answer(trained):
    _, _, blobs, worker = trained
    question = {"model_blob": blobs[0], "prompt": "warp\n", "max_tokens": 10, "temperature": 0.9, "seed": 3}
    whole = send_prompt(worker, **question).json()
    pieces = []
    headers = {"X-Weft-Token": worker._server.token}
    with httpx.stream(
        "POST", f"{worker.address}/generate", json={**question, "stream": True}, headers=headers
    ) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        for line in reply.iter_lines():
            if line:
                pieces.append(json.loads(line.removeprefix("data: ")))
    assert "".join(piece["text"] for piece in pieces) == whole["text"]
    assert [piece["done"] for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert pieces[-1]["completion_tokens"] == whole["completion_tokens"]
    assert len(pieces) > 2
    assert send_prompt(worker, **{**question, "seed": 4}).json()["text"] != whole["text"]


def test_prompt_when_it_is_token_ids_then_is_answered_like_its_text_and_unknown_ids_are_refused(trained):
    *_, blobs, worker = trained
    options = {"model_blob": blobs[0], "max_tokens": 6, "temperature": 0}
    ids = list(map(int, tokenise_prompt(Rendered("warp", (), True, "prompt"), worker.scheduler.tokenizer)))
    assert send_prompt(worker, prompt=ids, **options).json() == send_prompt(worker, prompt="warp", **options).json()
    refused = send_prompt(worker, prompt=[10**6], **options)
    assert refused.status_code == 400 and "has the token 1000000; the model knows 0 to" in refused.text


def test_prompt_when_a_stop_sequence_comes_then_ends_before_it(trained):
    _, _, blobs, worker = trained
    question = {"model_blob": blobs[1], "prompt": "warp\n", "max_tokens": 16, "temperature": 0}
    text = send_prompt(worker, **question).json()["text"]
    stop = text[4:6]
    assert len(stop) == 2
    answer = send_prompt(worker, **question, stop=[stop, "never there"]).json()
    assert answer["text"] == text[: text.index(stop)]
    assert answer["finish_reason"] == "stop"


def test_prompt_when_logprobs_are_wanted_then_tokens_have_those_of_the_model_and_join_to_the_text(trained):
    _, _, blobs, worker = trained
    question = {"model_blob": blobs[0], "prompt": "warp\n", "max_tokens": 10, "temperature": 0.9, "seed": 3}
    plain, whole = (send_prompt(worker, **question, **more).json() for more in ({}, {"logprobs": 2}))
    assert (plain["text"], plain["logprobs"]) == (whole["text"], [])
    records = whole["logprobs"]
    assert len(records) == whole["completion_tokens"] and all(len(each["top"]) == 2 for each in records)
    assert "".join(each["token"] for each in records) == whole["text"]
    assert [whole["text"][each["offset"] :].startswith(each["token"]) for each in records] == [True] * len(records)
    assert all(each["logprob"] <= each["top"][0][1] <= 0 for each in records)
    # The same tokens as a prompt have the same log-probabilities.
    scored = send_prompt(worker, **{**question, "prompt": "warp\n" + whole["text"]}, logprobs=0, echo=True).json()
    assert scored["text"].startswith("warp\n" + whole["text"])
    assert scored["logprobs"][0]["logprob"] is None
    again = scored["logprobs"][whole["prompt_tokens"] :][: len(records)]
    assert [each["token"] for each in again] == [each["token"] for each in records]
    assert [each["logprob"] for each in again] == pytest.approx([each["logprob"] for each in records], abs=1e-3)


def test_prompt_when_a_stop_sequence_comes_then_logprobs_end_with_the_text(trained):
    _, _, blobs, worker = trained
    question = {"model_blob": blobs[1], "prompt": "warp\n", "max_tokens": 16, "temperature": 0, "logprobs": 0}
    text = send_prompt(worker, **question).json()["text"]
    cut = send_prompt(worker, **question, stop=[text[4:6]]).json()
    assert cut["text"] == text[: text.index(text[4:6])] and cut["finish_reason"] == "stop"
    assert "".join(each["token"] for each in cut["logprobs"]).startswith(cut["text"])
    assert all(each["offset"] < len(cut["text"]) for each in cut["logprobs"])


def test_prompt_when_a_schema_is_given_then_the_answer_follows_it(trained):
    _, _, blobs, worker = trained
    schema = {"type": "object", "properties": {"is_warp": {"type": "boolean"}}, "required": ["is_warp"]}
    question = {"model_blob": blobs[0], "messages": CHAT, "max_tokens": 60, "json_schema": schema, "is_strict": True}
    answers = [json.loads(send_prompt(worker, **question, seed=seed).json()["text"]) for seed in range(3)]
    assert all(list(answer) == ["is_warp"] and isinstance(answer["is_warp"], bool) for answer in answers)
    refused = send_prompt(worker, **{**question, "json_schema": {"type": "nonsense"}})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "response_format"


def test_prompt_when_the_worker_has_no_grammars_then_a_schema_is_refused_in_a_sentence(trained, monkeypatch):
    *_, worker = trained
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    monkeypatch.setattr(worker._server, "_grammars", None)
    refused = send_prompt(worker, prompt="a", json_schema={"type": "object"})
    assert refused.status_code == 400 and "needs xgrammar on the worker" in refused.json()["error"]["message"]


def test_prompt_when_settings_of_sampling_are_given_then_they_change_the_answer(trained):
    _, _, blobs, worker = trained
    question = {"model_blob": blobs[0], "prompt": "warp\n", "max_tokens": 6, "temperature": 0, "logprobs": 0}
    plain = send_prompt(worker, **question).json()
    tokenizer = worker.scheduler.tokenizer
    (first,) = tokenizer.encode(plain["logprobs"][0]["token"], add_special_tokens=False)
    assert send_prompt(worker, **question, stop_token_ids=[first]).json()["text"] == ""
    banned = send_prompt(worker, **question, logit_bias={str(first): -100}).json()
    assert banned["logprobs"][0]["token"] != plain["logprobs"][0]["token"]
    assert send_prompt(worker, **{**question, "temperature": 5, "top_k": 1}).json() == plain
    assert send_prompt(worker, **{**question, "temperature": 5, "min_p": 1}).json() == plain
    assert send_prompt(worker, **question, repetition_penalty=100).json()["text"] != plain["text"]


@pytest.mark.parametrize(
    ("question", "status", "words"),
    [
        ({}, 400, "messages or prompt"),
        ({"prompt": "a", "messages": CHAT}, 400, "not both"),
        ({"messages": []}, 400, "empty"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, 400, "use system, user, assistant or tool"),
        ({"prompt": "a", "max_tokens": 0}, 400, "greater than or equal to 1"),
        ({"prompt": "a", "top_p": 2}, 400, "less than or equal to 1"),
        ({"prompt": "a", "min_p": 2}, 400, "min_p: must be at least 0 and at most 1, got 2."),
        ({"prompt": "a", "logprobs": 21}, 400, "logprobs: must be at least 0 and at most 20, got 21."),
        ({"prompt": "a", "logit_bias": {"999999": 1}}, 400, "logit_bias: has the token 999999; the model knows 0 to"),
        ({"prompt": "word " * 3000}, 400, "positions"),
        ({"prompt": "a", "model_blob": "../../etc/passwd"}, 404, "not the name of a blob"),
        ({"prompt": "a", "model_blob": "ab/" + "0" * 32}, 404, "not in the file store"),
    ],
)
def test_prompt_when_it_cannot_be_answered_then_gives_the_reason(trained, question, status, words):
    *_, worker = trained
    reply = send_prompt(worker, **question)
    assert reply.status_code == status, reply.text
    assert words in reply.json()["error"]["message"]


def test_prompt_when_it_has_more_characters_than_the_positions_hold_then_is_refused_without_tokenising(
    trained, monkeypatch
):
    *_, worker = trained
    monkeypatch.setattr("weft.serve.worker.prompt_server.tokens_of", lambda *_: pytest.fail("tokenised"))
    most = worker.scheduler.max_positions * worker._server._tokenizers.longest
    for question in ({"prompt": "x" * (most + 1)}, {"messages": [{**CHAT[0], "content": "x" * (most // 2 + 1)}] * 2}):
        reply = send_prompt(worker, **question)
        assert reply.status_code == 400, reply.text
        assert "characters; the model has" in reply.json()["error"]["message"]
        assert reply.json()["error"]["param"] == next(iter(question))


@pytest.fixture
def held_up(trained, monkeypatch):
    """Long prompts are not tokenised until the event is set; the list has those that have begun."""
    *_, worker = trained
    tokens, may_go, begun = prompt_server.tokens_of, threading.Event(), []

    def slow(body, *rest):
        if len(body.prompt) > 100:
            begun.append(body)
            assert may_go.wait(PATIENCE_S)
        return tokens(body, *rest)

    monkeypatch.setattr(prompt_inputs, "LONG_CHARS", 100)
    monkeypatch.setattr(prompt_server, "tokens_of", slow)
    yield worker, may_go, begun
    may_go.set()


def test_prompt_when_another_is_being_tokenised_for_long_then_is_answered_meanwhile(held_up):
    worker, may_go, begun = held_up
    replies = []
    long = threading.Thread(target=lambda: replies.append(send_prompt(worker, prompt="warp " * 30, max_tokens=1)))
    long.start()
    wait_until(lambda: begun)
    assert send_prompt(worker, prompt="warp", max_tokens=1).status_code == 200
    assert not replies
    may_go.set()
    long.join()
    assert replies[0].status_code == 200


def test_prompts_when_their_clients_have_gone_then_are_neither_tokenised_nor_answered(held_up):
    worker, may_go, begun = held_up
    body = json.dumps({"prompt": "warp " * 30, "max_tokens": 5}).encode()
    clients = []
    for _ in range(3):
        client = http.client.HTTPConnection("127.0.0.1", int(worker.address.rpartition(":")[2]))
        client.request(
            "POST", "/generate", body, {"content-type": "application/json", "X-Weft-Token": worker._server.token}
        )
        clients.append(client)
    tokenizers, before = worker._server._tokenizers, worker.scheduler.num_answered
    wait_until(lambda: tokenizers._num_long == 3 and begun)
    for client in clients:
        client.close()
    wait_until(lambda: tokenizers._num_long == 1)
    may_go.set()
    wait_until(lambda: tokenizers._num_long == 0)
    assert len(begun) == 1
    assert send_prompt(worker, prompt="warp", max_tokens=1).status_code == 200
    assert worker.scheduler.num_answered == before + 1


def test_prompts_when_many_long_ones_wait_then_more_are_refused_and_short_ones_are_answered(held_up, monkeypatch):
    worker, may_go, begun = held_up
    monkeypatch.setattr(prompt_inputs, "MAX_LONG", 1)
    long = threading.Thread(target=send_prompt, args=(worker,), kwargs={"prompt": "warp " * 30, "max_tokens": 1})
    long.start()
    wait_until(lambda: begun)
    refused = send_prompt(worker, prompt="warp " * 30, max_tokens=1)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert send_prompt(worker, prompt="warp", max_tokens=1).status_code == 200
    may_go.set()
    long.join()


def test_adapter_cache_when_one_archive_takes_long_then_others_are_read_meanwhile(trained, tmp_path, monkeypatch):
    bench, _, blobs, _ = trained
    may_go, fetch = threading.Event(), bench.blobs.fetch

    def slow(blob, path):
        if blob == blobs[0]:
            assert may_go.wait(PATIENCE_S)
        fetch(blob, path)

    monkeypatch.setattr(bench.blobs, "fetch", slow)
    adapters = AdapterCache(bench.blobs, tmp_path / "adapters", trained[-1].scheduler.prepare)
    waiting = threading.Thread(target=adapters.get, args=(blobs[0],))
    waiting.start()
    assert adapters.get(blobs[1]).name == blobs[1]
    may_go.set()
    waiting.join()
    assert set(adapters.names) == {short_name(blobs[0]), short_name(blobs[1])}


def test_adapter_cache_when_full_then_the_least_recently_used_goes_and_is_read_again(trained, tmp_path):
    bench, _, blobs, worker = trained
    read = []

    def prepare(file):
        read.append(file.name)
        return worker.scheduler.prepare(file)

    adapters = AdapterCache(bench.blobs, tmp_path / "adapters", prepare)
    adapters._most_bytes = 2 * adapters.get(blobs[0]).num_bytes
    for blob in (blobs[1], blobs[0], blobs[2], blobs[0], blobs[1]):
        adapters.get(blob)
    assert read == [*blobs, blobs[1]]
    assert adapters.names == (short_name(blobs[0]), short_name(blobs[1]))


def test_prompts_when_jobs_train_then_both_go_on_and_the_adapter_is_the_same(small):
    bench, _, blobs, worker = small
    id = bench.submit("ash", seed=11, max_steps=48)
    bench.wait_for_step(id, 1)
    answered = 0
    while bench.job(id)["status"] == "running":
        reply = send_prompt(worker, model_blob=blobs[answered % 3], prompt="warp\n", max_tokens=4, temperature=0)
        assert reply.status_code == 200
        answered += 1
    bench.wait(id)
    assert answered > 2
    assert bench.adapter(id) == bench.expected(id)[0]


def test_running_job_when_prompted_at_every_step_then_answers_change_and_no_bit_of_training_does(small):
    bench, *_, worker = small
    question = {"prompt": "warp\n", "max_tokens": 8, "temperature": 0, "logprobs": 0}
    id = bench.submit("ash", seed=21, max_steps=48, learning_rate=0.02)
    source = source_of_job(bench.job(id))
    bench.wait_for_step(id, 1)
    answers = []
    while bench.job(id)["status"] == "running":
        reply = send_prompt(worker, model_blob=source, **question)
        assert reply.status_code in (200, 503)
        answers += [reply.json()["logprobs"]] if reply.status_code == 200 else []
        held = [name for name in worker.scheduler._slots.names if name.startswith(id)]
        assert len(held) <= 1, "copies of earlier steps go"
    bench.wait(id)
    assert len(answers) > 2 and answers[0] != answers[-1]
    assert bench.adapter(id) == bench.expected(id)[0]
    assert send_prompt(worker, model_blob=source, **question).status_code == 503


def test_prompt_when_the_adapter_is_damaged_then_500_without_a_path(trained):
    bench, _, blobs, worker = trained
    with bench.blobs.open(blobs[0]) as stream:
        data = bytearray(stream.read())
    for index in (len(data) // 2, len(data) - 10):
        damaged = bytearray(data)
        damaged[index] ^= 1
        reply = send_prompt(worker, model_blob=bench.blobs.put(bytes(damaged), ".zip"), prompt="x", max_tokens=1)
        assert reply.status_code == 500
        assert str(bench.folder) not in reply.text and reply.json()["error"]["param"] is None


def test_prompt_when_its_adapter_does_not_fit_the_backbone_then_400_without_a_path(trained, tmp_path):
    bench, *_, worker = trained
    spec = AdapterSpec(r=2, target_modules=("q_proj",))
    adapter = random_backbone("llama").new_adapter(spec, 1)
    write_adapter(tmp_path / "other", spec, adapter.tensors(), base_model="x", target_names=["q_proj"])
    reply = send_prompt(worker, model_blob=bench.blobs.put_dir(tmp_path / "other"), prompt="x", max_tokens=1)
    assert reply.status_code == 400
    assert str(bench.folder) not in reply.text and reply.json()["error"]["param"] is None


def test_prompt_when_its_adapter_lies_in_a_folder_then_answers_as_from_the_archive(trained, tmp_path):
    bench, _, blobs, worker = trained
    folder = tmp_path / "a"
    with bench.blobs.open(blobs[0]) as stream, zipfile.ZipFile(stream) as archive:
        archive.extractall(folder)
    source = source_of({"version": version_of(folder), "path": str(folder)})
    question = {"prompt": "warp\n", "max_tokens": 8, "temperature": 0}
    assert check(worker, source).status_code == 204
    answers = [send_prompt(worker, model_blob=blob, **question).json() for blob in (source, blobs[0])]
    assert answers[0] == answers[1]
    # Once read it is in memory, whatever becomes of the files.
    (folder / "adapter_config.json").write_text("{")
    assert send_prompt(worker, model_blob=source, **question).json() == answers[1]
    assert check(worker, source_of({"version": "another", "path": str(folder)})).status_code == 503
    changed = source_of({"version": version_of(folder), "path": str(folder)})
    reply = check(worker, changed)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "adapter_file")
    assert str(tmp_path) not in reply.text
    assert httpx.post(f"{worker.address}/check", json={"model_blob": source}).status_code == 401


def version_of(path):
    return adapter_at("a", str(path)).version


def test_prompt_when_its_adapter_lies_in_a_bucket_then_answers_as_from_the_archive(trained, tmp_path):
    bench, _, blobs, worker = trained
    with bench.blobs.open(blobs[0]) as stream, zipfile.ZipFile(stream) as archive:
        archive.extractall(tmp_path / "a")
    url = f"memory://{tmp_path.name}/lora/a"
    files, at = fsspec.url_to_fs(url)
    files.put(f"{tmp_path / 'a'}/", f"{at}/", recursive=True)
    source = source_of({"version": version_of(url), "path": url})
    question = {"prompt": "warp\n", "max_tokens": 8, "temperature": 0}
    answers = [send_prompt(worker, model_blob=blob, **question).json() for blob in (source, blobs[0])]
    assert answers[0] == answers[1]
    files.pipe_file(f"{at}/adapter_config.json", b"{")
    assert check(worker, source_of({"version": version_of(url), "path": url})).status_code == 400
    assert check(worker, source_of({"version": "another", "path": url})).status_code == 503
    files.rm(at, recursive=True)
    assert check(worker, source_of({"version": "another", "path": url})).status_code == 503


def check(worker, source):
    headers = {"X-Weft-Token": worker._server.token}
    return httpx.post(f"{worker.address}/check", json={"model_blob": source}, headers=headers, timeout=PATIENCE_S)


def test_worker_when_it_may_train_no_jobs_then_it_answers_prompts_and_claims_nothing(trained):
    bench, *_ = trained
    with bench.worker(max_jobs=0) as other:
        assert send_prompt(other, prompt="warp\n", max_tokens=1).status_code == 200
        with bench.database.begin() as tx:
            claimed = other.sync._writer._claim_jobs(tx, {}, False)
        assert claimed == []


def test_adapter_cache_when_an_archive_is_damaged_then_reports_it_and_leaves_nothing(trained, tmp_path):
    bench, *_ = trained
    adapters = AdapterCache(bench.blobs, tmp_path / "adapters", trained[-1].scheduler.prepare)
    with pytest.raises(WeftError):
        adapters.get(bench.blobs.put(b"no archive", ".zip"))
    assert not list((tmp_path / "adapters").iterdir())
    shutil.rmtree(tmp_path / "adapters")


def test_worker_when_it_trains_with_prompts_waiting_all_the_time_then_goes_on_training(small):
    """Which prompt takes how much of the time: see the tests of a turn."""
    bench, _, blobs, worker = small
    id = bench.submit("ash", seed=12, max_steps=100_000, save_steps=100_000)
    bench.wait_for_step(id, 3)
    is_over, answered = threading.Event(), []

    def chatter():
        while not is_over.is_set():
            answered.append(send_prompt(worker, model_blob=blobs[0], prompt="warp\n", max_tokens=64, temperature=1.0))

    threads = [threading.Thread(target=chatter) for _ in range(4)]
    for thread in threads:
        thread.start()
    bench.wait_for_step(id, bench.job(id)["step"] + 10)
    is_over.set()
    bench.request(id, "cancel")
    bench.wait(id)
    for thread in threads:
        thread.join()
    assert [answer.status_code for answer in answered] == [200] * len(answered)
