"""A stand-in for vLLM with token ids in and out, for ``splice.py``: every word ``w123`` is token 123.

    python benchmarks/splice_upstream.py PORT COMPLETION

Answers are ``COMPLETION`` tokens at random; a rendered history holds them as they were sampled.
"""

import asyncio
import json
import random
import sys

START, END, NEWLINE = 1, 2, 3
ROLES = {"system": 4, "user": 5, "assistant": 6, "tool": 7}


class Upstream:
    def __init__(self, completion: int) -> None:
        self.completion = completion
        self.rng = random.Random(7)
        self.said: dict[
            str, list[int]
        ] = {}  # words -> ids, so that a history is not tokenised again and again

    def ids(self, text: str) -> list[int]:
        known = self.said.get(text)
        if known is None:
            known = self.said[text] = [int(word[1:]) for word in text.split()]
        return known

    def render(self, body: dict) -> dict:
        out: list[int] = []
        for message in body["messages"]:
            out += [START, ROLES[message["role"]], *self.ids(message["content"] or ""), END, NEWLINE]
        out += [START, ROLES["assistant"]]
        sampling = {"temperature": 1.0, "max_tokens": 16, "logprobs": 0, "skip_special_tokens": False}
        return {"request_id": "x", "token_ids": out, "token_offsets": None, "sampling_params": sampling}

    def generate(self, prompt: int) -> dict:
        ids = [self.rng.randrange(1000, 151_000) for _ in range(self.completion - 1)] + [END]
        text = " ".join(f"w{i}" for i in ids[:-1])
        self.said[text] = ids[:-1]
        content = [
            {
                "token": f"w{i}",
                "logprob": -0.5,
                "bytes": [119, 49],
                "top_logprobs": [{"token": "w", "logprob": -0.5}],
            }
            for i in ids
        ]
        choice = {
            "index": 0,
            "finish_reason": "stop",
            "stop_reason": None,
            "token_ids": ids,
            "weight_versions": [{"version": "forge-0-", "start": 0, "end": len(ids)}],
            "text": text,
            "logprobs": {"content": content},
        }
        usage = {"prompt_tokens": prompt, "completion_tokens": len(ids)}
        return {"request_id": "x", "model": "forge", "usage": usage, "choices": [choice]}

    def derender(self, body: dict) -> dict:
        ids = body["generate_response"]["choices"][0]["token_ids"]
        message = {"role": "assistant", "content": " ".join(f"w{i}" for i in ids), "tool_calls": []}
        return {"id": "x", "choices": [{"index": 0, "message": message}], "usage": {}}

    def answer(self, path: str, body: bytes) -> dict:
        if path.endswith("/derender"):
            return self.derender(json.loads(body))
        if path.endswith("/render"):
            return self.render(json.loads(body))
        start = body.rindex(b'"token_ids":[')
        return self.generate(body.count(b",", start, body.index(b"]", start)) + 1)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                size = int(head.lower().split("content-length:")[1].split("\r\n")[0])
                body = await reader.readexactly(size)
                answer = json.dumps(self.answer(head.split(" ")[1], body), separators=(",", ":")).encode()
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(answer) + answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()


async def main(port: str, completion: str) -> None:
    upstream = Upstream(int(completion))
    server = await asyncio.start_server(upstream.serve, "127.0.0.1", int(port), limit=1 << 26)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
