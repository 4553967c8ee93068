"""One HTTP request to the API server, as a program: it has to run inside the cluster's namespaces.

Standard input: `url`, `method`, `headers`, `body` (text or null), `ca` (file), `timeout` (seconds)
as JSON. Standard output: `status` and `body` as JSON. Standard library only.
"""

from __future__ import annotations

import json
import ssl
import sys
import urllib.error
import urllib.request


def main() -> None:
    """Read what to ask, ask, write the answer; an error status is an answer, too."""
    wanted = json.load(sys.stdin)
    body = wanted["body"]
    request = urllib.request.Request(
        wanted["url"],
        method=wanted["method"],
        headers=wanted["headers"],
        data=None if body is None else body.encode(),
    )
    # Whatever proxy the environment names, it is not for a server in namespaces of its own.
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}),
        urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=wanted["ca"])),
    )
    try:
        with opener.open(request, timeout=wanted["timeout"]) as answer:
            status, text = answer.status, answer.read().decode()
    except urllib.error.HTTPError as refused:
        status, text = refused.code, refused.read().decode()
    json.dump({"status": status, "body": text}, sys.stdout)


if __name__ == "__main__":
    main()
