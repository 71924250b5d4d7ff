"""Suggest the path that a client of another server, or with a wrong base URL, may have meant."""

from __future__ import annotations

from collections.abc import Collection

# Paths of TGI, SGLang, TEI and vLLM, and their counterparts here.
OF_OTHER_SERVERS = {
    "/generate": "/v1/completions",
    "/generate_stream": "/v1/completions",
    "/inference/v1/generate": "/v1/completions",
    "/invocations": "/v1/chat/completions",
    "/embed": "/v1/embeddings",
    "/v1/embed": "/v1/embeddings",
    "/predict": "/classify",
    "/health_generate": "/health",
    "/info": "/v1/models",
    "/get_model_info": "/v1/models",
    "/model_info": "/v1/models",
    "/server_info": "/version",
    "/get_server_info": "/version",
}


def nearest_path(path: str, known: Collection[str]) -> str | None:
    """Return the path in `known` that a client which asked for `path` may have meant, or None.

    The result is the counterpart of another server's path (OF_OTHER_SERVERS). Otherwise it is `path` without a
    superfluous prefix, or with the missing prefix /v1; of several such paths, the longest.
    """
    bare = path.rstrip("/")
    if (other := OF_OTHER_SERVERS.get(bare)) in known:
        return other
    ends = [each for each in known if each != "/" and (bare.endswith(each) or each == f"/v1{bare}")]
    return max(ends, key=len, default=None)
