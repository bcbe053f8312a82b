"""A small HTTP service that tells log-probs of a prompt with a real model, as vLLM's and SGLang's servers do."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from preferences import policy_in


class TeacherService(ThreadingHTTPServer):
    """Replies by `/v1/completions`. `plan`: (status, body) to give first, one per request; status 0 hangs."""

    def __init__(self, model: Path) -> None:
        self.model = policy_in(model)
        self.plan: list[tuple[int, str]] = []
        self.seen: list[tuple[dict[str, Any], str | None]] = []
        self.hold = threading.Event()
        self.writes_ids = True
        """Of `echo`: tokens are written as `token_id:7`."""
        self.prefix: tuple[int, ...] = ()
        """Tokens that it puts before every prompt, as a tokenizer of its own would."""
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    def keys(self, role: str = "teacher", **more: Any) -> tuple[str, ...]:
        """Overrides that put this teacher here."""
        options = {"endpoint": self.address, "model": "m", "retry_delay_s": 0.01, **more}
        place = f"+{role}.strategy_args={{strategy_name: endpoint, strategy_config: {json.dumps(options)}}}"
        return (place.replace('"', ""),)

    def reply(self, body: dict[str, Any]) -> dict[str, Any]:
        ids = [*self.prefix, *(body["prompt"] if "prompt" in body else body["input_ids"])]
        with torch.no_grad():
            table = self.model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
        if "input_ids" in body:
            return self._sglang(ids, table, body["top_logprobs_num"])
        echo = body.get("echo", False)
        k = body["logprobs"] if echo else body["prompt_logprobs"]
        choice = self._echo(ids, table, k) if echo else self._prompt_logprobs(ids, table, k)
        return {"choices": [{"text": "x", **choice}], "usage": {"prompt_tokens": len(ids)}}

    def _sglang(self, ids: list[int], table: torch.Tensor, k: int) -> dict[str, Any]:
        own = [[float(table[place, token]), token, None] for place, token in enumerate(ids[1:])]
        top = [[[float(line[i]), i, None] for i in line.topk(k).indices.tolist()] for line in table[:-1]]
        found = {"input_token_logprobs": [[None, ids[0], None], *own]}
        return {"text": "x", "meta_info": {**found, **({"input_top_logprobs": [None, *top]} if k else {})}}

    def _prompt_logprobs(self, ids: list[int], table: torch.Tensor, k: int) -> dict[str, Any]:
        found: list[Any] = [None]
        for place, token in enumerate(ids[1:]):
            top = table[place].topk(k).indices.tolist()
            found.append({str(i): {"logprob": float(table[place, i]), "rank": 1} for i in {*top, token}})
        return {"prompt_logprobs": found}

    def _echo(self, ids: list[int], table: torch.Tensor, k: int) -> dict[str, Any]:
        def name(token: int) -> str:
            return f"token_id:{token}" if self.writes_ids else chr(97 + token % 26)

        answer = int(table[-1].argmax())
        top = [{name(i): float(line[i]) for i in line.topk(k).indices.tolist()} for line in table]
        values = [float(table[place, token]) for place, token in enumerate([*ids[1:], answer])]
        tokens = [name(token) for token in (*ids, answer)]
        return {"logprobs": {"tokens": tokens, "token_logprobs": [None, *values], "top_logprobs": [None, *top]}}


class _Handler(BaseHTTPRequestHandler):
    server: TeacherService
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((body, self.headers.get("Authorization")))
        status, text = self.server.plan.pop(0) if self.server.plan else (200, "")
        if status == 0:
            self.server.hold.wait(30)
            return
        data = (text or json.dumps(self.server.reply(body))).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@contextlib.contextmanager
def serving(model: Path) -> Iterator[TeacherService]:
    """Run the service in a thread until the end of the block."""
    with TeacherService(model) as service:
        thread = threading.Thread(target=service.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield service
        finally:
            service.hold.set()
            service.shutdown()
