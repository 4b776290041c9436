"""Request ids as observers must agree on them."""

from __future__ import annotations

import re

from tailscope.model import request_key

_PROMPT_INDEX = re.compile(r"-[0-9]+\Z")


def normal_request_id(request_id: str) -> str:
    """The id the client saw: vLLM appends the prompt's index to ids of the completions API only."""
    return _PROMPT_INDEX.sub("", request_id) if request_id.startswith("cmpl-") else request_id


def stored_request_id(request_id: str, hash_ids: bool) -> str:
    """The id as a trace holds it; hashed, the ids of client and engine still are equal."""
    return request_key("id", normal_request_id(request_id)) if hash_ids else request_id
