"""/v1/decisions and `LLM.decide`: the probabilities are the model's own, the input is read once, and what is wrong is
named by its path."""

from __future__ import annotations

import json
import math
import shutil
import time

import openai
import pytest
from support.tiny_models import model_of
from transformers import LlamaConfig

from octavo import LLM, SamplingParams
from octavo.cli.main import main
from octavo.errors import ConfigError, FieldError

INPUT = "The parcel came two weeks late, and the vase in it was broken. I want my money back."
BROKEN = {"type": "predicate", "name": "broken", "instructions": "Something was broken."}
TEAM = {
    "type": "choice",
    "instructions": "Which team should answer?",
    "choices": [
        {"value": "billing", "description": "invoices and refunds"},
        {"value": "logistics"},
        {"value": True},
        {"value": "true"},
    ],
}
ANGER = {
    "type": "score",
    "name": "anger",
    "instructions": [{"type": "input_text", "text": "How angry is the author?"}],
    "levels": [{"label": "calm"}, {"label": "annoyed"}, {"label": "furious", "description": "with threats"}],
}
MANY = {
    "type": "choice",
    "name": "which",
    "instructions": "Which number fits?",
    "choices": [{"value": f"number {number}"} for number in range(40)],
}
# What the model reads, as the documentation has it.
BROKEN_TURN = (
    "Judge by what is above whether this statement is true:\n\nSomething was broken.\n\n"
    "A: true\nB: false\n\nAnswer with one letter and nothing else."
)
TEAM_TURN = (
    "Choose by what is above:\n\nWhich team should answer?\n\nOptions:\nA: billing (invoices and refunds)\n"
    'B: logistics\nC: true\nD: "true"\n\nAnswer with one letter and nothing else.'
)
ANGER_TURN = (
    "Rate what is above:\n\nHow angry is the author?\n\nLevels, the lowest first:\nA: calm\nB: annoyed\n"
    "C: furious (with threats)\n\nAnswer with one letter and nothing else."
)
MANY_TURN = (
    "Choose by what is above:\n\nWhich number fits?\n\nOptions:\n"
    + "\n".join(f"{chr(65 + n // 26)}{chr(65 + n % 26)}: number {n}" for n in range(40))
    + "\n\nAnswer with two letters and nothing else."
)


@pytest.fixture(scope="module")
def decided_model(tiny_model, tmp_path_factory):
    """The tiny model with room for long prompts, and with weights that prefer some tokens to others."""
    folder = tmp_path_factory.mktemp("decided") / "model"
    config = json.loads((tiny_model / "config.json").read_text()) | {"max_position_embeddings": 8192}
    shutil.copytree(tiny_model, folder)
    model_of(
        LlamaConfig(**{k: v for k, v in config.items() if k not in ("architectures", "torch_dtype")})
    ).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


FLAGS = ("--served-model-name", "tiny", "--kv-cache-memory-bytes", "64MiB", "--max-num-seqs", "8")


@pytest.fixture(scope="module")
def server(start, decided_model):
    return start(*FLAGS, "--decisions-min-mass", "0", model=decided_model)


@pytest.fixture(scope="module")
def client(server):
    return server.client()


@pytest.fixture(scope="module")
def llm(decided_model):
    return LLM(str(decided_model), dtype="float32", kv_cache_memory_bytes=64 << 20)


@pytest.fixture(scope="module")
def reference(decided_model):
    """The probability of a text behind a prompt, by the log-probabilities of its tokens, computed without a cache."""
    llm = LLM(str(decided_model), dtype="float32", kv_cache_memory_bytes=64 << 20, enable_prefix_caching=False)
    tokenizer = llm.get_tokenizer()

    def probabilities(turn: str, labels: list[str]) -> list[float]:
        head = tokenizer.encode(f"<|user|>{INPUT}\n\n{turn}<|end|><|assistant|>", add_special_tokens=False)
        tails = [tokenizer.encode(label, add_special_tokens=False) for label in labels]
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        prompts = [{"prompt_token_ids": head + tail} for tail in tails]
        found = []
        for output, tail in zip(llm.generate(prompts, params, use_tqdm=False), tails, strict=True):
            rows = output.prompt_logprobs[-len(tail) :]
            found.append(math.exp(sum(row[token].logprob for row, token in zip(rows, tail, strict=True))))
        return found

    return probabilities


