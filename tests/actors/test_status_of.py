import operator
from dataclasses import replace

import pytest

from actors.sandbox import status_of
from actors.session_contract import Summary
from configs.schema import RunConfig
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
        (1, {}, False, "error: bad", "truncated"),
    ],
)
def test_status_comes_from_the_session_first_and_from_the_harness_second(code, session, ended, reason, status):
    finished = Finished(code, b"", b"", 1.0)
    assert status_of(finished, replace(SESSION, **session), ended, reason)[0] == status


@pytest.mark.parametrize(
    ("session", "reached", "reason"),
    [
        ({}, "", "limit: sandbox.wall_s"),
        ({}, "idle_s", "limit: sandbox.idle_s"),
        ({}, "disk_mb", "limit: sandbox.disk_mb"),
        ({}, "output_mb", "limit: sandbox.output_mb"),
        ({"limit": "calls"}, "", "limit: proxy.limits.calls"),
        ({"limit": "tokens"}, "idle_s", "limit: proxy.limits.tokens"),
        ({"limit": "context"}, "", "limit: engine.max_len"),
    ],
)
def test_a_limit_is_told_as_the_setting_that_it_is(session, reached, reason):
    finished = Finished(None, b"", b"", 1.0)
    assert status_of(finished, replace(SESSION, **session), False, "time limit", reached) == ("truncated", reason)
    group, _, name = reason.removeprefix("limit: ").rpartition(".")
    assert name in type(operator.attrgetter(group)(RunConfig())).model_fields


def test_a_harness_that_never_called_before_a_limit_is_trouble_and_no_episode():
    status, reason = status_of(Finished(None, b"", b"", 1.0), replace(SESSION, calls=0), False, "time limit", "idle_s")
    assert (status, reason) == ("failed", "the harness made no call (limit: sandbox.idle_s): it printed nothing")
