"""Files, batches and background responses by the OpenAI SDK, on a real server, through a kill and restart."""

import io
import json
import shutil
import signal
import time
from pathlib import Path

import openai
import pytest

from tests.e2e.serving import running_server

pytestmark = pytest.mark.night

NUM_LINES = 10
ENDPOINT = "/v1/chat/completions"


def line(number: int, **body: object) -> str:
    messages = [{"role": "user", "content": f"Count to {number % 9 + 2}."}]
    fields = {"model": "tokenyard-demo", "messages": messages, "max_tokens": 30, "temperature": 0, **body}
    return json.dumps({"custom_id": f"line-{number}", "method": "POST", "url": ENDPOINT, "body": fields})


def client_of(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)


def upload(client: openai.OpenAI, *lines: str) -> str:
    data = io.BytesIO("\n".join(lines).encode())
    data.name = "requests.jsonl"
    return client.files.create(file=data, purpose="batch").id


def ended(client: openai.OpenAI, batch_id: str) -> openai.types.Batch:
    deadline_s = time.monotonic() + 120
    while time.monotonic() < deadline_s:
        batch = client.batches.retrieve(batch_id)
        if batch.status in ("completed", "failed", "cancelled", "expired"):
            return batch
        time.sleep(0.2)
    pytest.fail("the batch does not end")


def answers(client: openai.OpenAI, file_id: str) -> list[dict]:
    return [json.loads(text) for text in client.files.content(file_id).text.splitlines()]


def test_a_kill_in_the_middle_of_a_batch_loses_and_repeats_nothing(tmp_path: Path) -> None:
    state = tmp_path / "state"
    options = ("--state-folder", str(state), "--scheduling-policy", "priority", "--max-num-seqs", "2")
    first_folder, second_folder = tmp_path / "first", tmp_path / "second"
    first_folder.mkdir()
    second_folder.mkdir()
    with running_server(first_folder, *options) as server:
        client = client_of(server.url)
        bad = line(99, temperature=-5)
        file_id = upload(client, *[line(number) for number in range(NUM_LINES)], bad)
        batch = client.batches.create(
            input_file_id=file_id, endpoint=ENDPOINT, completion_window="24h", metadata={"a": "b"}
        )
        assert batch.status == "validating"
        while client.batches.retrieve(batch.id).request_counts.completed < 3:
            time.sleep(0.02)
        unseen = client.responses.create(model="tokenyard-demo", input="Count to 5.", background=True)
        assert unseen.status == "queued"
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
        for folder in first_folder.glob("tokenyard-*"):  # what a killed process cannot remove
            shutil.rmtree(folder)
    with running_server(second_folder, *options) as server:
        client = client_of(server.url)
        assert client.batches.retrieve(batch.id).request_counts.completed >= 3
        done = ended(client, batch.id)
        assert (done.status, done.metadata) == ("completed", {"a": "b"})
        assert done.request_counts.model_dump() == {
            "total": NUM_LINES + 1,
            "completed": NUM_LINES,
            "failed": 1,
        }
        found = answers(client, done.output_file_id)
        assert [one["custom_id"] for one in found] == [f"line-{number}" for number in range(NUM_LINES)]
        assert all(one["response"]["body"]["choices"][0]["message"]["content"] for one in found)
        (failed,) = answers(client, done.error_file_id)
        assert failed["custom_id"] == "line-99"
        assert failed["response"]["status_code"] == 400
        assert [one.id for one in client.batches.list(limit=1)] == [batch.id]
        names = {file.filename for file in client.files.list()}
        assert names == {"requests.jsonl", f"{batch.id}_output.jsonl", f"{batch.id}_error.jsonl"}
        assert client.files.delete(file_id).deleted
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(file_id)
        made_again(client, unseen.id)
        cancelled(client)
        refused(client)


def made_again(client: openai.OpenAI, response_id: str) -> None:
    deadline_s = time.monotonic() + 60
    while client.responses.retrieve(response_id).status in ("queued", "in_progress"):
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
    response = client.responses.retrieve(response_id)
    assert response.output_text
    following = client.responses.create(
        model="tokenyard-demo",
        input="And to 6?",
        previous_response_id=response_id,
        background=True,
        stream=True,
    )
    begun = next(iter(following)).response
    following.close()
    events = list(client.responses.retrieve(begun.id, stream=True, starting_after=0))
    assert [event.sequence_number for event in events] == list(range(1, len(events) + 1))
    assert events[-1].type in ("response.completed", "response.incomplete")


def cancelled(client: openai.OpenAI) -> None:
    file_id = upload(client, *[line(number, max_tokens=500) for number in range(200)])
    batch = client.batches.create(input_file_id=file_id, endpoint=ENDPOINT, completion_window="24h")
    with pytest.raises(openai.BadRequestError, match="cancel it first"):
        client.files.delete(file_id)
    client.batches.cancel(batch.id)
    done = ended(client, batch.id)
    assert done.status == "cancelled"
    assert done.request_counts.completed < 200
    # The server is free for the next one.
    assert client.chat.completions.create(
        model="tokenyard-demo", messages=[{"role": "user", "content": "Hello"}], max_tokens=4
    )


def refused(client: openai.OpenAI) -> None:
    file_id = upload(client, line(1), line(1))
    batch = client.batches.create(input_file_id=file_id, endpoint=ENDPOINT, completion_window="24h")
    done = ended(client, batch.id)
    assert done.status == "failed"
    assert "twice" in done.errors.data[0].message
    with pytest.raises(openai.BadRequestError, match="no file"):
        client.batches.create(input_file_id="file-x", endpoint=ENDPOINT, completion_window="24h")
