"""Who is answered by the page's server, with what, and what a hostile run can't do to it."""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from recorded_run import group, row, write_run

pytest.importorskip("starlette")
testclient = pytest.importorskip("starlette.testclient")

from browser_page import served  # noqa: E402

from roll.workbench.view.api import Api  # noqa: E402
from roll.workbench.view.export import bundle, export_page  # noqa: E402
from roll.workbench.view.rows import BadQuery  # noqa: E402
from roll.workbench.view.runs import named_runs  # noqa: E402
from roll.workbench.view.server import STATIC, THIRD_PARTY, make_app, serve  # noqa: E402
from roll.workbench.view.visitors import cookie_name, is_loopback, is_of_this_user, users_are_known  # noqa: E402

HOSTILE = [
    "</script><script>document.title='owned'</script>",
    "<img src=x onerror=alert(1)>",
    "\x1b[31mred\x1b[0m \x07",
    "half a pair \ud800 and \udfff",
    "\u202egnp.exe \u2066 \u200b",
    "a" * 1_000_000,
    "\u2028\u2029 \x00 \ufeff",
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", {1: group("t:1", 1.0, 0.0)})


@pytest.fixture
def page(folder: Path):
    """A visitor on this machine."""
    return testclient.TestClient(make_app(Api(named_runs([folder]))), base_url="http://127.0.0.1:8265")


def test_the_page_and_its_files_come_with_a_policy_that_runs_only_its_own_scripts(page):
    for name in ("", "app.js", "style.css", "third_party/uplot/uPlot.iife.min.js"):
        answer = page.get(f"/{name}")
        assert answer.status_code == 200, name
        policy = answer.headers["content-security-policy"]
        assert "script-src 'self';" in policy and "unsafe" not in policy and "default-src 'none'" in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
    text = page.get("/").text
    assert not re.search(r"<script(?![^>]*\bsrc=)|\son\w+=|style=", text)
    assert page.get("/app.js").headers["content-type"].startswith("text/javascript")


@pytest.mark.parametrize(
    "path",
    [
        "/../setup.py",
        "/%2e%2e/api.py",
        "/static/app.js",
        "/third_party/../api.py",
        "/api/runs/0/../../x",
        "/favicon.ico",
    ],
)
def test_no_other_file_is_served(page, path):
    assert page.get(path).status_code == 404


@pytest.mark.parametrize(
    "path",
    ["../secret.png", "/etc/hostname", "logs/run.json/../../../secret.png", "link.png", "logs/metrics.jsonl", "",
     "agents.json", "notes.txt", "logs/run.json", "logs/profiler/agents.json.gz", "a\0.png", "logs", "x" * 5000],
)  # fmt: skip
def test_paths_outside_the_run_and_other_kinds_of_files_are_refused(page, folder, path):
    (folder.parent / "secret.png").write_bytes(b"secret")
    (folder / "link.png").symlink_to(folder.parent / "secret.png")
    (folder / "agents.json").write_text('{"token": "secret"}')
    (folder / "notes.txt").write_text("secret")
    (folder / "logs" / "profiler").mkdir()
    (folder / "logs" / "profiler" / "agents.json.gz").symlink_to(folder / "agents.json")
    answer = page.get("/api/runs/0/file", params={"path": path})
    assert answer.status_code == 404 and b"secret" not in answer.content.replace(b"there is no such file", b"")


def test_a_picture_of_the_run_is_sent(page, folder):
    (folder / "logs" / "picture.png").write_bytes(b"\x89PNG")
    answer = page.get("/api/runs/0/file", params={"path": "logs/picture.png"})
    assert (answer.status_code, answer.content) == (200, b"\x89PNG")


def test_profiles_of_steps_are_listed_and_saved(page, folder):
    (folder / "logs" / "profiler").mkdir()
    (folder / "logs" / "profiler" / "step-000001.controller.json.gz").write_bytes(b"\x1f\x8b")
    (path,) = page.get("/api/runs/0/traces").json()["traces"]
    assert path == "logs/profiler/step-000001.controller.json.gz"
    answer = page.get("/api/runs/0/file", params={"path": path})
    assert answer.content == b"\x1f\x8b" and "attachment" in answer.headers["content-disposition"]


def test_pictures_of_a_task_are_found_after_every_validation(tmp_path):
    folder = write_run(tmp_path / "run", {1: group("t:1", 1.0)})
    about = json.loads((folder / "logs" / "run.json").read_text())
    (folder / "logs" / "run.json").write_text(json.dumps(about | {"pictures": "../episodes"}))
    for step in (0, 5):
        place = folder / "episodes" / f"step-{step:06d}" / "t:1"
        place.mkdir(parents=True)
        (place / "episode.png").write_bytes(b"\x89PNG")
    found = Api(named_runs([folder])).answer("/api/runs/0/pictures", {"task": ["t:1"]})["pictures"]
    assert [one["path"] for one in found] == [f"episodes/step-{step:06d}/t:1/episode.png" for step in (0, 5)]
    assert Api(named_runs([folder])).answer("/api/runs/0/pictures", {"task": ["../../.."]}) == {"pictures": []}


def test_only_requests_that_name_this_machine_are_answered_without_a_token(folder):
    app = make_app(Api(named_runs([folder])))
    for host in ("evil.example:8265", "127.0.0.1.evil.example", "10.0.0.1", "localhost.evil.example"):
        assert testclient.TestClient(app, base_url=f"http://{host}").get("/api/runs").status_code == 403, host
    for host in ("localhost:8265", "127.0.0.1:1", "[::1]:8265"):
        assert testclient.TestClient(app, base_url=f"http://{host}").get("/api/runs").status_code == 200, host


def test_elsewhere_a_token_opens_the_page_once_and_a_cookie_keeps_it_open(folder):
    page = testclient.TestClient(make_app(Api(named_runs([folder])), token="s3cret"), base_url="http://node7:8265")
    for path in ("/", "/api/runs", "/app.js", "/?token=wrong", "/?token=", "/?token=%F0%9F%98%80"):
        assert page.get(path).status_code == 401, path
    assert page.get("/api/runs", headers={"Authorization": "Bearer s3cret"}).status_code == 200
    opened = page.get("/?token=s3cret", follow_redirects=False)
    assert opened.status_code == 303 and opened.headers["location"] == "/"
    assert "HttpOnly" in opened.headers["set-cookie"] and "samesite=strict" in opened.headers["set-cookie"].lower()
    assert page.cookies[cookie_name(8265)] == "s3cret" and page.get("/api/runs").status_code == 200


@pytest.mark.skipif(not users_are_known(), reason="this system doesn't tell whose a connection is")
def test_another_user_of_this_machine_is_refused_without_the_token(folder, monkeypatch):
    address = served([folder])
    with urllib.request.urlopen(f"{address}api/runs") as answer:
        assert answer.status == 200  # the page's own user needs no token
    request = "import encodings.idna, os, sys, urllib.request as r; os.setuid(65534); r.urlopen(sys.argv[1])"
    if os.geteuid() == 0:
        command = [sys.executable, "-c", request, f"{address}api/runs"]
        other = subprocess.run(command, capture_output=True, text=True)
        assert "HTTP Error 401" in other.stderr
    else:
        monkeypatch.setattr("roll.workbench.view.visitors.os.geteuid", lambda: os.getuid() + 1)
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"{address}api/runs")
    with urllib.request.urlopen(f"{address}?token=unused") as answer:
        assert answer.status == 200


