"""Operations are answered without the framework's router, which finds everything else."""

from server.endpoints import OPERATIONS


async def test_operations_are_called_without_the_router(app, client, monkeypatch) -> None:
    asked = []

    async def router(scope, receive, send) -> None:
        asked.append((scope["method"], scope["path"]))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body"})

    monkeypatch.setattr(app.router, "middleware_stack", router)
    for path in OPERATIONS:
        assert (await client.post(path, content=b"[]")).status_code == 400, path
    assert asked == []
    for method, path in (("GET", "/v1/chat/completions"), ("POST", "/tokenize")):
        await client.request(method, path)
        assert asked.pop() == (method, path)