def letters(count: int) -> list[str]:
    return [chr(65 + at) for at in range(count)]


def test_probabilities_are_those_of_each_label_behind_its_own_prompt(client, llm, reference):
    questions = [BROKEN, TEAM, ANGER, MANY]
    pairs = [chr(65 + at // 26) + chr(65 + at % 26) for at in range(40)]
    expected = [
        reference(BROKEN_TURN, letters(2)),
        reference(TEAM_TURN, letters(4)),
        reference(ANGER_TURN, letters(3)),
        reference(MANY_TURN, pairs),
    ]
    for decision in (
        client.decisions.create(model="tiny", input=INPUT, questions=questions),
        llm.decide(INPUT, questions, min_mass=0),
    ):
        broken, team, anger, many = decision.answers
        shares = [[one / math.fsum(row) for one in row] for row in expected]
        assert broken.probability == pytest.approx(shares[0][0], abs=1e-6)
        for answer, share, row in zip((team, anger, many), shares[1:], expected[1:], strict=True):
            assert [one.probability for one in answer.probabilities] == pytest.approx(share, abs=1e-6)
            assert answer.confidence == pytest.approx(max(row), abs=1e-6)
        assert [one.value for one in team.probabilities] == ["billing", "logistics", True, "true"]
        assert team.choice == team.probabilities[shares[1].index(max(shares[1]))].value
        assert [(one.value, one.label) for one in anger.probabilities] == [(0, "calm"), (1, "annoyed"), (2, "furious")]
        assert anger.score == pytest.approx(shares[2][1] + 2 * shares[2][2], abs=1e-6)
        assert many.choice == f"number {shares[3].index(max(shares[3]))}"
        assert max(shares[0][0], 1 - shares[0][0]) > 0.51 and max(shares[3]) > 2 / 40  # the model prefers some


def test_the_answer_has_openais_form(client, server):
    decision = client.decisions.create(model="tiny", input=INPUT, questions=[BROKEN, TEAM, ANGER])
    assert [answer.type for answer in decision.answers] == ["predicate", "choice", "score"]
    assert [answer.name for answer in decision.answers] == ["broken", None, "anger"] and decision.model == "tiny"
    usage, body = decision.usage, {"model": "tiny", "input": INPUT, "questions": [BROKEN]}
    assert usage.output_tokens == 3 and usage.total_tokens == usage.input_tokens + 3
    assert usage.output_tokens_details.reasoning_tokens == usage.input_tokens_details.cache_write_tokens == 0
    assert server.post("/v1/decisions", body).json().keys() == {"answers", "model", "usage"}


def test_the_input_is_read_once(client, server, llm):
    long = " ".join(f"Line {number} says {number * 7919 % 997}." for number in range(150))
    questions = [{**BROKEN, "instructions": f"Number {number} is odd."} for number in range(30)]
    for decision in (
        client.decisions.create(model="tiny", input=long, questions=questions),
        llm.decide(long, questions),
    ):
        usage = decision.usage
        computed = usage.input_tokens - usage.input_tokens_details.cached_tokens
        whole = usage.input_tokens / len(questions)
        assert whole > 1_500 and computed < whole + len(questions) * 200


def test_the_first_question_is_read_alone(decided_model):
    """With room for many prompts in a step, reads that begin together would each compute the input."""
    llm = LLM(str(decided_model), dtype="float32", kv_cache_memory_bytes=64 << 20, max_num_batched_tokens=16_384)
    long = " ".join(f"Line {number} says {number * 7919 % 997}." for number in range(150))
    questions = [{**BROKEN, "instructions": f"Number {number} is odd."} for number in range(8)]
    usage = llm.decide(long, questions).usage
    whole = usage.input_tokens / len(questions)
    assert usage.input_tokens - usage.input_tokens_details.cached_tokens < whole + len(questions) * 200


def test_400_questions_are_answered_in_their_order(client):
    kinds = (BROKEN, TEAM, ANGER)
    questions = [{**kinds[at % 3], "name": f"question {at}"} for at in range(400)]
    answers = client.decisions.create(model="tiny", input=INPUT, questions=questions).answers
    assert [answer.name for answer in answers] == [question["name"] for question in questions]
    for at, answer in enumerate(answers):  # the same question has the same answer
        assert answer.type == kinds[at % 3]["type"]
        if answer.type != "predicate":
            assert math.fsum(one.probability for one in answer.probabilities) == pytest.approx(1)
            assert answer.confidence == pytest.approx(answers[at % 3].confidence, abs=1e-6)


def test_255_choices(client):
    many = {**MANY, "choices": [{"value": f"{number}"} for number in range(255)]}
    found = client.decisions.create(model="tiny", input=INPUT, questions=[many, BROKEN])
    shares = [one.probability for one in found.answers[0].probabilities]
    assert len(shares) == 255 and math.fsum(shares) == pytest.approx(1) and min(shares) > 0
    assert found.answers[0].choice == str(shares.index(max(shares)))
    assert found.usage.output_tokens == 1 + 10 + 1  # A to J, then the second letters


CONVERSATION = [
    {"role": "developer", "content": [{"type": "input_text", "text": "You sort mail."}]},
    {
        "role": "user",
        "content": [{"type": "input_text", "text": "Order 7?"}, {"type": "input_json", "data": {"a": [1, None]}}],
    },
    {"type": "function_call", "call_id": "c1", "name": "find", "arguments": '{"order": 7}'},
    {"type": "function_call_output", "call_id": "c1", "output": "It is late."},
    {"type": "custom_tool_call", "call_id": "c2", "name": "note", "input": "late"},
    {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "noted"}]},
    {
        "role": "assistant",
        "phase": "final_answer",
        "content": [{"type": "output_text", "text": "It is late.", "annotations": []}],
    },
]


