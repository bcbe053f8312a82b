"""Agents for the tests: each asks the policy once, unless `ROLL_TASK` or the first word says what it does instead.

Standard library alone, so that one starts in a moment.
"""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.error
import urllib.request


def post(url, body, key, timeout=60):
    """Status and JSON of the answer."""
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=timeout) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read() or b"{}")


def ask(base_url, api_key, text="a="):
    """What the policy says to a message."""
    body = {"model": "policy", "messages": [{"role": "user", "content": text}]}
    status, answer = post(f"{base_url}/chat/completions", body, api_key)
    assert status == 200, (status, answer)
    return answer["choices"][0]["message"]["content"]


def lower(task, base_url, api_key):
    """Pays for a lower-case letter."""
    said = ask(base_url, api_key)
    return {"reward": float(said[:1].islower()), "success": said[:1].islower(), "parts": {"length": float(len(said))}}


def ask_only(task, base_url, api_key):
    """Leaves the reward to others."""
    ask(base_url, api_key, task["word"])


def raises(task, base_url, api_key):
    raise KeyError("question")


async def lower_async(task, base_url, api_key):
    """The same."""
    return lower(task, base_url, api_key)


def main(what):
    """Play one episode as a program."""
    base_url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
    if what == "never":
        return 0
    if what == "never fails":
        return 5
    said = ask(base_url, key)
    if what == "hangs":
        time.sleep(600)
    if what == "forks":
        for _ in range(3):
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    time.sleep(600)
                os._exit(0)
        time.sleep(600)
    if what == "crashes":
        os.abort()
    if what == "exits 3":
        return 3
    if what == "floods":
        for _ in range(400):
            sys.stdout.write("x" * 10_000 + "\n")
    if what == "prints nan":
        sys.stdout.write('{"reward": NaN}\n')
        return 0
    if what == "prints nothing":
        return 0
    if what == "scores twice":
        first, again = (post(f"{base_url}/score", {"reward": reward}, key)[0] for reward in (0.25, 0.5))
        assert (first, again) == (200, 409), (first, again)
        return 0
    if what == "scores nan":
        headers = {"Authorization": f"Bearer {key}"}
        request = urllib.request.Request(f"{base_url}/score", b'{"reward": NaN}', headers)
        code = 200
        try:
            urllib.request.urlopen(request)
        except urllib.error.HTTPError as error:
            code = error.code
        assert code == 400, code
        return 0
    if what == "scores another":
        other = base_url.replace("/s/", "/s/0")
        assert post(f"{other}/score", {"reward": 1.0}, key)[0] in (401, 404)
        assert post(f"{base_url}/score", {"reward": 1.0}, "another key")[0] == 401
        return 0
    if what == "asks for ever":
        while True:
            ask(base_url, key)
    if what == "asks on":  # as clients do that take any 429 for a busy service
        while True:
            body = {"model": "policy", "messages": [{"role": "user", "content": "a="}]}
            if post(f"{base_url}/chat/completions", body, key)[0] != 200:
                time.sleep(1)
    if what == "sleeps":
        post(f"{base_url}/chat/completions", {"model": "policy", "messages": [{"role": "user", "content": "a="}]}, key)
        time.sleep(600)
    if what == "scores and asks on":
        post(f"{base_url}/score", {"reward": 0.75}, key)
        main("asks on")
    if what == "asks too much":
        ask(base_url, key, "a" * 1000)
    if what == "asks too much again":
        body = {"model": "policy", "messages": [{"role": "user", "content": "a" * 1000}]}
        while post(f"{base_url}/chat/completions", body, key)[0] == 400:
            time.sleep(1)
    if what == "disconnects":
        import socket
        from urllib.parse import urlsplit

        address = urlsplit(base_url)
        body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "b="}]}).encode()
        with socket.create_connection((address.hostname, address.port)) as connection:
            head = f"POST {address.path}/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        ask(base_url, key)
    if what == "lives on" and os.fork() == 0:
        os.setsid()
        time.sleep(600)
        os._exit(0)
    if what == "tries to get out":
        import socket
        from urllib.parse import urlsplit

        open(f"{os.environ['ROLL_WORKSPACE']}/mine", "w").close()
        port = urlsplit(base_url).port
        attempts = {
            "write beside": lambda: os.close(os.open(f"{__file__}.new", os.O_CREAT | os.O_WRONLY)),
            "write to /tmp": lambda: os.close(os.open("/tmp/roll-was-here", os.O_CREAT | os.O_WRONLY)),
            "read elsewhere": lambda: os.listdir(os.environ["FORBIDDEN"]),
            "another port": lambda: socket.create_connection(("127.0.0.1", int(os.environ["OTHER_PORT"])), timeout=2),
        }
        out = []
        for name, attempt in attempts.items():
            try:
                attempt()
                out.append(name)
            except OSError:
                pass
        assert not out, (out, port)
    if what == "secret":
        assert "MY_SECRET_TOKEN" not in os.environ, "a secret was passed on"
    sys.stdout.write(json.dumps({"reward": float(said[:1].islower())}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(" ".join(sys.argv[1:])))