def test_a_page_of_another_site_gets_nothing_although_it_runs_in_the_users_browser(folder):
    address = served([folder])
    request = urllib.request.Request(f"{address}api/runs", headers={"Host": "evil.example:8265"})
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(request)
    forged = urllib.request.Request(f"{address}api/runs", headers={"X-Forwarded-For": "127.0.0.1"})
    assert urllib.request.urlopen(forged).status == 200  # such headers change nothing


def test_whose_a_connection_is_needs_both_of_its_ends():
    if not users_are_known():
        pytest.skip("this system doesn't tell whose a connection is")
    listening = socket.create_server(("::1", 0), family=socket.AF_INET6)
    with listening, socket.create_connection(listening.getsockname()[:2]) as client:
        ends = client.getsockname()[:2], listening.getsockname()[:2]
        assert is_of_this_user(*ends)
        assert not is_of_this_user((ends[0][0], 1), ends[1]) and not is_of_this_user(ends[0], ("::1", 1))
        assert not is_of_this_user(None, ends[1]) and not is_of_this_user(("testclient", 50000), ends[1])


def test_the_page_only_reads(page):
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert page.request(method, "/api/runs").status_code == 405


def test_bad_requests_are_answered_as_json(page):
    answer = page.get("/api/runs/0/rows?min_reward=x")
    assert answer.status_code == 400 and "no number" in answer.json()["error"]
    assert page.get("/api/runs/7/state").status_code == 400
    assert page.get("/api/runs/\u0664/state").status_code == 400
    assert page.get("/api/nothing").status_code == 404