def test_a_conversation_is_an_input(client, llm):
    answered = client.decisions.create(model="tiny", input=CONVERSATION, questions=[BROKEN, ANGER])
    offline = llm.decide(CONVERSATION, [BROKEN, ANGER], min_mass=0)
    assert answered.answers[0].probability == pytest.approx(offline.answers[0].probability, abs=1e-6)
    assert answered.usage.input_tokens == offline.usage.input_tokens
    other = [*CONVERSATION[:1], {**CONVERSATION[1], "content": "Order 8?"}, *CONVERSATION[2:]]
    assert llm.decide(other, [BROKEN], min_mass=0).answers[0].probability != offline.answers[0].probability


def test_a_model_that_would_say_something_else_refuses(shared_server, llm):
    """Two labels of 400 tokens that are about as likely have half a percent."""
    answers = shared_server.client().decisions.create(model="tiny", input=INPUT, questions=[BROKEN, TEAM]).answers
    assert (answers[0].type, answers[0].name) == ("refusal", "broken")
    assert llm.decide(INPUT, [BROKEN], min_mass=1).answers[0].name == "broken"
    assert not hasattr(llm.decide(INPUT, [BROKEN], min_mass=1).answers[0], "probability")


def test_notes_are_there_where_they_are_asked_for(server, llm):
    body = {"model": "tiny", "input": INPUT, "questions": [BROKEN, TEAM, ANGER, MANY]}
    plain = server.post("/v1/decisions", body).json()
    noted = server.post("/v1/decisions", {**body, "octavo": {"diagnostics": True}}).json()
    assert noted["answers"] == plain["answers"]
    assert server.post("/v1/decisions", {**body, "octavo": {}}).json()["octavo"] == {
        "calibrated": False,
        "diagnostics": None,
    }
    found = noted["octavo"]["diagnostics"]
    for answer, one in zip(plain["answers"][1:], found[1:], strict=True):
        top = max(share["probability"] for share in answer["probabilities"])
        assert one["mass"] == pytest.approx(answer["confidence"] / top)
    offline = llm.decide(INPUT, body["questions"], min_mass=0, diagnostics=True).octavo
    assert [one.says_label for one in offline.diagnostics] == [one["says_label"] for one in found]


def test_says_label_is_true_where_the_likeliest_token_is_a_label(llm):
    """A choice of letters alone, put so that every token is a label or none."""
    tokenizer, size = llm.get_tokenizer(), llm.config.model.vocab_size
    prompt = tokenizer.encode(f"<|user|>{INPUT}\n\n{BROKEN_TURN}<|end|><|assistant|>", add_special_tokens=False)
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=size)
    said = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)[0].outputs[0].token_ids[0]
    labels = [tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "AB"]
    (found,) = llm.decide(INPUT, [BROKEN], min_mass=0, diagnostics=True).octavo.diagnostics
    assert found.says_label == (said in labels)


