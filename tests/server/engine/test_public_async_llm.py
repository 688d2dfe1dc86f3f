"""`octavo.AsyncLLM`: streams, aborts and adapters of an engine in another process, against `octavo.LLM` in this one."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Coroutine, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import pytest
from support.adapters import save_adapter
from support.tiny_models import FAMILIES, make_model

import octavo
from octavo import AsyncEngineArgs, AsyncLLM, EngineArgs, LoRARequest, PoolingParams, RequestOutput, SamplingParams
from octavo.errors import ConfigError, EngineDeadError
from octavo.interface.block_map import count_blocks
from octavo.interface.sampling_params import RequestOutputKind
from octavo.interface.structured_output import StructuredOutputsParams

T = TypeVar("T")
SIZES: dict[str, Any] = {"max_model_len": 512, "num_gpu_blocks_override": 128, "max_num_seqs": 8}
PROMPTS = ["The capital of France is", "Water boils at", "Once upon a time, in a village by the sea,"]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=12, logprobs=2),
    SamplingParams(temperature=0.8, seed=7, max_tokens=10, n=2),
    SamplingParams(temperature=0, max_tokens=16, stop=["."]),
]


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def offline() -> octavo.LLM:
    return octavo.LLM(dtype="float32", quantization="none", **SIZES)


@pytest.fixture(scope="module")
def llm(loop: asyncio.Runner) -> Iterator[AsyncLLM]:
    made = AsyncLLM(dtype="float32", quantization="none", **SIZES)
    run(loop, made.wait_ready())
    yield made
    made.shutdown()


def run(loop: asyncio.Runner, work: Coroutine[Any, Any, T]) -> T:
    async def limited() -> T:
        return await asyncio.wait_for(work, 120)

    return loop.run(limited())


async def outputs(stream: AsyncIterator[T]) -> list[T]:
    return [output async for output in stream]


def told(output: RequestOutput) -> list[Any]:
    return [
        [(one.text, list(one.token_ids), one.finish_reason, one.stop_reason) for one in output.outputs],
        output.prompt_token_ids,
        [[{i: p.logprob for i, p in at.items()} for at in one.logprobs or []] for one in output.outputs],
    ]


def test_streams_end_as_the_answers_of_llm(llm: AsyncLLM, offline: octavo.LLM, loop: asyncio.Runner) -> None:
    """All at a time. In float32 an answer does not depend on its neighbours."""

    async def ask() -> list[list[RequestOutput]]:
        streams = [llm.generate(*pair) for pair in zip(PROMPTS, PARAMS, strict=True)]
        return await asyncio.gather(*map(outputs, streams))

    expected = offline.generate(PROMPTS, PARAMS, use_tqdm=False)
    for stream, answer in zip(run(loop, ask()), expected, strict=True):
        assert told(stream[-1]) == told(answer) and stream[-1].prompt == answer.prompt
        assert [one.finished for one in stream] == [False] * (len(stream) - 1) + [True]
        for before, after in pairwise(stream):
            for earlier, later in zip(before.outputs, after.outputs, strict=True):
                assert (
                    later.text.startswith(earlier.text)
                    and later.token_ids[: len(earlier.token_ids)] == earlier.token_ids
                )


@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY])
def test_streams_of_what_is_new_or_of_the_end(
    kind: RequestOutputKind, llm: AsyncLLM, offline: octavo.LLM, loop: asyncio.Runner
) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, output_kind=kind)
    stream = run(loop, outputs(llm.generate({"prompt": PROMPTS[0]}, params, "mine")))
    (answer,) = offline.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
    assert "".join(one.outputs[0].text for one in stream) == answer.outputs[0].text
    assert {one.request_id for one in stream} == {"mine"}
    assert len(stream) == 1 or kind is RequestOutputKind.DELTA


LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)


async def until_free(llm: AsyncLLM) -> None:
    """Wait until no sequence holds a block. The limit on the whole test is the only one."""
    engine = await llm._started()
    while count_blocks(engine.client.read_block_map()).used:
        await asyncio.sleep(0.02)


def test_an_abort_ends_the_stream_and_frees_the_blocks(llm: AsyncLLM, loop: asyncio.Runner) -> None:
    async def ask() -> RequestOutput:
        engine = await llm._started()
        last = None
        async for output in llm.generate(PROMPTS[2], LONG, "long"):
            if last is None:
                held = await engine.client.block_ids("long")
                assert sum(map(len, held)) > 0 and count_blocks(engine.client.read_block_map()).used
                await llm.abort("long")
            last = output
        assert not any(await engine.client.block_ids("long"))
        await until_free(llm)
        assert last is not None
        return last

    output = run(loop, ask())
    assert output.finished and output.outputs[0].finish_reason == "abort" and len(output.outputs[0].token_ids) < 400
    run(loop, llm.abort(["long", "never heard of"]))


@pytest.mark.parametrize("leave", ["break", "cancel"])
def test_a_reader_that_leaves_ends_its_request(leave: str, llm: AsyncLLM, loop: asyncio.Runner) -> None:
    async def read(begun: asyncio.Event) -> None:
        stream = llm.generate(PROMPTS[1], LONG)
        async for _ in stream:
            begun.set()
            if leave == "break":
                break
        await stream.aclose()

    async def ask() -> None:
        begun = asyncio.Event()
        task = asyncio.create_task(read(begun))
        await begun.wait()
        if leave == "cancel":
            task.cancel()
        await asyncio.wait([task])
        assert not (await llm._started()).output_processor.requests
        await until_free(llm)

    run(loop, ask())


def test_vectors_are_those_of_llm(llm: AsyncLLM, offline: octavo.LLM, loop: asyncio.Runner) -> None:
    params = PoolingParams(pooling="mean")
    (output,) = run(loop, outputs(llm.encode(PROMPTS[0], params)))
    (expected,) = offline.encode(PROMPTS[0], params, use_tqdm=False)
    assert output.outputs.data.tolist() == pytest.approx(expected.outputs.data.tolist(), abs=1e-6)
    assert output.prompt_token_ids == expected.prompt_token_ids and output.finished


def test_mistakes_of_a_request_are_its_readers(llm: AsyncLLM, loop: asyncio.Runner) -> None:
    wrong = [
        ({"prompt_token_ids": [10**9]}, None, "prompt"),
        (PROMPTS[0], SamplingParams(max_tokens=4, logprobs=10**6), "logprobs"),
        (PROMPTS[0], SamplingParams(structured_outputs=StructuredOutputsParams(regex="(")), "structured_outputs.regex"),
    ]
    for prompt, params, field in wrong:
        with pytest.raises(ValueError, match=field):
            run(loop, outputs(llm.generate(prompt, params)))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="enable_lora"):
        run(loop, outputs(llm.generate(PROMPTS[0], lora_request=LoRARequest("a", 1, "/nowhere"))))
    with pytest.raises(ValueError, match="pooling_task"):
        run(loop, outputs(llm.encode(PROMPTS[0], pooling_task="token_embed")))
    with pytest.raises(RuntimeError, match="event loop"):
        asyncio.run(llm.wait_ready())
    run(loop, llm.check_health())
    assert llm.is_running and not llm.errored


def test_what_it_is(llm: AsyncLLM, offline: octavo.LLM, loop: asyncio.Runner) -> None:
    assert run(loop, llm.get_model_config()).max_model_len == 512
    assert run(loop, llm.get_tokenizer()).encode(PROMPTS[0]) == offline.get_tokenizer().encode(PROMPTS[0])
    assert run(loop, llm.get_default_sampling_params()) == offline.get_default_sampling_params()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    config_class, settings = FAMILIES["llama"]
    model = make_model(config_class, settings)
    model.save_pretrained(folder / "model")
    for seed in (1, 2):
        save_adapter(folder / f"a{seed}", model, seed, r=8, lora_alpha=64, target_modules="all-linear")
    return folder


def test_adapters_answer_as_in_llm_beside_each_other(tiny: Path) -> None:
    options: dict[str, Any] = {"dtype": "float32", "enable_lora": True, "max_loras": 2, "skip_tokenizer_init": True}
    asked = [None, *(LoRARequest(name, 1, str(tiny / name)) for name in ("a1", "a2"))]
    prompt, params = (
        {"prompt_token_ids": [5, 17, 200, 31]},
        SamplingParams(temperature=0, max_tokens=8, ignore_eos=True),
    )

    async def ask() -> list[list[RequestOutput]]:
        async with AsyncLLM.from_engine_args(AsyncEngineArgs(str(tiny / "model"), **options)) as llm:
            await llm.add_lora(LoRARequest("a1", 1, str(tiny / "a1")))
            with pytest.raises(octavo.errors.ModelError):
                await llm.add_lora(LoRARequest("none", 3, str(tiny / "nowhere")))
            return await asyncio.gather(*(outputs(llm.generate(prompt, params, lora_request=one)) for one in asked))

    reference = octavo.LLM(str(tiny / "model"), **options)
    expected = reference.generate([prompt] * 3, params, lora_request=asked, use_tqdm=False)
    found = [stream[-1].outputs[0].token_ids for stream in asyncio.run(ask())]
    assert found == [output.outputs[0].token_ids for output in expected]


def test_arguments_are_those_of_llm(tiny: Path) -> None:
    with pytest.raises(TypeError, match=r"AsyncEngineArgs\(\) got .*'max_modellen'; did you mean max_model_len"):
        AsyncLLM(max_modellen=4)
    with pytest.raises(ConfigError, match="middleware"):
        AsyncEngineArgs(str(tiny / "model"), middleware=["x"])
    with pytest.raises(ConfigError, match="enable_log_requests"):
        AsyncEngineArgs(enable_log_requests=True)
    args = AsyncEngineArgs(
        str(tiny / "model"), swap_space=None, disable_log_requests=True, max_logprobs=3, dtype="half"
    )
    assert args.dtype == "half" and args.options.max_logprobs == 3 and isinstance(args, EngineArgs)
    assert octavo.AsyncLLMEngine is AsyncLLM


def test_an_engine_that_ends_is_said_to_every_reader(tiny: Path) -> None:
    async def ask() -> None:
        args = EngineArgs(str(tiny / "model"), dtype="float32", skip_tokenizer_init=True)
        llm = AsyncLLM.from_engine_args(args)
        stream = llm.generate(
            {"prompt_token_ids": [1, 2]}, SamplingParams(max_tokens=400, ignore_eos=True, temperature=0)
        )
        await anext(stream)
        llm._process.process.send_signal(signal.SIGKILL)  # type: ignore[union-attr]
        with pytest.raises(EngineDeadError):
            async for _ in stream:
                pass
        with pytest.raises(EngineDeadError):
            await llm.check_health()
        assert llm.errored and not llm.is_running
        llm.shutdown()
        llm.shutdown()
        with pytest.raises(EngineDeadError, match="shut down"):
            await anext(llm.generate({"prompt_token_ids": [1]}))

    asyncio.run(asyncio.wait_for(ask(), 120))


def test_it_needs_no_package_of_the_server_but_msgspec(tiny: Path) -> None:
    """And `octavo` alone, which names it, not even that."""
    program = f"""
import asyncio, sys

class Absent:
    names = {{"fastapi", "starlette", "pydantic", "zmq", "gguf", "uvicorn", "uvloop", "prometheus_client",
             "transformers", "httpx", "openai", "rich"}}
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Absent())
from octavo import AsyncLLM, SamplingParams
assert "msgspec" not in sys.modules

async def main():
    async with AsyncLLM({str(tiny / "model")!r}, skip_tokenizer_init=True) as llm:
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        async for output in llm.generate({{"prompt_token_ids": [5, 6, 7]}}, params):
            pass
        print(len(output.outputs[0].token_ids))

asyncio.run(main())
from octavo.engine import async_llm_engine
async_llm_engine.find_spec = lambda name: None
try:
    AsyncLLM()
except ValueError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    count, refusal = done.stdout.splitlines()
    assert count == "3" and "pip install msgspec" in refusal
