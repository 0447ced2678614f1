"""Harnesses of a few lines for tests of the environment: what they do is in the instruction's first word."""

from __future__ import annotations

import json
import os
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path


def ask(text: str, system: str = "", timeout: float = 60.0) -> str:
    """One call of the model API; its answer, or what went wrong."""
    messages = [{"role": "system", "content": system}] * bool(system) + [{"role": "user", "content": text}]
    body = json.dumps({"model": "m", "messages": messages, "max_tokens": 7, "stop": ["!"]}).encode()
    headers = {"Authorization": "Bearer " + os.environ["KEY"]}
    request = urllib.request.Request(os.environ["URL"] + "/v1/chat/completions", body, headers)
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            return json.load(response)["choices"][0]["message"]["content"]
    except urllib.error.HTTPError as error:
        return f"HTTP {error.code}"
    except OSError:
        return "no answer"


def both() -> None:
    """Two sub-agents at once, then the main line with what they were told."""
    told = {}
    threads = []
    ask("main")
    for name in ("first", "second"):
        threads.append(threading.Thread(target=lambda name=name: told.update({name: ask(name, "another agent")})))
        threads[-1].start()
        # The order of arrival is that of the calls.
        threading.Event().wait(0.3)
    for thread in threads:
        thread.join()
    ask(f"{told['first']} {told['second']}")


def impatient() -> None:
    """Takes its call back, and asks another."""
    ask("too slow", timeout=0.3)
    ask("again")


def endless() -> None:
    """Asks until it is refused."""
    while not ask("more").startswith("HTTP"):
        pass


def dies() -> None:
    ask("before")
    Path("done.txt").touch()
    os._exit(3)


PARTS = {"both": both, "impatient": impatient, "endless": endless, "dies": dies}

if __name__ == "__main__":
    PARTS[sys.argv[1]]()