def test_options_in_both_orders_have_the_mean_of_both(server, llm, reference):
    turned = BROKEN_TURN.replace("A: true\nB: false", "A: false\nB: true")
    logits = [
        (math.log(one) + math.log(other)) / 2
        for one, other in zip(reference(BROKEN_TURN, letters(2)), reference(turned, letters(2))[::-1], strict=True)
    ]
    expected = 1 / (1 + math.exp(logits[1] - logits[0]))
    body = {"model": "tiny", "input": INPUT, "questions": [BROKEN, MANY], "octavo": {"debias": True}}
    answered = server.post("/v1/decisions", body).json()
    assert answered["answers"][0]["probability"] == pytest.approx(expected, abs=1e-6)
    offline = llm.decide(INPUT, [BROKEN, MANY], min_mass=0, debias=True)
    assert offline.answers[0].probability == pytest.approx(expected, abs=1e-6)
    plain = llm.decide(INPUT, [BROKEN, MANY], min_mass=0)
    assert plain.answers[0].probability != pytest.approx(expected, abs=1e-4)
    assert answered["usage"]["output_tokens"] == 2 * plain.usage.output_tokens


def test_a_calibration_is_made_and_applied(start, decided_model, llm, tmp_path, capsys):
    """From questions with known answers to a file that a server and `LLM` take from the model's folder."""
    data, made = tmp_path / "data.jsonl", tmp_path / "made.json"
    lines = [
        {"input": f"Case {at}", "questions": [BROKEN, ANGER], "answers": [at % 3 > 0, "calm" if at % 2 else 2]}
        for at in range(25)
    ]
    data.write_text("\n".join(map(json.dumps, lines)) + "\n")
    flags = [str(decided_model), "--dtype", "float32", "--kv-cache-memory-bytes", "64MiB", "-o", str(made)]
    assert main(["decisions", "calibrate", str(data), *flags]) == 0
    assert "choice" in (said := capsys.readouterr().out) and "too few" in said and "ECE" in said
    temperatures = json.loads(made.read_text())["temperatures"]
    assert temperatures.keys() == {"predicate", "score"}
    expected = llm.decide(INPUT, [BROKEN, ANGER], min_mass=0, temperatures=temperatures, diagnostics=True)
    assert expected.octavo.calibrated
    plain = llm.decide(INPUT, [BROKEN, ANGER], min_mass=0).answers
    odds = [answer.probability / (1 - answer.probability) for answer in (expected.answers[0], plain[0])]
    assert math.log(odds[0]) == pytest.approx(math.log(odds[1]) / temperatures["predicate"], rel=1e-4)
    folder = tmp_path / "model"
    shutil.copytree(decided_model, folder)
    shutil.copy(made, folder / "decisions.json")
    body = {"model": "tiny", "input": INPUT, "questions": [BROKEN, ANGER], "octavo": {}}
    for model, more in ((folder, ()), (decided_model, ("--decisions-calibration", str(made)))):
        answered = start(*FLAGS, "--decisions-min-mass", "0", *more, model=model).post("/v1/decisions", body).json()
        assert answered["octavo"]["calibrated"] is True
        assert answered["answers"][0]["probability"] == pytest.approx(expected.answers[0].probability, abs=1e-6)
        assert answered["answers"][1]["score"] == pytest.approx(expected.answers[1].score, abs=1e-6)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        ("{", "data.jsonl:1 is no JSON"),
        ('{"input": "x"}', "data.jsonl:1 must be an object"),
        ('{"input": "x", "questions": [], "answers": [1]}', "two lists of one length"),
        (json.dumps({"input": "x", "questions": [BROKEN], "answers": ["yes"]}), 'answers.0 "yes" is none of true'),
        (json.dumps({"input": "x", "questions": [{"type": "essay"}], "answers": [1]}), "questions.0.type"),
        (json.dumps({"input": "x", "questions": [BROKEN], "answers": [True]}), "fewer than 20"),
    ],
)
def test_data_that_calibrates_nothing_is_refused_with_its_line(text, words, decided_model, llm, tmp_path, capsys):
    data = tmp_path / "data.jsonl"
    data.write_text(text)
    flags = [str(decided_model), "--dtype", "float32", "--kv-cache-memory-bytes", "64MiB"]
    assert main(["decisions", "calibrate", str(data), *flags, "-o", str(tmp_path / "no.json")]) == 1
    assert words in capsys.readouterr().err and not (tmp_path / "no.json").exists()


