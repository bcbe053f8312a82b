"""How fast `roll view` is with 100,000 rows of 1,000 tokens: a made run, the server as a process, perhaps a browser.

    python benchmarks/view_rows.py                  # 100 steps of 1,000 rows, about 2 GB in a temporary folder
    python benchmarks/view_rows.py --rows 2000      # smaller
    python benchmarks/view_rows.py --folder RUN     # keep the run there, or use the one that is there

Prints, in milliseconds: the median and the slowest of five requests each, after one that isn't counted except for the
first paint; and the server's memory (RSS) at its highest.
"""

from __future__ import annotations

import argparse
import json
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from roll.tracking.live import LiveFiles
from roll.tracking.rollouts import write_rollouts
from roll.tracking.steplines import StepLines

ROWS_PER_STEP, GROUP = 1000, 8
LIMITS = {"first paint": 2000, "numbers and status": 300, "text": 2000, "an episode's tokens": 300}


def write_run(folder: Path, rows: int, tokens: int) -> None:
    """Write a run of random words, log-probs and advantages."""
    rng = np.random.default_rng(0)
    words = np.array([f" w{i:x}" for i in range(5000)])
    lines = StepLines(folder / "logs" / "metrics.jsonl", None)
    steps = max(1, rows // ROWS_PER_STEP)
    live = LiveFiles(
        folder / "logs", {"exp_name": "rows", "total_steps": steps, "rollouts": "../rollouts"}, resume_step=None
    )
    for step in range(1, steps + 1):
        made = [row(rng, words, step, i, tokens) for i in range(min(rows, ROWS_PER_STEP))]
        write_rollouts(folder / "rollouts", step, made, token_text=lambda ids: [str(words[one]) for one in ids])
        numbers = {f"actor/metric_{i}": float(rng.normal()) for i in range(100)}
        lines.append({"step": step, **numbers, "reward/mean": step / steps})
        live.step_done(step)
    live.end("finished")


def row(rng: Any, words: Any, step: int, number: int, tokens: int) -> dict[str, Any]:
    """Return a row whose response is nine tenths of its tokens."""
    ids = rng.integers(0, len(words), tokens)
    mask = np.arange(tokens) >= tokens // 10
    logprobs = np.where(mask, -rng.exponential(1.0, tokens), 0).astype(np.float32)
    reward = float(rng.integers(0, 2))
    prompt, response = "".join(words[ids[~mask]]), "".join(words[ids[mask]])
    task = f"made:{step}:{number // GROUP}"
    about = {"number": 0, "start": 0, "prompt_tokens": int((~mask).sum()), "response_tokens": int(mask.sum()),
             "prompt": prompt, "response": response, "reward": reward, "finish_reason": "stop"}  # fmt: skip
    return {
        "row_id": f"{task}#{number % GROUP}", "task_id": task, "domain": "made", "tag": "made",
        "member": number % GROUP,
        "status": "ok" if rng.random() > 0.1 else "truncated", "finish_reason": "stop", "prompt": prompt,
        "response": response, "token_ids": ids, "action_mask": mask, "loss_mask": mask,
        "versions": np.where(mask, step - 1, -1), "sampling_logprobs": logprobs,
        "old_logprobs": logprobs + rng.normal(0, 1e-3, tokens).astype(np.float32) * mask,
        "advantages": np.where(mask, reward - 0.5, 0).astype(np.float32), "reward": reward,
        "reward_parts": {"correct": reward}, "advantage": reward - 0.5, "num_tokens": tokens,
        "num_response_tokens": int(mask.sum()), "num_turns": 1, "num_tool_calls": 0, "version_min": step - 1,
        "version_max": step - 1, "mismatch_mean": 1e-3, "mismatch_max": float(rng.exponential(3e-3)), "turns": [about],
    }  # fmt: skip


def timed(address: str, path: str) -> float:
    """Return the milliseconds of one request, its body read and parsed."""
    begun = time.perf_counter()
    with urllib.request.urlopen(address + path, timeout=120) as answer:
        json.load(answer)
    return 1000 * (time.perf_counter() - begun)


def first_paint(address: str) -> float | None:
    """Return the milliseconds from opening the page to its first curves; None without a browser."""
    try:
        from selenium import webdriver
    except ImportError:
        return None
    if not shutil.which("chromium") or not shutil.which("chromedriver"):
        return None
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        begun = time.perf_counter()
        driver.get(address)
        while not driver.execute_script("return document.querySelectorAll('.panel canvas').length"):
            time.sleep(0.01)
        return 1000 * (time.perf_counter() - begun)
    finally:
        driver.quit()


def main() -> None:
    """Write the run, start the server, ask."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        if not (folder / "rollouts").is_dir():
            begun = time.process_time()
            write_run(folder, options.rows, options.tokens)
            print(f"writing took {time.process_time() - begun:.0f} CPU seconds, made-up numbers included")
        size = sum(path.stat().st_size for path in (folder / "rollouts").iterdir())
        print(f"{size / 2**20:,.0f} MiB of parquet")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [sys.executable, "-m", "roll.cli", "view", str(folder), "--port", str(port)]
        server = subprocess.Popen(command)
        try:
            report(server, f"http://127.0.0.1:{port}/", folder)
        finally:
            server.terminate()
            server.wait(30)


def report(server: subprocess.Popen[bytes], address: str, folder: Path) -> None:
    """Ask the server, and print how long it took."""
    wait_for(address)
    painted = first_paint(address)
    print(f"{'first paint':24} {'-' if painted is None else f'{painted:8.0f}'} ms  (limit {LIMITS['first paint']})")
    first = timed(address, "api/runs/0/rows?limit=1")
    print(f"{'first list of all rows':24} {first:8.0f} ms")
    last = max(int(path.stem[-6:]) for path in (folder / "rollouts").iterdir())
    asked = {
        "numbers and status": "api/runs/0/rows?status=truncated&min_mismatch_max=0.01&sort=mismatch_max&order=desc",
        "text": "api/runs/0/rows?q=w1a+w1b",
        "text in a step": f"api/runs/0/groups?step={last}&q=w1a",
        "a step's groups": f"api/runs/0/groups?step={last}&sort=reward_std&order=desc",
        "an episode's tokens": f"api/runs/0/episode?step={max(last // 2, 1)}&row=512",
        "largest differences": f"api/runs/0/differences?step={last}",
        "a task over the run": "api/runs/0/task?task=made:1:1",
    }
    for name, path in asked.items():
        timed(address, path)
        before = sum(psutil.Process(server.pid).cpu_times()[:2])
        times = [timed(address, path) for _ in range(5)]
        computed = 200 * (sum(psutil.Process(server.pid).cpu_times()[:2]) - before)
        limit = f"  (limit {LIMITS[name]})" if name in LIMITS else ""
        print(
            f"{name:24} {statistics.median(times):8.0f} ms, slowest {max(times):.0f}, computing {computed:.0f}{limit}"
        )
    now = psutil.Process(server.pid).memory_info().rss / 2**20
    status = Path(f"/proc/{server.pid}/status").read_text(encoding="utf-8")
    peak = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) / 2**10
    print(f"memory of the server: {now:.0f} MiB, at its highest {peak:.0f}")


def wait_for(address: str) -> None:
    """Wait until the server answers; raises `RuntimeError` after a minute."""
    for _ in range(600):
        try:
            timed(address, "api/version")
            return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError(f"nothing answers at {address}")


if __name__ == "__main__":
    main()
