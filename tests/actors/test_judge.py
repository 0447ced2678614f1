from dataclasses import replace

import pytest

from actors.sandbox import judge
from actors.session_contract import Summary
from envs.sandbox.base import Finished

SESSION = Summary("s", 2, 10, 5, "stop", True, True, "", "", 0, {}, 1.0)


@pytest.mark.parametrize(
    ("code", "session", "ended", "reason", "status"),
    [
        (0, {}, True, "final answer", "completed"),
        (1, {}, False, "max turns", "truncated"),
        (None, {}, False, "time limit", "truncated"),
        (1, {"limit": "tokens"}, False, "error", "truncated"),
        (0, {"limit": "context", "calls": 0}, True, "final answer", "truncated"),
        (1, {"failed": "engine: gone"}, False, "error", "failed"),
        (0, {"failed": "engine: gone"}, True, "final answer", "failed"),
        (1, {"calls": 0}, False, "error", "failed"),
        (-9, {}, False, "no result", "failed"),
        (137, {}, False, "no result", "truncated"),
        (1, {}, False, "error: bad", "failed"),
    ],
)
def test_status_comes_from_the_session_first_and_from_the_harness_second(code, session, ended, reason, status):
    finished = Finished(code, b"", b"", 1.0)
    assert judge(finished, replace(SESSION, **session), ended, reason)[0] == status