def test_a_flag_names_a_calibration_that_can_be_used(decided_model, tmp_path, caplog):
    bad = tmp_path / "bad.json"
    bad.write_text('{"temperatures": {}}')
    sizes = {"dtype": "float32", "kv_cache_memory_bytes": 64 << 20}
    for path in (bad, tmp_path / "missing.json"):
        with pytest.raises(ConfigError, match=f"decisions_calibration .*{path.name}"):
            LLM(str(decided_model), decisions_calibration=str(path), **sizes)
    folder = tmp_path / "model"
    shutil.copytree(decided_model, folder)
    shutil.copy(bad, folder / "decisions.json")
    assert not LLM(str(folder), **sizes).decide(INPUT, [BROKEN], diagnostics=True).octavo.calibrated
    assert "decisions are not calibrated" in caplog.text


CHOICES = [{"value": "a"}, {"value": "b"}]
WRONG = [
    ({"questions": []}, "questions"),
    ({"questions": [BROKEN] * 401}, "questions"),
    ({"questions": {}}, "questions"),
    ({"questions": [BROKEN, "x"]}, "questions.1"),
    ({"questions": [{"type": "essay", "instructions": "x"}]}, "questions.0.type"),
    ({"questions": [{"type": "predicate"}]}, "questions.0.instructions"),
    ({"questions": [{"type": "predicate", "instructions": ""}]}, "questions.0.instructions"),
    ({"questions": [{**TEAM, "choices": CHOICES[:1]}]}, "questions.0.choices"),
    ({"questions": [{**TEAM, "choices": CHOICES * 128}]}, "questions.0.choices"),
    ({"questions": [BROKEN] * 3 + [{**TEAM, "choices": [CHOICES[0], {"value": 1}]}]}, "questions.3.choices.1.value"),
    ({"questions": [{**TEAM, "choices": [*CHOICES, CHOICES[1]]}]}, "questions.0.choices.2.value"),
    (
        {"questions": [{**TEAM, "choices": [CHOICES[0], {"value": "b", "description": 1}]}]},
        "questions.0.choices.1.description",
    ),
    ({"questions": [{**ANGER, "levels": [{"label": "x"}, {}]}]}, "questions.0.levels.1.label"),
    ({"questions": [{**BROKEN, "name": 3}]}, "questions.0.name"),
    (
        {"questions": [{**BROKEN, "instructions": [{"type": "input_json", "data": 3}]}]},
        "questions.0.instructions.0.data",
    ),
    ({"input": []}, "input"),
    ({"input": None}, "input"),
    ({"input": [{"role": "robot", "content": "x"}]}, "input.0.role"),
    ({"input": [{"role": "user", "content": [{"type": "thing"}]}]}, "input.0.content.0.type"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]},
        "input.0.content.0.image_url",
    ),
    ({"input": [CONVERSATION[0], CONVERSATION[3]]}, "input.1.call_id"),
    ({"input": [{**CONVERSATION[2], "arguments": "[]"}]}, "input.0.arguments"),
    ({"input": [{"type": "reasoning"}]}, "input.0.type"),
    ({"stream": True}, "stream"),
    ({"octavo": {"debiased": True}}, "octavo.debiased"),
    ({"octavo": {"debias": 1}}, "octavo.debias"),
    ({"model": "other"}, "model"),
]


@pytest.mark.parametrize(("change", "path"), WRONG, ids=[f"{n}-{path}" for n, (_, path) in enumerate(WRONG)])
def test_what_is_wrong_is_named_by_its_path(server, llm, change, path):
    body = {"model": "tiny", "input": INPUT, "questions": [BROKEN], **change}
    refused = server.post("/v1/decisions", body)
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (404 if path == "model" else 400, path)
    assert path in error["message"]
    if path.startswith(("questions", "input")) and "image" not in path:
        with pytest.raises(FieldError) as raised:
            llm.decide(body["input"], body["questions"])
        assert raised.value.param == path and str(raised.value) == error["message"]


def nested(levels):
    data = {}
    for _ in range(levels - 1):
        data = {"a": data}
    return data


