"""Which replica of the proxy a request goes to: the one of its session, whoever asks.

A session belongs to the replica at which Serve's ring of hashes puts the head of its key. When that replica is
gone the ring gives another, which goes on from the session's log.
"""

from __future__ import annotations

import pickle

from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter
from ray.serve.request_router import PendingRequest

from actors.session_key import ROUTE_LENGTH, carried


class SessionRouter(ConsistentHashRouter):
    """Serve's ring, by the key of an HTTP request and by ``session_id`` of a call through a handle."""

    def _routing_key(self, pending_request: PendingRequest | None) -> str | None:
        if pending_request is not None and pending_request.metadata.is_http_request:
            key = carried(pickle.loads(pending_request.args[0]).asgi_scope)
            if key:
                return key[:ROUTE_LENGTH]
        return super()._routing_key(pending_request)