def test_which_hosts_are_this_machine():
    assert all(is_loopback(host) for host in ("localhost", "127.0.0.1", "127.9.9.9", "::1", "[::1]"))
    assert not any(is_loopback(host) for host in ("0.0.0.0", "", "127.0.0.1.example", "::", "192.168.0.1"))


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_text_is_data_everywhere(tmp_path, text):
    from roll.tracking.rollouts import clean

    turn = {"number": 0, "prompt": text, "response": text, "observation": text, "tool_calls": []}
    bad = row("t", 0, 1.0, 0.0, prompt=text, response=text, payload=text, explanation=text, error=text, turns=[turn])
    folder = write_run(tmp_path / "run", {1: [bad]}, others={("dropped", 1): [bad | {"dropped": text}]})
    api = Api(named_runs([folder]))
    page = testclient.TestClient(make_app(api), base_url="http://localhost")
    answer = page.get("/api/runs/0/episode?step=1&row=0")
    assert answer.headers["content-type"] == "application/json" and answer.content.isascii()
    assert answer.json()["response"] == answer.json()["turns"][0]["observation"] == clean(text)
    assert page.get("/api/runs/0/rows", params={"kind": "dropped"}).json()["total"] == 1
    out = tmp_path / "page.html"
    assert export_page(api, out, episodes=10) == 2
    written = out.read_text(encoding="utf-8")
    assert len(re.findall(r"<script", written)) == len(re.findall(r"</script>", written)) == 3
    assert "onerror=alert" not in written.replace("\\u003cimg src=x onerror=alert", "")


# --- one file ---------------------------------------------------------------------------------------------------------


def test_the_exported_page_names_its_scripts_by_their_hashes_and_nothing_else(folder, tmp_path):
    import base64

    out = tmp_path / "page.html"
    export_page(Api(named_runs([folder])), out, episodes=10)
    page = out.read_text(encoding="utf-8")
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1]
    blocks = re.findall(r"<(?:script|script type=\"module\"|style)>(.*?)</(?:script|style)>", page, re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        assert f"'sha256-{base64.b64encode(hashlib.sha256(block.encode()).digest()).decode()}'" in policy
    outside = re.findall(r"https?://[^\s\"'`)]+", page)
    assert {re.sub(r"/leeoniya.*", "", url) for url in outside} <= {"http://www.w3.org/2000/svg", "https://github.com"}
    assert "src=" not in page.split("<body>")[0] and 'href="style' not in page
    assert str(folder) not in page


def test_the_bundle_holds_every_module_once_and_no_import():
    script = bundle()
    assert not re.search(r"^(import|export) ", script, re.MULTILINE)
    names = re.findall(r"^(?:async )?(?:function|const|let|class) (\w+)", script, re.MULTILINE)
    assert len(names) == len(set(names)), sorted({name for name in names if names.count(name) > 1})
    for module in STATIC.glob("*.js"):
        imports = [line for line in module.read_text().splitlines() if line.startswith("import")]
        assert all(re.fullmatch(r'import \{[^}]*\} from "\./\w+\.js";', line) for line in imports), module.name


def test_an_export_takes_whole_steps_spread_over_the_run(tmp_path):
    folder = write_run(tmp_path / "run", {step: group(f"t:{step}", 1.0, 0.0) for step in range(1, 10)})
    out = tmp_path / "page.html"
    assert export_page(Api(named_runs([folder])), out, episodes=6) == 6
    data = json.loads(re.search(r'id="recorded">(.*?)</script>', out.read_text(), re.DOTALL)[1])
    assert data["answers"]["/api/runs"]["runs"][0]["recorded"]["train"] == [1, 5, 9]
    assert "/api/runs/0/episode?kind=train&step=5&row=1" in data["answers"]
    assert export_page(Api(named_runs([folder])), out, episodes=100, steps=[2, 3]) == 4
    with pytest.raises(ValueError, match="no run has recorded step 99"):
        export_page(Api(named_runs([folder])), out, episodes=100, steps=[99])


# --- the package's files ----------------------------------------------------------------------------------------------


def test_code_of_others_has_its_licence_and_the_hash_that_is_written_down():
    listed = dict(re.findall(r"([0-9a-f]{64})  (\S+)", (THIRD_PARTY / "README.txt").read_text()))
    found = {p.relative_to(THIRD_PARTY).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest()
             for p in THIRD_PARTY.glob("*/*")}  # fmt: skip
    assert {name: digest for digest, name in listed.items()} == found
    assert "uplot/LICENSE" in found


def test_the_page_never_makes_elements_from_text():
    for module in STATIC.glob("*.js"):
        text = module.read_text(encoding="utf-8")
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|srcdoc", text
        ), module


def test_a_port_that_is_taken_is_named(folder):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(ValueError, match="give another --port"):
            serve(
                Api(named_runs([folder])),
                host="127.0.0.1",
                port=other.getsockname()[1],
                token="t",
                by_user=True,
                ready=print,
            )


def test_the_server_answers_over_a_socket(folder):
    address = served([folder])
    for _ in range(100):
        try:
            with urllib.request.urlopen(address + "api/runs", timeout=10) as answer:
                assert json.load(answer)["runs"][0]["name"] == "run"
                return
        except urllib.error.URLError:
            time.sleep(0.05)
    raise AssertionError("no answer")


def test_the_api_refuses_a_run_that_there_is_not(folder):
    with pytest.raises(BadQuery, match="there is no run"):
        Api(named_runs([folder])).run("1")