@pytest.mark.parametrize(
    ("good", "bad", "word"),
    [
        (nested(32), nested(33), "levels"),
        ({"a": [0] * 9_900}, {"a": [0] * 10_001}, "values"),
        ({"a": "x" * 1000}, {"a": "x" * (256 << 10)}, "bytes"),
    ],
)
def test_json_has_limits(server, good, bad, word):
    def ask(data):
        content = [{"type": "input_json", "data": data}]
        return server.post("/v1/decisions", {"input": [{"role": "user", "content": content}], "questions": [BROKEN]})

    refused = ask(bad).json()["error"]
    assert refused["param"] == "input.0.content.0.data" and word in refused["message"]
    accepted = ask(good)
    assert accepted.status_code == 200 or accepted.json()["error"]["code"] == "context_length_exceeded"


def test_a_question_that_makes_the_prompt_too_long_is_named(client, llm):
    long = {**BROKEN, "instructions": "9 " * 9_000}
    with pytest.raises(openai.BadRequestError) as refused:
        client.decisions.create(model="tiny", input=INPUT, questions=[BROKEN, long])
    assert refused.value.code == "context_length_exceeded" and refused.value.param == "questions.1"
    with pytest.raises(ValueError, match=r"^questions\.1: .* tokens"):
        llm.decide(INPUT, [BROKEN, long])


def counted(server, name, label=""):
    lines = server.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name) and label in line)


def test_a_cut_connection_frees_everything(server):
    questions = [{**BROKEN, "instructions": f"{number} is odd. {'It is known. ' * 60}"} for number in range(400)]
    answered = counted(server, "octavo:decisions_questions_total")
    aborted = counted(server, "vllm:request_success_total", 'finished_reason="abort"')
    body = json.dumps({"input": INPUT, "questions": questions}).encode()
    lines = ("POST /v1/decisions HTTP/1.1", "host: x", "content-type: application/json", f"content-length: {len(body)}")
    head = "\r\n".join([*lines, "", ""])
    with server.connect() as connection:
        connection.sendall(head.encode() + body)
        wait_until(lambda: counted(server, "vllm:num_requests_running") > 0)
    wait_until(lambda: counted(server, "vllm:request_success_total", 'finished_reason="abort"') > aborted)
    finished = counted(server, "vllm:request_success_total")
    client_ = server.client()
    assert len(client_.decisions.create(model="tiny", input=INPUT, questions=[BROKEN]).answers) == 1
    assert counted(server, "vllm:request_success_total") == finished + 1  # no read of the other went on
    assert counted(server, "octavo:decisions_questions_total") == answered + 1
    wait_until(lambda: counted(server, "vllm:num_requests_running") == 0)


def wait_until(true, seconds=20):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_named_tokens_have_the_log_probabilities_that_the_whole_vocabulary_has(llm):
    ids = [7, 300, 12, 41]
    prompts = [{"prompt_token_ids": [5, 6, at]} for at in range(3)]
    options = {"temperature": 0, "max_tokens": 3, "ignore_eos": True}
    whole = llm.generate(prompts, SamplingParams(**options, logprobs=-1), use_tqdm=False)
    params = [
        SamplingParams(**options, logprob_token_ids=ids),
        SamplingParams(**options, logprobs=2),
        SamplingParams(**options),
    ]
    named, best, plain = llm.generate(prompts, params, use_tqdm=False)
    for at, found in enumerate(named.outputs[0].logprobs):
        expected = whole[0].outputs[0].logprobs[at]
        sampled = named.outputs[0].token_ids[at]
        assert next(iter(found)) == sampled and set(found) == {sampled, *ids}
        for token in ids:
            assert found[token].logprob == pytest.approx(expected[token].logprob, abs=1e-6)
            assert token == sampled or found[token].rank is None
    for at, found in enumerate(best.outputs[0].logprobs):
        assert list(found) == list(whole[1].outputs[0].logprobs[at])[: len(found)]
    assert plain.outputs[0].logprobs is None and plain.outputs[0].token_ids == whole[2].outputs[0].token_ids


@pytest.mark.parametrize("wrong", [{"logprob_token_ids": []}, {"logprob_token_ids": [1], "logprobs": 3}])
def test_named_tokens_must_make_sense(wrong):
    with pytest.raises(ValueError, match="logprob_token_ids"):
        SamplingParams(**wrong)


def test_a_named_token_must_be_one(llm):
    with pytest.raises(ValueError, match="logprob_token_ids"):
        llm.generate("x", SamplingParams(logprob_token_ids=[400]), use_tqdm=False)
