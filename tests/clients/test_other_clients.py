"""Other clients take us for OpenAI, Anthropic's for Anthropic, Ollama's for Ollama."""

import shutil

import pytest

from tests.clients.conftest import HERE, run

pytestmark = pytest.mark.night


def test_litellm_streams_what_it_gets_whole_and_knows_our_errors(demo_server, python):
    said = run(python, HERE / "call_litellm.py", url=demo_server.url)
    assert said["whole"] == said["streamed"] == "3, 4, 5, 6, 7, 8"
    assert said["whole_tokens"] == said["streamed_tokens"] > 0
    assert "temperature" in said["error"]


def test_langchain_streams_what_it_gets_whole(demo_server, python):
    said = run(python, HERE / "call_langchain.py", url=demo_server.url)
    assert said["whole"] == said["streamed"] == "3, 4, 5, 6, 7, 8"
    assert said["whole_tokens"] == said["streamed_tokens"] > 0
    assert said["num_chunks"] > 3


def test_anthropics_sdk_streams_what_it_gets_whole_and_reads_calls_and_errors(demo_server, python):
    said = run(python, HERE / "call_anthropic.py", url=demo_server.url)
    assert said["whole"] == said["pieces"] == said["streamed"] == "3, 4, 5, 6, 7, 8"
    assert said["usage"][0] == said["usage"][1] > 0
    assert said["stop_reasons"] == ["end_turn", "end_turn", "tool_use"]
    assert said["unit"] in ("C", "F")
    assert said["num_counted"] > 0
    assert said["refusal"] == ["NotFoundError", "not_found_error"]


def test_ollamas_client_streams_what_it_gets_whole_and_finds_the_model(demo_server, python):
    said = run(python, HERE / "call_ollama.py", url=demo_server.url)
    assert said["whole"] == said["streamed"] == said["generated"] == "3, 4, 5, 6, 7, 8"
    assert said["num_tokens"][0] == said["num_tokens"][1] > 0
    assert said["models"] == ["tokenyard-demo"]
    assert "completion" in said["capabilities"]
    assert said["status"] == 404


def test_the_node_sdk_streams_fails_and_aborts_as_with_openai(demo_server, node):
    script = shutil.copy(HERE / "call_openai.mjs", node)  # Node looks for packages beside the script
    said = run("node", script, url=demo_server.url)
    assert said["whole"] == said["streamed"] == said["helper"] == "3, 4, 5, 6, 7, 8"
    assert said["usage"]
    assert said["completion_tokens"] == 4
    assert said["bad_value"] == {"name": "BadRequestError", "status": 400, "param": "temperature", "id": True}
    assert said["no_model"]["name"] == "NotFoundError"
    assert said["tool"] == {"name": "weather", "unit": said["tool"]["unit"], "id": True}
    assert said["tool"]["unit"] in ("C", "F")
    assert said["response"] == ["3, 4, 5, 6, 7, 8", "3, 4, 5, 6, 7, 8", "completed"]
    assert 3 <= said["chunks_before_abort"] < 20, "what had arrived already, and no more"
    assert said["models"] == ["tokenyard-demo"]
    demo_server.wait_until_idle()
