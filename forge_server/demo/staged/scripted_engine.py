"""An engine whose policy is the scripted teacher: it answers chat completions as vLLM does, ids and
logprobs included.

Prompts are rendered with the model's own chat template and tokenised with its own tokenizer, and a
completion's ids are those by which the rendered conversation goes on; so what the proxy records of the
teacher is exactly what it would record of the model. A scripted token is certain: its logprob is 0. It
offers no weight updates.

    python -m forge_server.demo.staged.scripted_engine MODEL_FOLDER URL_FILE HASTY_SHARE

It listens on any free port of the loopback and writes its URL to URL_FILE.
"""

import json
import socket
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import uvicorn
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from forge_server.demo.staged.teacher import reply

MODEL = "forge"
Send = Callable[[dict[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[dict[str, Any]]]


class ScriptedEngine:
    """The ASGI application."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, hasty_share: float) -> None:
        self.tokenizer = tokenizer
        self.hasty_share = hasty_share

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        body = b""
        while (event := await receive())["type"] == "http.request":
            body += event.get("body", b"")
            if not event.get("more_body"):
                break
        status, answer = self.answer(scope["method"], scope["path"], body)
        data = json.dumps(answer).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": data})

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
        """Status and JSON of one request."""
        match method, path:
            case "GET", "/health":
                return 200, {}
            case "GET", "/version":
                return 200, {"version": "scripted"}
            case "GET", "/v1/models":
                entry = {"id": MODEL, "object": "model", "owned_by": "demo", "max_model_len": 512}
                return 200, {"object": "list", "data": [entry]}
            case "POST", "/v1/chat/completions":
                try:
                    return 200, self.chat(json.loads(body))
                except (ValueError, KeyError, IndexError, TypeError) as error:
                    return 400, {"error": {"message": str(error), "type": "BadRequestError", "code": 400}}
        return 404, {"error": {"message": "Not Found", "type": "NotFoundError", "code": 404}}

    def chat(self, request: dict[str, Any]) -> dict[str, Any]:
        """One chat completion. Raises ValueError when the teacher has no answer."""
        messages, tools = request["messages"], request.get("tools")
        message = reply(messages, request.get("seed") or 0, self.hasty_share)
        prompt = self._ids(messages, tools, prompt=True)
        conversation = self._ids([*messages, message], tools, prompt=False)
        if conversation[: len(prompt)] != prompt:
            raise ValueError("the chat template does not preserve prefixes")
        completion = conversation[len(prompt) :]
        tokens = self.tokenizer.convert_ids_to_tokens(completion)
        logprobs = [{"token": token, "logprob": 0.0, "bytes": None, "top_logprobs": []} for token in tokens]
        choice = {
            "index": 0,
            "message": message,
            "logprobs": {"content": logprobs},
            "finish_reason": "tool_calls",
            "token_ids": completion,
        }
        usage = {
            "prompt_tokens": len(prompt),
            "completion_tokens": len(completion),
            "total_tokens": len(conversation),
        }
        return {
            "id": "chatcmpl-scripted",
            "object": "chat.completion",
            "created": 0,
            "model": MODEL,
            "choices": [choice],
            "usage": usage,
            "prompt_token_ids": prompt,
        }

    def _ids(self, messages: list[dict[str, Any]], tools: Any, *, prompt: bool) -> list[int]:
        text = self.tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=prompt
        )
        ids: list[int] = self.tokenizer(text, add_special_tokens=False).input_ids
        return ids


def main() -> None:
    folder, url_file, share = sys.argv[1:]
    engine = ScriptedEngine(AutoTokenizer.from_pretrained(folder), float(share))
    listening = socket.create_server(("127.0.0.1", 0))
    part = Path(f"{url_file}.part")
    part.write_text(f"http://127.0.0.1:{listening.getsockname()[1]}\n")
    part.rename(url_file)
    uvicorn.Server(uvicorn.Config(engine, log_level="warning", access_log=False)).run(sockets=[listening])


if __name__ == "__main__":
    main()
