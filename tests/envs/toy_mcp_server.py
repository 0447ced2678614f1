"""An MCP server in the standard library alone, with tools that misbehave. Run as a program."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

TOOLS = ("echo", "big", "junk", "crash", "hang", "child", "variables", "listing", "reach", "fails")


def call(name, arguments):
    if name == "crash":
        print("the toy server gives up", file=sys.stderr, flush=True)
        os._exit(3)
    if name == "hang":
        time.sleep(600)
    if name == "big":
        return "x" * arguments["size"]
    if name == "junk":
        print("this is no JSON", flush=True)
        print("[1, 2]", flush=True)
    if name == "child":
        # Out of its parent's reach, as far as sessions go.
        return str(subprocess.Popen(["sleep", "600"], start_new_session=True).pid)
    if name == "variables":
        return json.dumps(dict(os.environ))
    if name == "listing":
        return json.dumps(sorted(path.name for path in Path(arguments["folder"]).iterdir()))
    if name == "reach":
        return json.dumps([Path(path).exists() for path in arguments["paths"]])
    return json.dumps(arguments)


def answer(message):
    method, params = message["method"], message.get("params", {})
    if method == "initialize":
        return {
            "protocolVersion": params["protocolVersion"],
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "toy", "version": "1"},
        }
    if method == "tools/list":
        schema = {"type": "object"}
        return {"tools": [{"name": name, "description": name, "inputSchema": schema} for name in TOOLS]}
    if method == "tools/call":
        text = call(params["name"], params.get("arguments", {}))
        return {"content": [{"type": "text", "text": text}], "isError": params["name"] == "fails"}
    return None


def main():
    for line in sys.stdin:
        message = json.loads(line)
        if "id" not in message:
            continue
        reply = {"jsonrpc": "2.0", "id": message["id"]}
        result = answer(message)
        reply |= {"error": {"code": -32601, "message": "no such method"}} if result is None else {"result": result}
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
